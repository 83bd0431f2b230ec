"""The names that pytest's own process and the ranks have in common. Imports nothing."""

MARK = "mpwatch"
"""The mark of a test that runs on ranks."""
RANK = "mpwatch_rank"
"""The key in the `workerinput` of a configuration by which a session knows that it runs in a rank."""

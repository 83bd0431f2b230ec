"""Names that pytest's own process and the ranks share. Imports nothing."""

MARK = "mpwatch"
"""The mark of a test that runs on ranks."""
RANK_KEY = "mpwatch_rank"
"""A key in the `workerinput` of a pytest configuration. It exists only in a session that runs in a rank."""

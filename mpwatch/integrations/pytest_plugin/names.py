"""Names that are used both in pytest's own process and in the ranks. This module imports no other module."""

MARK = "mpwatch"
"""The name of the mark of tests that run on ranks."""
RANK_KEY = "mpwatch_rank"
"""A key in the `workerinput` of a pytest configuration. It exists only in a session that runs in a rank."""

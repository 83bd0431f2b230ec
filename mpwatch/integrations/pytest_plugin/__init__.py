"""The pytest plugin, which runs a test with the mark `mpwatch` on several ranks, and reports it like any other test.

    pytest (the watcher process)      each rank
    ────────────────────────────      ─────────
    collects, selects, reports        ──test──▶  a pytest session for the one module: fixtures, hooks of conftests,
    skipif and xfail marks            ◀─raises─  setup, call and teardown of the test

Tests of one module with the same options run on one WorkerGroup. pytest's own process raises the exception of the rank that
failed first, and so handles skips, expected failures and tracebacks as usual. After a failure each rank tears down all its
fixtures, as their state can differ from rank to rank. pytest loads this module by an entry point; if no test has the mark,
nothing else is imported.
"""

import pytest

MARK = "mpwatch"
RANK_KEY = "mpwatch_rank"  # in the `workerinput` of a pytest configuration, only in a session that runs in a rank


def pytest_configure(config: pytest.Config) -> None:
    text = "(nprocs='auto', **options): run the test on that many ranks; options are those of mpwatch.WorkerGroup"
    config.addinivalue_line("markers", MARK + text)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the tests with the mark `mpwatch` run on ranks, unless this pytest session itself runs in a rank."""
    marked = [item for item in session.items if item.get_closest_marker(MARK)]
    if marked and RANK_KEY not in getattr(session.config, "workerinput", {}):
        from mpwatch.integrations.pytest_plugin import controller

        plugins = session.config.pluginmanager
        if not plugins.is_registered(controller):  # a session may collect more than once
            plugins.register(controller)
        for item in marked:
            controller.redirect_to_ranks(item)

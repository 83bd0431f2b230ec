"""The pytest plugin, which runs a test with the mark `mpwatch` on several ranks, and reports it like any other test.

    @pytest.mark.mpwatch(nprocs=4, backend="gloo")
    def test_sum(model):
        ...

pytest loads the plugin through an entry point of mpwatch. If no test has the mark `mpwatch`, the plugin changes nothing, and
imports only its modules `__init__` and `names`.

    pytest (the watcher process)      each rank
    ────────────────────────────      ─────────
    collects, selects, reports        ──test──▶  a pytest session for the one module: fixtures, hooks of conftests,
    skipif and xfail marks            ◀─raises─  setup, call and teardown of the test

- Tests that are in one module and have the same options run on the same ranks, which form one WorkerGroup.
- Each rank sets up its own fixtures. A rank keeps a fixture for the next tests if the fixture's scope is wider than
  `function`. After a test fails, each rank tears down all its fixtures, because the state of a fixture can differ from rank
  to rank. The fixture `tmp_path` is the same folder in all ranks.
- In pytest's own process, the plugin raises the exception of the rank that failed first. pytest handles skips, expected
  failures and tracebacks of a marked test in the same way as for any other test. If one rank skips the test and another
  rank fails, the test fails.
- pytest's report of a test shows the output of each rank, its warnings too, in a separate section.
"""

import pytest

from mpwatch.integrations.pytest_plugin.names import MARK, RANK_KEY


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

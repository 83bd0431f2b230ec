"""The pytest plugin, which runs a test with the mark `mpwatch` on several ranks, and reports it like any other test.

    @pytest.mark.mpwatch(nprocs=4, backend="gloo")
    def test_sum(model):
        ...

pytest finds the plugin by its entry point. If no test has such a mark, the plugin changes nothing, and imports only this
module and `names`.

    pytest (the watcher process)      each rank
    ────────────────────────────      ─────────
    collects, selects, reports        ──test──▶  a pytest session for the one module: fixtures, hooks of conftests,
    skipif and xfail marks            ◀─raises─  setup, call and teardown of the test

- If tests of a module have the same options, they run on the same ranks, which are one WorkerGroup.
- Each rank has separate fixtures. Fixtures with a wider scope than `function` are kept for the next tests, until a test
  fails. After a failure, these fixtures are torn down, because their state can differ from rank to rank. `tmp_path` is the
  same folder in all ranks.
- The exception of the rank that failed first is raised in pytest's process, inside the test item. So pytest itself handles
  skips, expected failures, tracebacks and reports of other plugins. If one rank skips the test and another rank fails, the
  test fails.
- The output of each rank is a section of the report. pytest also reports the ranks' warnings and recorded properties.
"""

import pytest

from mpwatch.integrations.pytest_plugin.names import MARK, RANK_KEY


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    text = "(nprocs='auto', **options): run the test on that many ranks; options are those of mpwatch.WorkerGroup"
    config.addinivalue_line("markers", MARK + text)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Redirect the marked tests to ranks, unless this session runs in a rank itself."""
    marked = [item for item in session.items if item.get_closest_marker(MARK)]
    if marked and RANK_KEY not in getattr(session.config, "workerinput", {}):
        from mpwatch.integrations.pytest_plugin import controller

        plugins = session.config.pluginmanager
        if not plugins.is_registered(controller):  # a session may collect more than once
            plugins.register(controller)
        for item in marked:
            controller.redirect_to_ranks(item)

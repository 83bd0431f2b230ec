"""The pytest plugin: a test that is marked `mpwatch` runs on several ranks, and is reported as any other test.

    @pytest.mark.mpwatch(nprocs=4, backend="gloo")
    def test_sum(model):
        ...

pytest finds it by its entry point. It changes nothing in a run without such a mark, and imports only this module and
`names` then.

    pytest, the watcher                          each rank
    ───────────────────                          ─────────
    collects, selects, reports        ──test──▶  its own session of pytest, over the one module: fixtures, hooks of
    skipif and xfail marks            ◀─raises─  conftests, setup, call and teardown of the test

The ranks, a WorkerGroup, stay for all tests of a module that want them alike, and so do fixtures of a wider scope than
`function`, which each rank has of its own, until a test fails: then they are torn down, since the ranks may be out of step.
`tmp_path` alone is the same folder in all of them.

What a test raises in the rank that fails first is raised here, by the item that pytest knows, so that what comes of it
(skips, expected failures, tracebacks, reports of other plugins) is pytest's own work. A skip in one rank is no excuse for
another that fails. What each rank printed is a section of the report; warnings and recorded properties are told here, too.
"""

import pytest

from mpwatch.integrations.pytest_plugin.names import MARK, RANK


def pytest_configure(config: pytest.Config) -> None:
    """Names the mark."""
    text = "(nprocs='auto', **options): run the test on that many ranks; options are those of mpwatch.WorkerGroup"
    config.addinivalue_line("markers", MARK + text)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is marked by now is run on ranks, unless this is one."""
    marked = [item for item in session.items if item.get_closest_marker(MARK)]
    if marked and RANK not in getattr(session.config, "workerinput", {}):
        from mpwatch.integrations.pytest_plugin import controller

        plugins = session.config.pluginmanager
        if not plugins.is_registered(controller):  # else this session collects once more
            plugins.register(controller)
        for item in marked:
            controller.run_on_ranks(item)

"""In a rank: a session of pytest over one module, in which the items that the watcher names are run."""

import os
import sys
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.config import _prepareconfig

from mpwatch import current_worker

from . import RANK

__all__ = ["Recipe", "finish", "prepare", "run_item"]

# Plugins for what is the watcher's business, by whom their options are understood all the same: coverage, reports, workers
# of its own, and the stack of a rank that crashes, which goes into mpwatch's report ...
NOT_CONFIGURED = ("_cov", "faulthandler", "terminal", "xdist")
# ... and those that make their marks known first: a rank alone does not try again, nor is it its own clock
NOT_KEPT = ("rerunfailures", "timeout")
# A plugin's package is to be imported by pytest, so that its assertions can be rewritten; here mpwatch was there before it.
QUIETLY = ("-W", "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning")


@dataclass(frozen=True)
class Recipe:
    """What a session is made from, the same in all ranks."""

    args: tuple[str, ...]
    """Those that pytest was called with."""
    folder: str
    """The one that it was called in."""
    module: str
    """The file with the tests."""
    scratch: str
    """A folder for temporary files."""
    inputs: dict[str, Any]
    """What plugins may look for in a worker."""


def prepare(recipe: Recipe, *, is_in_step: bool) -> None:
    """Have a session, which may take the time of heavy imports; and nothing from before, if ranks are out of step."""
    __tracebackhide__ = True
    session = _session(recipe)
    if not is_in_step:
        session.tear_down()


def run_item(recipe: Recipe, nodeid: str, shared: dict[str, Any]) -> None:
    """Set up the test, call it, and tear it down. Raises whatever it, or one of its fixtures, raises."""
    __tracebackhide__ = True
    _session(recipe).run(nodeid, shared)


def finish() -> None:
    """Tear down all fixtures, and end the session."""
    __tracebackhide__ = True
    session = current_worker().state.pop(RANK, None)
    if session is not None:
        session.finish()


def _session(recipe: Recipe) -> "Session":
    __tracebackhide__ = True
    state = current_worker().state
    if RANK not in state:
        state[RANK] = Session(recipe)
    session: Session = state[RANK]
    return session


class Session:
    """A session of pytest, and at the same time its plugin, by which it hears what becomes of the items."""

    def __init__(self, recipe: Recipe) -> None:
        rank = current_worker().rank
        self._items: dict[str, pytest.Item] = {}
        self._errors: list[str] = []
        self._shared: dict[str, Any] = {}
        os.chdir(recipe.folder)
        scratch = f"--basetemp={recipe.scratch}/rank{rank}"
        self._config = config = _prepareconfig([*recipe.args, "--capture=no", *QUIETLY, scratch], [self])
        # what xdist's workers have: plugins that do something once for a whole run look for it
        workerid = f"{recipe.inputs.get('workerid', '')}rank{rank}"
        config.workerinput = recipe.inputs | {"workerid": workerid, RANK: rank}  # type: ignore[attr-defined]
        config.args = [recipe.module]
        config.option.usepdb = config.option.trace = False  # there is nobody to talk to
        self._drop(NOT_CONFIGURED)
        config._do_configure()
        self._drop(NOT_KEPT)
        self._session = pytest.Session.from_config(config)
        config.hook.pytest_sessionstart(session=self._session)
        config.hook.pytest_collection(session=self._session)

    def run(self, nodeid: str, shared: dict[str, Any]) -> None:
        __tracebackhide__ = True
        item = self._items.get(nodeid) or self._lack(nodeid)
        self._shared = shared
        self._failure: tuple[pytest.CallInfo[None], pytest.TestReport] | None = None
        # which test comes next is not known here: what this one does not need is torn down first, what is its own at its end
        self.tear_down(but_for=item)
        item.ihook.pytest_runtest_protocol(item=item, nextitem=item.parent)
        if self._failure is not None:
            raise _error_of(*self._failure)

    def _drop(self, names: Iterable[str]) -> None:
        plugins = self._config.pluginmanager
        for plugin in filter(None, map(plugins.get_plugin, names)):
            plugins.unregister(plugin)

    def _lack(self, nodeid: str) -> NoReturn:
        """This frame is not hidden: of an error without any, pytest says that there are hidden ones."""
        text = f"rank {current_worker().rank} has collected no {nodeid}"
        raise pytest.fail.Exception("\n".join([text, *self._errors]), pytrace=False)

    def tear_down(self, but_for: pytest.Item | None = None) -> None:
        """All that is set up, but for what this item needs."""
        __tracebackhide__ = True
        self._session._setupstate.teardown_exact(but_for)

    def finish(self) -> None:
        __tracebackhide__ = True
        try:
            self.tear_down()
            self._config.hook.pytest_sessionfinish(session=self._session, exitstatus=pytest.ExitCode.OK)
        finally:
            self._config._ensure_unconfigure()

    @pytest.fixture
    def tmp_path(self) -> Path:
        """A folder for the test, the same in all ranks."""
        return Path(self._shared["tmp_path"])

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._items[item.nodeid] = item

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._errors.append(report.longreprtext)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.excinfo is not None and self._failure is None:
            self._failure = call, report
            for title, text in report.sections:  # what logging has kept; it would be lost with the report
                sys.stderr.write(f"{title}:\n{text}\n")
        return report


def _error_of(call: pytest.CallInfo[None], report: pytest.TestReport) -> BaseException:
    assert call.excinfo is not None
    error = call.excinfo.value
    if report.skipped and hasattr(report, "wasxfail") and not isinstance(error, pytest.xfail.Exception):
        expected = pytest.xfail.Exception(report.wasxfail)  # by a mark that the watcher may not know: it came in a fixture
        expected.__cause__ = error
        return expected
    return error

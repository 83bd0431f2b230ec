"""In a rank: a session of pytest over one module, in which the items that the watcher names are run."""

import io
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from warnings import WarningMessage, formatwarning

import pytest
from _pytest._code.code import ExceptionRepr
from _pytest.config import ConftestImportFailure, _prepareconfig, create_terminal_writer

from mpwatch import current_worker
from mpwatch.integrations.pytest_plugin.names import RANK

# Plugins whose options are understood here, and whose work is the watcher's: coverage, processes of its own, the stack of a
# rank that crashes, which goes into mpwatch's report; a rank alone does not try again, nor is it its own clock. Some have
# another name where they are loaded by -p.
LEFT_OUT = (
    *("_cov", "faulthandler", "xdist", "xdist.plugin"),
    *("rerunfailures", "pytest_rerunfailures", "timeout", "pytest_timeout"),
)
FOR_PEOPLE = ("setuponly", "setupshow", "trace", "usepdb")  # options that show or ask something; there is nobody here
# A plugin's package is to be imported by pytest, so that its assertions can be rewritten; here mpwatch was there before it.
QUIETLY = ("-W", "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning")


@dataclass(frozen=True)
class SessionConfig:
    """What a session is made from, the same in all ranks."""

    args: tuple[str, ...]
    """Those that pytest was called with, and one by which it leaves what ranks print to mpwatch."""
    folder: str
    """The one that it was called in."""
    module: str
    """The file with the tests."""
    scratch: str
    """A folder for temporary files."""
    inputs: dict[str, Any]
    """What plugins may look for in a worker."""
    markers: tuple[str, ...]
    """The marks that are known, those of plugins that are left out here among them."""


Name = tuple[str, ...]  # of a test in its module, with its classes; plugins change the id that is shown


@dataclass(frozen=True)
class TestRequest:
    """A test that is to be run."""

    name: Name
    following: Name | None
    """The test that comes next, if that is in the same module."""
    shared: dict[str, Any]
    """Values of fixtures by name."""


@dataclass(frozen=True)
class PassedTestData:
    """What a report tells of a test that has passed, beside what it printed."""

    warnings: list[WarningMessage] = field(default_factory=list)
    properties: list[tuple[str, object]] = field(default_factory=list)


def module_of(item: pytest.Item) -> pytest.File:
    """The file that has the test, of whatever kind."""
    return next(node for node in item.listchain() if isinstance(node, pytest.File))


def name_in_module(item: pytest.Item) -> Name:
    """By which the watcher and the ranks mean the same test."""
    chain = item.listchain()
    return tuple(node.name for node in chain[chain.index(module_of(item)) + 1 :])


def prepare(recipe: SessionConfig) -> None:
    """Have a session. It may take the time of heavy imports, which is not the test's."""
    __tracebackhide__ = True
    _session(recipe)


def run_item(recipe: SessionConfig, order: TestRequest) -> PassedTestData:
    """Set up the test, call it, and tear it down. Raises whatever it, or one of its fixtures, raises."""
    __tracebackhide__ = True
    return _session(recipe).run(order)


def _session(recipe: SessionConfig) -> "RankSession":
    """That of this rank, which may have been started anew since it was prepared."""
    __tracebackhide__ = True
    state = current_worker().state
    if RANK not in state:
        state[RANK] = RankSession(recipe)
    session: RankSession = state[RANK]
    return session


def tear_down() -> None:
    """All that is set up."""
    __tracebackhide__ = True
    session = current_worker().state.get(RANK)
    if session is not None:
        session.tear_down()


def finish() -> None:
    """Tear down all fixtures, and end the session."""
    __tracebackhide__ = True
    session = current_worker().state.pop(RANK, None)
    if session is not None:
        session.finish()


class _NullTerminal(io.StringIO):
    """A terminal that nobody reads, and that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


class RankSession:
    """A session of pytest, and at the same time its plugin, by which it hears what becomes of the items."""

    def __init__(self, recipe: SessionConfig) -> None:
        rank = current_worker().rank
        self._collected: list[pytest.Item] = []
        self._errors: list[str] = []
        self._shared: dict[str, Any] = {}
        os.chdir(recipe.folder)
        scratch = f"--basetemp={recipe.scratch}/rank{rank}"
        try:
            self._config = config = _prepareconfig([*recipe.args, *QUIETLY, scratch], [self])
        except ConftestImportFailure as failure:  # of which nothing but its text would come through
            raise failure.cause from None
        # what xdist's workers have: plugins that do something once for a whole run look for it
        workerid = f"{recipe.inputs.get('workerid', '')}rank{rank}"
        config.workerinput = recipe.inputs | {"workerid": workerid, RANK: rank}  # type: ignore[attr-defined]
        config.args = [recipe.module]
        for option in FOR_PEOPLE:
            setattr(config.option, option, False)
        config.option.no_summary = True
        plugins = config.pluginmanager
        for plugin in filter(None, map(plugins.get_plugin, LEFT_OUT)):
            plugins.unregister(plugin)
        for line in recipe.markers:
            config.addinivalue_line("markers", line)
        try:
            config._do_configure()
            if (reporter := plugins.get_plugin("terminalreporter")) is not None:  # which plugins, and pytest itself, ask
                reporter._tw = create_terminal_writer(config, _NullTerminal())
            self._session = pytest.Session.from_config(config)
            config.hook.pytest_sessionstart(session=self._session)
            config.hook.pytest_collection(session=self._session)
        except BaseException:
            config._ensure_unconfigure()
            raise
        # those that are not selected, too: which of a module's tests are, the watcher knows better
        self._items = {name_in_module(item): item for item in self._collected}

    def run(self, order: TestRequest) -> PassedTestData:
        __tracebackhide__ = True
        item = self._items.get(order.name)
        if item is None:
            text = f"rank {current_worker().rank} has collected no {'::'.join(order.name)}"
            raise pytest.fail.Exception("\n".join([text, *self._errors]), pytrace=False)
        self._shared = order.shared
        self._calls: list[tuple[pytest.CallInfo[None], pytest.TestReport]] = []
        self._findings = PassedTestData(properties=item.user_properties)
        item.user_properties.clear()  # it may be run again
        self.tear_down(but_for=item)  # the one that was to follow may have been skipped
        nextitem = item.parent if order.following is None else self._items.get(order.following, item.parent)
        item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        if (error := self._error()) is not None:
            raise error
        return self._findings

    def _error(self) -> BaseException | None:
        """What the test has failed with, or else why it was skipped, or is expected to fail."""
        failed = [(call, report) for call, report in self._calls if report.failed and call.excinfo is not None]
        # of subtests that are skipped nothing is told, if the test then passes
        last = {report.when: (call, report) for call, report in self._calls}.values()
        ended = failed or [(call, report) for call, report in last if call.excinfo is not None]
        if not ended:
            return None
        for _, report in failed[1:]:
            sys.stderr.write(f"{report.longreprtext}\n")
        # what logging has kept, and warnings, would be lost with the report
        for title, text in self._calls[-1][1].sections:
            sys.stderr.write(f"{title}:\n{text}\n")
        for known in self._findings.warnings:
            sys.stderr.write(formatwarning(known.message, known.category, known.filename, known.lineno))
        return _error_of(*ended[0])

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
        self._collected.append(item)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._errors.append(report.longreprtext)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._calls.append((call, report))
        return report

    def pytest_warning_recorded(self, warning_message: WarningMessage, when: str) -> None:
        if when == "runtest":  # others come in the watcher, too
            known = warning_message  # it may hold on to anything
            self._findings.warnings.append(WarningMessage(str(known.message), known.category, known.filename, known.lineno))


def _error_of(call: pytest.CallInfo[None], report: pytest.TestReport) -> BaseException:
    assert call.excinfo is not None
    error = call.excinfo.value
    if report.skipped and hasattr(report, "wasxfail") and not isinstance(error, pytest.xfail.Exception):
        expected = pytest.xfail.Exception(report.wasxfail)  # by a mark that the watcher may not know: it came in a fixture
        expected.__cause__ = error
        return expected
    if isinstance(error, pytest.skip.Exception) or isinstance(report.longrepr, ExceptionRepr):
        return error
    # pytest tells it in words of its own, made from what may not come through: a fixture that is not found, a doctest
    return pytest.fail.Exception(report.longreprtext, pytrace=False)

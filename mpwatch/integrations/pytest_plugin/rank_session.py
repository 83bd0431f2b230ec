"""The part of the pytest plugin that runs in each rank, and makes a pytest session there for one test module.

The controller (controller.py, in pytest's own process) calls `prepare_session` and `run_item` for each test. By
`call_session` it calls `tear_down` after a failed test, and finally `end`.
"""

import io
import os
import pdb  # noqa: T100  for the option --pdb
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from warnings import WarningMessage, formatwarning

import pytest
from _pytest._code.code import ExceptionRepr
from _pytest.config import ConftestImportFailure, _prepareconfig, create_terminal_writer

from mpwatch import current_worker

SESSION = "mpwatch: pytest session"  # a key of `current_worker().state`
# These plugins are unregistered in a rank, since the watcher does their work: coverage, other processes, reruns, time
# limits, and the stack of a crash, which is in mpwatch's report. The rank still accepts the options of these plugins. If a
# plugin is loaded by -p, it has another name.
UNREGISTERED_PLUGINS = (
    *("_cov", "faulthandler", "xdist", "xdist.plugin"),
    *("rerunfailures", "pytest_rerunfailures", "timeout", "pytest_timeout"),
)
INTERACTIVE_OPTIONS = ("setuponly", "setupshow", "trace", "usepdb")  # options that use a terminal
# pytest warns about a plugin that was imported before pytest could rewrite its assertions. In a rank mpwatch is imported
# before pytest.
IGNORE_REWRITE_WARNING = (
    "-W",
    "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning",
)


@dataclass(frozen=True)
class SessionConfig:
    args: tuple[str, ...]
    """The arguments of pytest. `--capture=no` is added, because mpwatch captures the output of ranks."""
    invocation_dir: str
    """The folder in which pytest was called."""
    module: str
    """The file with the tests."""
    temporary_dir: str
    """A folder for temporary files."""
    worker_input: dict[str, Any]
    """Values that plugins read from the `workerinput` of an xdist worker."""
    markers: tuple[str, ...]
    """The known marks. They include the marks of plugins that are unregistered in ranks."""


NameInModule = tuple[str, ...]  # the names of the classes and the test. Plugins may change the id that pytest shows


@dataclass(frozen=True)
class TestRequest:
    name: NameInModule
    next_name: NameInModule | None
    """The test that follows this test, or None if that test is in another module."""
    tmp_path: Path | None
    """The value of this fixture, which the controller has set up."""


def get_module(item: pytest.Item) -> pytest.File:
    return next(node for node in item.listchain() if isinstance(node, pytest.File))


def get_name_in_module(item: pytest.Item) -> NameInModule:
    chain = item.listchain()
    return tuple(node.name for node in chain[chain.index(get_module(item)) + 1 :])


def prepare_session(config: SessionConfig) -> None:
    """Make the session, if there is none: before the timeout of the test begins, since this may import large modules."""
    __tracebackhide__ = True
    state = current_worker().state
    if SESSION not in state:
        state[SESSION] = RankSession(config)


def run_item(config: SessionConfig, request: TestRequest) -> None:
    """Set up the test, call it, and tear it down. If the test fails or is skipped, raise an exception that says why."""
    __tracebackhide__ = True
    prepare_session(config)  # the rank may have been restarted
    call_session(RankSession.run_item, request)


def call_session(method: Callable[..., None], *args: Any) -> None:
    """Call a method of RankSession, if there is a session."""
    __tracebackhide__ = True
    if (session := current_worker().state.get(SESSION)) is not None:
        method(session, *args)


class RankSession:
    """A pytest session in a rank, and a plugin of this session."""

    def __init__(self, config: SessionConfig) -> None:
        rank = current_worker().rank
        self._collected_items: list[pytest.Item] = []
        self._collection_errors: list[str] = []
        os.chdir(config.invocation_dir)
        base_temp = f"--basetemp={config.temporary_dir}/rank{rank}"
        try:
            self._config = pytest_config = _prepareconfig([*config.args, *IGNORE_REWRITE_WARNING, base_temp], [self])
        except ConftestImportFailure as failure:  # this exception cannot be sent, so only its text would arrive
            raise failure.cause from None
        # An xdist worker has a `workerinput`. If it exists, plugins do not do what must be done only once in a whole run.
        worker_id = f"{config.worker_input.get('workerid', '')}rank{rank}"
        worker_input = config.worker_input | {"workerid": worker_id}
        pytest_config.workerinput = worker_input  # type: ignore[attr-defined]
        pytest_config.args = [config.module]
        self._opens_debugger = bool(pytest_config.option.usepdb)
        for option in INTERACTIVE_OPTIONS:
            setattr(pytest_config.option, option, False)
        pytest_config.option.no_summary = True
        plugins = pytest_config.pluginmanager
        for plugin in filter(None, map(plugins.get_plugin, UNREGISTERED_PLUGINS)):
            plugins.unregister(plugin)
        for line in config.markers:
            pytest_config.addinivalue_line("markers", line)
        try:
            pytest_config._do_configure()
            if (reporter := plugins.get_plugin("terminalreporter")) is not None:  # plugins and pytest itself need one
                reporter._tw = create_terminal_writer(pytest_config, io.StringIO())  # which nobody reads
            self._session = pytest.Session.from_config(pytest_config)
            pytest_config.hook.pytest_sessionstart(session=self._session)
            pytest_config.hook.pytest_collection(session=self._session)
        except BaseException:
            pytest_config._ensure_unconfigure()
            raise
        # Deselected items are included, since the controller has already selected the tests.
        self._items = {get_name_in_module(item): item for item in self._collected_items}

    def run_item(self, request: TestRequest) -> None:
        __tracebackhide__ = True
        item = self._items.get(request.name)
        if item is None:
            name = "::".join(request.name)
            text = f"rank {current_worker().rank} did not collect the test {name}; all ranks must collect the same tests"
            raise pytest.fail.Exception("\n".join([text, *self._collection_errors]), pytrace=False)
        self._tmp_path = request.tmp_path
        self._reports: list[tuple[pytest.CallInfo[None], pytest.TestReport]] = []
        self.tear_down(keep_for=item)  # if the expected next test was skipped, its fixtures are still set up
        next_item = item.parent if request.next_name is None else self._items.get(request.next_name, item.parent)
        item.ihook.pytest_runtest_protocol(item=item, nextitem=next_item)
        if (error := self._find_error()) is not None:
            raise error

    def _find_error(self) -> BaseException | None:
        """Return the exception for the test: that of the first failure, or else of the skip or the xfail. The rank sends
        only this one, so further failures and captured logging go to stderr.
        """
        failed = [(call, report) for call, report in self._reports if report.failed and call.excinfo is not None]
        # If a subtest is skipped and the test passes, the skip is not reported. Only the last report of each phase counts.
        last_reports = {report.when: (call, report) for call, report in self._reports}.values()
        errors = failed or [(call, report) for call, report in last_reports if call.excinfo is not None]
        if not errors:
            return None
        for _, report in failed[1:]:
            sys.stderr.write(f"{report.longreprtext}\n")
        for title, text in self._reports[-1][1].sections:
            sys.stderr.write(f"{title}:\n{text}\n")
        return _make_sendable_error(*errors[0])

    def tear_down(self, keep_for: pytest.Item | None = None) -> None:
        """Tear down the fixtures of this rank. If `keep_for` is a test, keep each fixture whose scope includes this test."""
        __tracebackhide__ = True
        self._session._setupstate.teardown_exact(keep_for)

    def end(self) -> None:
        __tracebackhide__ = True
        try:
            self.tear_down()
            self._config.hook.pytest_sessionfinish(session=self._session, exitstatus=pytest.ExitCode.OK)
        finally:
            self._config._ensure_unconfigure()

    @pytest.fixture
    def tmp_path(self) -> Path | None:
        """Return the temporary folder of the test, which is the same folder in all ranks."""
        return self._tmp_path

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._collected_items.append(item)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collection_errors.append(report.longreprtext)

    def pytest_exception_interact(self, call: pytest.CallInfo[None]) -> None:
        """Open pdb in the terminal in which pytest was started, if the option `--pdb` is set."""
        if self._opens_debugger and call.excinfo is not None:
            with suppress(RuntimeError):  # the controller has no terminal
                pdb.post_mortem(call.excinfo.tb)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._reports.append((call, report))
        return report

    def pytest_warning_recorded(self, warning_message: WarningMessage, when: str) -> None:
        if when == "runtest":  # other warnings are issued in the watcher, too
            where = warning_message.filename, warning_message.lineno
            sys.stderr.write(formatwarning(warning_message.message, warning_message.category, *where))


def _make_sendable_error(call: pytest.CallInfo[None], report: pytest.TestReport) -> BaseException:
    assert call.excinfo is not None
    error = call.excinfo.value
    if report.skipped and hasattr(report, "wasxfail") and not isinstance(error, pytest.xfail.Exception):
        # The mark may come from a fixture, so the controller may not know that the failure is expected.
        expected = pytest.xfail.Exception(report.wasxfail)
        expected.__cause__ = error
        return expected
    if isinstance(error, pytest.skip.Exception) or isinstance(report.longrepr, ExceptionRepr):
        return error
    # For this error pytest prints a special text, as for a missing fixture or a doctest. The error's data may not be
    # picklable.
    return pytest.fail.Exception(report.longreprtext, pytrace=False)

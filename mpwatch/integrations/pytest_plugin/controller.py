"""The part of the pytest plugin that runs in pytest's own process, and makes the ranks run each marked test.

`redirect_to_ranks` makes pytest call `_run_test` instead of the function of a marked test. Tests that are in one module and
have the same options share one `ModuleGroup`. The module `rank_session` has the code that runs in the ranks.
"""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mpwatch import Backend, LaunchError, LogSpec, ProcessFailure, RunFailedError, RunResult, WorkerGroup, WorkerState
from mpwatch.integrations.pytest_plugin import MARK, RANK_KEY
from mpwatch.integrations.pytest_plugin.rank_session import (
    RankSession,
    SessionConfig,
    TestRequest,
    call_session,
    get_module,
    get_name_in_module,
    prepare_session,
    run_item,
)

TMP_PATH = "tmp_path"  # set up in this process, and sent to all ranks
TMP_PATH_FACTORY = "tmp_path_factory"  # pytest keeps its folders for some time after the tests
STALL_SECONDS = 5.0  # for ranks that do not meet in a collective: steps of tests are shorter than those of trainings
PLAIN_TYPES = str | int | float | bool | None
SKIP_OR_XFAIL = (pytest.skip.Exception, pytest.xfail.Exception)
DEBUGGER_PLUGIN = "pdbinvoke"  # the plugin of pytest that opens pdb after a failure
MODULE_GROUPS = pytest.StashKey[list["ModuleGroup"]]()  # in the stash of a module
NEXT_ITEM = pytest.StashKey[pytest.Item | None]()  # in the stash of an item


def redirect_to_ranks(item: pytest.Item) -> None:
    """Make pytest run the test in the ranks, which also set up the fixtures of the test."""
    names = getattr(item, "fixturenames", [])
    names[:] = [TMP_PATH_FACTORY, *(name for name in names if name == TMP_PATH)]
    item.runtest = partial(_run_test, item)  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, bool | None, bool | None]:
    """Store the next test: the ranks keep each fixture whose scope includes it. With `--pdb`, pytest's plugin for pdb is off
    during a marked test, for which pdb opens in the rank.
    """
    item.stash[NEXT_ITEM] = nextitem
    plugins = item.config.pluginmanager
    debugger = plugins.get_plugin(DEBUGGER_PLUGIN) if item.get_closest_marker(MARK) else None
    if debugger is not None:
        plugins.unregister(debugger)
    try:
        return (yield)
    finally:
        if debugger is not None:
            plugins.register(debugger, DEBUGGER_PLUGIN)


def _run_test(item: pytest.Item) -> None:
    __tracebackhide__ = True
    options = _merge_marks(item)
    timeout = options.pop("timeout", None)
    _raise_failure(*_get_group(item, options).run_test(item, timeout))


def _merge_marks(item: pytest.Item) -> dict[str, Any]:
    """The mark of the test itself has priority over those of its class and module."""
    options: dict[str, Any] = {}
    for mark in reversed(list(item.iter_markers(MARK))):
        options.update(zip(("nprocs",), mark.args, strict=False), **mark.kwargs)
    return options


def _get_group(item: pytest.Item, options: dict[str, Any]) -> "ModuleGroup":
    __tracebackhide__ = True
    module = get_module(item)
    groups = module.stash.setdefault(MODULE_GROUPS, [])
    for group in groups:
        if group.options == options:
            return group
    group = ModuleGroup(options, item, module.path)
    groups.append(group)
    module.addfinalizer(partial(_close_group, groups, group))
    return group


def _close_group(groups: list["ModuleGroup"], group: "ModuleGroup") -> None:
    __tracebackhide__ = True
    groups.remove(group)
    _raise_failure(*group.close())


class ModuleGroup:
    def __init__(self, options: dict[str, Any], item: pytest.Item, module: Path) -> None:
        self.options = options
        folder = _get_fixture_values(item)[TMP_PATH_FACTORY].mktemp("mpwatch")
        capture = item.config.getoption("capture", "no")
        log_dir = None if capture == "no" else folder / "logs"
        logs = LogSpec(log_dir, show="all" if capture in {"no", "tee-sys"} else "none")
        self._session_config = _make_session_config(item.config, module, folder)
        self._last_timeout: float | None = None  # the timeout of the last test
        self._read_positions: dict[Path, int] = {}  # for each log file, the position up to which it was read
        try:
            if not isinstance(backend := options.get("backend"), Backend):
                options = {**options, "backend": Backend(backend, stall_after=STALL_SECONDS)}
            self._group = WorkerGroup(**options, logs=logs, progress=False, check=False)
        except (TypeError, ValueError) as error:
            _fail_bad_mark(str(error))
        except LaunchError as error:
            _fail_without_traceback(str(error))

    def run_test(self, item: pytest.Item, timeout: float | None) -> list[RunResult[Any]]:
        """Run the test in all ranks, and add its output to pytest's report. Return the results of failed calls."""
        __tracebackhide__ = True
        next_item = item.stash.get(NEXT_ITEM, None)
        request = TestRequest(
            name=get_name_in_module(item),
            next_name=get_name_in_module(next_item) if next_item and get_module(next_item) is get_module(item) else None,
            tmp_path=_get_fixture_values(item).get(TMP_PATH),
        )
        result = self._call(partial(prepare_session, self._session_config))
        if not _has_failed(result):
            with _terminal_input(item.config):
                result = self._call(partial(run_item, self._session_config, request), timeout)
            self._last_timeout = timeout
        self._add_report_sections(item, "call", result)
        if not _has_failed(result):
            return []
        # The next call gets a new process group, and fixtures may have references to the old process group.
        later = self._call_if_healthy(RankSession.tear_down)
        for each in later:
            self._add_report_sections(item, "teardown", each)
        return [result, *filter(_has_failed, later)]

    def close(self) -> list[RunResult[Any]]:
        """Tear down the remaining fixtures, and end the ranks. Return the results of failed calls."""
        __tracebackhide__ = True
        with self._group:
            results = self._call_if_healthy(RankSession.end)
        for result in results:
            for title, text in self._read_new_output(result):
                sys.stdout.write(f"{title}:\n{text}")
        return [*filter(_has_failed, results)]

    def _call_if_healthy(self, method: Callable[[RankSession], None]) -> list[RunResult[Any]]:
        """If the WorkerGroup is healthy, call a method of all sessions, with the timeout that the last test had."""
        __tracebackhide__ = True
        is_healthy = self._group.state is WorkerState.HEALTHY
        return [self._call(partial(call_session, method), self._last_timeout)] if is_healthy else []

    def _call(self, fn: Callable[[], None], timeout: float | None = None) -> RunResult[Any]:
        __tracebackhide__ = True
        try:
            return self._group.run(fn, timeout=timeout)
        except (TypeError, ValueError) as error:  # the timeout is bad, as the user chooses no other argument
            _fail_bad_mark(str(error))
        except LaunchError as error:
            _fail_without_traceback(str(error))

    def _add_report_sections(self, item: pytest.Item, when: str, result: RunResult[Any]) -> None:
        for title, text in self._read_new_output(result):
            item.add_report_section(when, title, text)

    def _read_new_output(self, result: RunResult[Any]) -> Iterator[tuple[str, str]]:
        for worker in result.workers:
            folder = Path(result.log_dir, f"attempt_{worker.restart_count}", str(worker.rank))
            for path in (folder / "stdout.log", folder / "stderr.log"):
                if not path.exists():  # with -s there are no log files
                    continue
                with path.open("rb") as file:
                    file.seek(self._read_positions.get(path, 0))
                    text = file.read().decode(errors="replace")
                    self._read_positions[path] = file.tell()
                if text:
                    yield f"{path.stem} of rank {worker.rank}", text


def _make_session_config(config: pytest.Config, module: Path, folder: Path) -> SessionConfig:
    # Plugins that support xdist pass values to its workers in `workerinput`. For example, pytest-randomly passes its seed.
    # These values have the names of options.
    options = {name: value for name, value in vars(config.option).items() if isinstance(value, PLAIN_TYPES)}
    return SessionConfig(
        args=(*map(str, config.invocation_params.args), "--capture=no"),
        invocation_dir=str(config.invocation_params.dir),
        module=str(module),
        temporary_dir=str(folder),
        worker_input={**options, **getattr(config, "workerinput", {}), RANK_KEY: True},
        markers=tuple(config.getini("markers")),
    )


@contextmanager
def _terminal_input(config: pytest.Config) -> Iterator[None]:
    """Stop pytest's capture of stdin, so that a debugger can read from the terminal."""
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.suspend(in_=True)
    try:
        yield
    finally:
        capture.resume()


def _get_fixture_values(item: pytest.Item) -> dict[str, Any]:
    return getattr(item, "funcargs", {})


def _has_failed(result: RunResult[Any]) -> bool:
    return result.state is not WorkerState.SUCCEEDED


def _raise_failure(*failed: RunResult[Any]) -> None:
    """Raise the exception of the rank that failed first, with notes about other ranks and later failures."""
    __tracebackhide__ = True
    if not failed:
        return
    causes = [_find_cause(result) for result in failed]
    first = next((n for n, cause in enumerate(causes) if not _is_skip_or_xfail(cause)), 0)
    result, cause = failed[first], causes[first]
    later = [f"later, when fixtures were torn down: {RunFailedError(each)}" for each in failed[first + 1 :]]
    if cause is None or cause.exception is None:  # a rank died, or the timeout expired
        _fail_without_traceback("\n".join([str(RunFailedError(result)), *later]))
    error = cause.exception
    if _is_skip_or_xfail(cause):
        raise error
    others = result.fates if cause is result.root_cause else [result.verdict]
    notes = [f"in rank {cause.rank} of {len(result.workers)}", *(f"  {line}" for line in others), *later]
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:  # pytest shows no notes of such an exception
        _fail_without_traceback("\n".join([str(error), *notes]))
    error.add_note("\n".join(notes))
    raise error


def _find_cause(result: RunResult[Any]) -> ProcessFailure | None:
    """Return the root cause, or an unexpected failure of another rank if that is a skip or an expected failure."""
    root_cause = result.root_cause
    if not _is_skip_or_xfail(root_cause):
        return root_cause
    others = result.failures.values()
    return next((other for other in others if not other.is_secondary and not _is_skip_or_xfail(other)), root_cause)


def _is_skip_or_xfail(failure: ProcessFailure | None) -> bool:
    return failure is not None and isinstance(failure.exception, SKIP_OR_XFAIL)


def _fail_bad_mark(reason: str) -> NoReturn:
    __tracebackhide__ = True
    _fail_without_traceback(f"mark {MARK}: {reason}")


def _fail_without_traceback(text: str) -> NoReturn:
    """Without `__tracebackhide__`: pytest would print a text about hidden frames if all are hidden."""
    raise pytest.fail.Exception(text, pytrace=False) from None

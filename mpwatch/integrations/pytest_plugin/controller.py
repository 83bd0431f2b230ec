"""In pytest's own process: items that run on ranks instead of here, and the ranks that a module has for them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest

from mpwatch import LaunchError, LogSpec, ProcessFailure, RunFailedError, RunResult, WorkerGroup, WorkerState
from mpwatch.integrations.pytest_plugin.names import MARK
from mpwatch.integrations.pytest_plugin.rank_session import (
    PassedTestData,
    SessionConfig,
    TestRequest,
    finish,
    module_of,
    name_in_module,
    prepare,
    run_item,
    tear_down,
)

T = TypeVar("T")
SHARED = ("tmp_path",)  # fixtures that are made here, and are the same in all ranks
FOLDERS = "tmp_path_factory"  # the fixture that makes folders which outlive the tests for some time
OF_THE_PLUGIN = ("check", "logs", "progress")  # options that it chooses itself
PLAIN = str | int | float | bool | None
LENIENT = (pytest.skip.Exception, pytest.xfail.Exception)  # in a rank, they excuse no failure of another
GROUPS = pytest.StashKey[list["ModuleGroup"]]()  # of a module
NEXT = pytest.StashKey[pytest.Item | None]()


def run_on_ranks(item: pytest.Item) -> None:
    """From now on its fixtures and its body are the business of the ranks."""
    names = getattr(item, "fixturenames", [])
    names[:] = [FOLDERS, *(name for name in names if name in SHARED)]
    item.runtest = partial(_run, item)  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Which test comes next says what is to be torn down after this one."""
    item.stash[NEXT] = nextitem


def _run(item: pytest.Item) -> None:
    __tracebackhide__ = True
    options = _options_of(item)
    timeout = options.pop("timeout", None)
    _raise(*_ranks_for(item, options).run(item, timeout))


def _options_of(item: pytest.Item) -> dict[str, Any]:
    """The marks of the test, its class and its module together; the nearest has the last word."""
    options: dict[str, Any] = {}
    for mark in reversed(list(item.iter_markers(MARK))):
        if len(mark.args) > 1:
            _refuse(f"takes one positional argument, nprocs, and not {len(mark.args)}: {mark.args!r}")
        if mark.args and "nprocs" in mark.kwargs:
            _refuse(f"has nprocs twice: {mark.args[0]!r} and {mark.kwargs['nprocs']!r}")
        options.update(zip(("nprocs",), mark.args, strict=False), **mark.kwargs)
    for name in OF_THE_PLUGIN:
        if name in options:
            _refuse(f"the option {name!r} is the plugin's own; leave it out")
    return options


def _ranks_for(item: pytest.Item, options: dict[str, Any]) -> "ModuleGroup":
    __tracebackhide__ = True
    module = module_of(item)
    groups = module.stash.setdefault(GROUPS, [])
    for ranks in groups:
        if ranks.options == options:
            return ranks
    ranks = ModuleGroup(options, item, module.path)
    groups.append(ranks)
    module.addfinalizer(partial(_close, groups, ranks))
    return ranks


def _close(groups: list["ModuleGroup"], ranks: "ModuleGroup") -> None:
    __tracebackhide__ = True
    groups.remove(ranks)
    _raise(*ranks.close())


def _raise(*failures: RunFailedError) -> None:
    """What the rank that failed first has raised, with what became of the others. What came later is told in a note."""
    __tracebackhide__ = True
    if not failures:
        return
    blamed = [(failure, _to_blame(failure)) for failure in failures]
    failure, culprit = next((each for each in blamed if not _is_lenient(each[1])), blamed[0])
    later = [f"later, when fixtures were torn down: {other}" for other in failures[failures.index(failure) + 1 :]]
    if culprit is None or culprit.exception is None:  # a rank has died, or time is over
        _fail("\n".join([str(failure), *later]))
    error = culprit.exception
    if _is_lenient(culprit):
        raise error
    others = failure.fates if culprit is failure.root_cause else [failure.verdict]
    where = [f"in rank {culprit.rank} of {len(failure.result.workers)}", *(f"  {line}" for line in others), *later]
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:  # of which pytest shows no notes
        _fail("\n".join([str(error), *where]))
    error.add_note("\n".join(where))
    raise error


def _to_blame(failure: RunFailedError) -> ProcessFailure | None:
    """The rank that failed first, unless it was only skipped, or expected to fail, and another one has really failed."""
    root = failure.root_cause
    if not _is_lenient(root):
        return root
    return next((each for each in failure.failures.values() if not each.is_secondary and not _is_lenient(each)), root)


def _is_lenient(failure: ProcessFailure | None) -> bool:
    return failure is not None and isinstance(failure.exception, LENIENT)


def _refuse(why: str) -> NoReturn:
    __tracebackhide__ = True
    _fail(f"mark {MARK}: {why}")


def _fail(text: str) -> NoReturn:
    """This frame is not hidden: of an error without any, pytest says that there are hidden ones."""
    raise pytest.fail.Exception(text, pytrace=False) from None


class ModuleGroup:
    """A WorkerGroup for the tests of one module that have the same options."""

    def __init__(self, options: dict[str, Any], item: pytest.Item, module: Path) -> None:
        self.options = options
        folder = _fixtures_of(item)[FOLDERS].mktemp("mpwatch")
        capture = item.config.getoption("capture", "no")
        log_dir = None if capture == "no" else folder / "logs"
        logs = LogSpec(log_dir, show="all" if capture in {"no", "tee-sys"} else "none")
        self._recipe = _recipe_of(item.config, module, folder)
        self._timeout: float | None = None  # of the last test
        self._shown: dict[Path, int] = {}
        try:
            self._group = WorkerGroup(**options, logs=logs, progress=False)
        except (TypeError, ValueError) as error:
            _refuse(str(error))
        except LaunchError as error:
            _fail(str(error))

    def run(self, item: pytest.Item, timeout: float | None) -> list[RunFailedError]:
        """The test in all ranks; what it leaves beside a failure becomes part of its report."""
        __tracebackhide__ = True
        following = item.stash.get(NEXT, None)
        order = TestRequest(
            name=name_in_module(item),
            following=name_in_module(following) if following and module_of(following) is module_of(item) else None,
            shared={name: value for name, value in _fixtures_of(item).items() if name in SHARED},
        )
        result: RunResult[Any]
        result, failure = self._call(partial(prepare, self._recipe))
        if failure is None:
            result, failure = self._call(partial(run_item, self._recipe, order), timeout)
            self._timeout = timeout
        self._show(item, "call", result)
        if failure is None:
            _keep(item, list(result))
            return []
        # the process group is about to be another one, and fixtures may hold on to the one before
        last, later = self._call_last(tear_down)
        if last is not None:
            self._show(item, "teardown", last)
        return [failure, *later]

    def close(self) -> list[RunFailedError]:
        """Tear down what is left of the fixtures, unless that is gone with the ranks, and end them."""
        __tracebackhide__ = True
        with self._group:
            result, failures = self._call_last(finish)
        if result is not None:
            for title, text in self._news(result):
                sys.stdout.write(f"{title}:\n{text}")
        return failures

    def _call_last(self, fn: Callable[[], None]) -> tuple[RunResult[None] | None, list[RunFailedError]]:
        """Nothing if there are no ranks any more."""
        __tracebackhide__ = True
        if self._group.state is not WorkerState.HEALTHY:
            return None, []
        result, failure = self._call(fn, self._timeout)
        return result, [] if failure is None else [failure]

    def _call(self, fn: Callable[[], T], timeout: float | None = None) -> tuple[RunResult[T], RunFailedError | None]:
        __tracebackhide__ = True
        try:
            return self._group.run(fn, timeout=timeout), None
        except RunFailedError as error:
            return error.result, error
        except (TypeError, ValueError) as error:  # the timeout's: all else is our own
            _refuse(str(error))
        except LaunchError as error:
            _fail(str(error))

    def _show(self, item: pytest.Item, when: str, result: RunResult[Any]) -> None:
        for title, text in self._news(result):
            item.add_report_section(when, title, text)

    def _news(self, result: RunResult[Any]) -> Iterator[tuple[str, str]]:
        for worker in result.workers:
            folder = Path(result.log_dir, f"attempt_{worker.restart_count}", str(worker.rank))
            for stream in ("stdout", "stderr"):
                if text := self._rest_of(folder / f"{stream}.log"):
                    yield f"{stream} of rank {worker.rank}", text

    def _rest_of(self, path: Path) -> str:
        """What has come since it was read before."""
        try:
            with path.open("rb") as file:
                file.seek(self._shown.get(path, 0))
                text = file.read()
                self._shown[path] = file.tell()
        except FileNotFoundError:  # there are none with -s
            return ""
        return text.decode(errors="replace")


def _recipe_of(config: pytest.Config, module: Path, folder: Path) -> SessionConfig:
    # plugins that know xdist hand values to its workers that way, as pytest-randomly its seed; they are those of options
    known = {name: value for name, value in vars(config.option).items() if isinstance(value, PLAIN)}
    capture = ("--capture=no",) if config.pluginmanager.has_plugin("capture") else ()
    return SessionConfig(
        args=(*map(str, config.invocation_params.args), *capture),
        folder=str(config.invocation_params.dir),
        module=str(module),
        scratch=str(folder),
        inputs={**known, **getattr(config, "workerinput", {})},
        markers=tuple(config.getini("markers")),
    )


def _keep(item: pytest.Item, findings: Sequence[PassedTestData]) -> None:
    """What ranks agree on is told once."""
    warned = {str(warning): warning for each in findings for warning in each.warnings}
    for warning in warned.values():  # not issued anew, for the filters have been asked in the rank
        told = {"warning_message": warning, "when": "runtest", "nodeid": item.nodeid, "location": None}
        item.ihook.pytest_warning_recorded.call_historic(kwargs=told)
    for each in findings:
        item.user_properties += [known for known in each.properties if known not in item.user_properties]


def _fixtures_of(item: pytest.Item) -> dict[str, Any]:
    return getattr(item, "funcargs", {})

"""In pytest's own process: items that run on ranks instead of here, and the ranks that a module has for them."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mpwatch import LogSpec, RunFailedError, RunResult, WorkerGroup, WorkerState

from . import MARK
from .ranks import Recipe, finish, prepare, run_item

__all__ = ["run_on_ranks"]

SHARED = ("tmp_path",)  # fixtures that are made here, and are the same in all ranks
FOLDERS = "tmp_path_factory"  # the fixture that makes folders which outlive the tests for some time
OF_THE_PLUGIN = ("check", "logs", "progress")  # options that it chooses itself
PLAIN = str | int | float | bool | None
GROUPS = pytest.StashKey[list["Ranks"]]()  # of a module


def run_on_ranks(item: pytest.Item) -> None:
    """From now on its fixtures and its body are the business of the ranks."""
    names = getattr(item, "fixturenames", [])
    names[:] = [FOLDERS, *(name for name in names if name in SHARED)]
    item.runtest = partial(_run, item)  # type: ignore[method-assign]


def _run(item: pytest.Item) -> None:
    __tracebackhide__ = True
    options = _options_of(item)
    timeout = options.pop("timeout", None)
    _raise(_ranks_for(item, options).run(item, timeout))


def _options_of(item: pytest.Item) -> dict[str, Any]:
    """The marks of the test, its class and its module together; the nearest has the last word."""
    options: dict[str, Any] = {}
    for mark in reversed(list(item.iter_markers(MARK))):
        if len(mark.args) > 1:
            _refuse(f"takes one positional argument, nprocs, and not {len(mark.args)}: {mark.args!r}")
        options.update(zip(("nprocs",), mark.args, strict=False), **mark.kwargs)
    for name in OF_THE_PLUGIN:
        if name in options:
            _refuse(f"the option {name!r} is the plugin's own; leave it out")
    return options


def _ranks_for(item: pytest.Item, options: dict[str, Any]) -> "Ranks":
    module: pytest.Collector = next(node for node in item.listchain() if isinstance(node, pytest.File))
    groups = module.stash.setdefault(GROUPS, [])
    for ranks in groups:
        if ranks.options == options:
            return ranks
    ranks = Ranks(options, item, module.path)
    groups.append(ranks)
    module.addfinalizer(partial(_close, groups, ranks))
    return ranks


def _close(groups: list["Ranks"], ranks: "Ranks") -> None:
    __tracebackhide__ = True
    groups.remove(ranks)
    _raise(ranks.close())


def _raise(failure: RunFailedError | None) -> None:
    """What the rank that failed first has raised, with what became of the others."""
    __tracebackhide__ = True
    if failure is None:
        return
    error, root = failure.__cause__, failure.root_cause
    if error is None or root is None:  # a rank has died, or time is over
        _fail(str(failure))
    if not isinstance(error, pytest.skip.Exception | pytest.xfail.Exception):
        where = f"in rank {root.rank} of {len(failure.result.workers)}"
        error.add_note("\n".join([where, *(f"  {line}" for line in failure.fates)]))
    raise error


def _refuse(why: str) -> NoReturn:
    __tracebackhide__ = True
    _fail(f"mark {MARK}: {why}")


def _fail(text: str) -> NoReturn:
    """This frame is not hidden: of an error without any, pytest says that there are hidden ones."""
    raise pytest.fail.Exception(text, pytrace=False) from None


class Ranks:
    """A WorkerGroup for the tests of one module that have the same options."""

    def __init__(self, options: dict[str, Any], item: pytest.Item, module: Path) -> None:
        self.options = options
        folder = _fixtures_of(item)[FOLDERS].mktemp("mpwatch")
        is_live = item.config.getoption("capture") == "no"
        logs = LogSpec() if is_live else LogSpec(folder / "logs", show="none")
        try:
            self._group = WorkerGroup(**options, logs=logs, progress=False)
        except (TypeError, ValueError) as error:
            _refuse(str(error))
        self._recipe = _recipe_of(item.config, module, folder)
        self._is_in_step = True
        self._shown: dict[Path, int] = {}

    def run(self, item: pytest.Item, timeout: float | None) -> RunFailedError | None:
        """The test in all ranks; what they printed becomes sections of its report.

        Raises LaunchError.
        """
        shared = {name: value for name, value in _fixtures_of(item).items() if name in SHARED}
        # after a failure the process group is another one, and fixtures may hold on to the one before
        result, failure = self._call(partial(prepare, self._recipe, is_in_step=self._is_in_step))
        if failure is None:
            result, failure = self._call(partial(run_item, self._recipe, item.nodeid, shared), timeout)
        self._is_in_step = failure is None
        for title, text in self._news(result):
            item.add_report_section("call", title, text)
        return failure

    def close(self) -> RunFailedError | None:
        """Tear down what is left of the fixtures, unless that is gone with the ranks, and end them."""
        with self._group:
            if self._group.state is WorkerState.HEALTHY:
                return self._call(finish)[1]
        return None

    def _call(self, fn: Callable[[], None], timeout: float | None = None) -> tuple[RunResult[None], RunFailedError | None]:
        try:
            return self._group.run(fn, timeout=timeout), None
        except RunFailedError as error:
            return error.result, error
        except (TypeError, ValueError) as error:  # the timeout's: all else is our own
            _refuse(str(error))

    def _news(self, result: RunResult[None]) -> Iterator[tuple[str, str]]:
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


def _recipe_of(config: pytest.Config, module: Path, folder: Path) -> Recipe:
    # plugins that know xdist hand values to its workers that way, as pytest-randomly its seed; they are those of options
    known = {name: value for name, value in vars(config.option).items() if isinstance(value, PLAIN)}
    return Recipe(
        args=tuple(map(str, config.invocation_params.args)),
        folder=str(config.invocation_params.dir),
        module=str(module),
        scratch=str(folder),
        inputs={**known, **getattr(config, "workerinput", {})},
    )


def _fixtures_of(item: pytest.Item) -> dict[str, Any]:
    return getattr(item, "funcargs", {})

"""Where the ranks' stdout and stderr go: LogSpec, and its meaning for one stream of one rank. Pure, except `in_notebook`."""

import operator
import os
import string
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum, auto
from typing import Any, Literal

from mpwatch.options.validation import check_count
from mpwatch.options.worker_info import Worker

STREAMS = ("stdout", "stderr")
AUTO_PREFIX = "[{rank}] "
FIELDS = ("rank", "local_rank", "role", "host", "time")

Ranks = Literal["all", "none"] | int | Collection[int]
# Any: by what stands in a literal mapping, mypy would take its values for collections of anything, since strings are such
Choice = Ranks | Literal["inherit"] | Mapping[str, Any]


class StreamRoute(Enum):
    """How what a rank writes to one of its streams leaves it."""

    INHERIT = auto()  # by the caller's own descriptor
    PIPE = auto()  # to the watcher, which passes it on, or keeps the last lines of it
    FILE = auto()  # straight into a file
    DISCARD = auto()


@dataclass(frozen=True)
class LogSpec:
    """Where ranks' stdout and stderr go: to files, to the caller, to both, or nowhere. The option `logs` of `mpwatch.run`.

    It holds for the descriptors 1 and 2, so for what compiled code and programs that a rank starts write, too; and from the
    first line on. Python's own stdout, and that of C, are flushed at the end of each line.

        LogSpec("logs")                    all to files, and to the caller
        LogSpec("logs", show="none")       all to files
        LogSpec("logs", show=0)            all to files, and what rank 0 writes to the caller
        LogSpec("logs", show={"stdout": 0, "stderr": "all"})
        LogSpec(show=0)                    the others are not heard
        LogSpec(show="inherit")            as if there were no LogSpec: the ranks have the caller's own stdout and stderr

    Each of `show` and `files` is "all", "none", a rank, or several of them; or a mapping from "stdout" and "stderr" to one
    of these, in which a stream that is left out has none.

    Args:
        dir: the folder for files, made if need be: `<dir>/<run_id>/attempt_<n>/<rank>/stdout.log` and `stderr.log`, with
            each byte as it was written; n is `restart_count`. None: there are no files.
        show: whose lines are written to the caller's stdout and stderr: `sys.stdout` and `sys.stderr` as they are when the
            call is made. Lines stay whole. One that carriage returns overwrite, such as a progress bar, is shown as it is in
            the end, and every two seconds until then. "inherit": the ranks write there themselves, each when it likes.
        files: whose output goes to files, if there is a `dir`.
        prefix: what each line that is shown begins with, with any of {rank}, {local_rank}, {role}, {host} and {time} (or
            {time:%H:%M:%S}, as strftime has it). None: "[{rank}] " if more than one rank is shown; in a notebook, if more
            than one has written something. What a single one writes is passed on as it comes, carriage returns and all.

    Raises TypeError or ValueError naming the argument and the value.
    """

    dir: str | os.PathLike[str] | None = None
    _: KW_ONLY
    show: Choice = "all"
    files: Choice = "all"
    prefix: str | None = None

    def __post_init__(self) -> None:
        _check_dir(self.dir)
        for name in ("show", "files"):
            choice = getattr(self, name)
            _check_streams(name, choice)
            for stream in STREAMS:
                _check_ranks(name, _of_stream(choice, stream), may_inherit=name == "show")
        for stream in STREAMS:
            if self.inherits(stream) and self.dir is not None and _of_stream(self.files, stream) != "none":
                raise ValueError(
                    f"logs: show='inherit' gives the ranks the caller's own {stream}, so that nothing of it can go to files;"
                    " use show='all', or leave it out of `files`"
                )
        _check_prefix(self.prefix)

    def from_here(self) -> "LogSpec":
        """The same, wherever this program goes meanwhile."""
        with suppress(FileNotFoundError):  # it is in a folder that is no more; where the files should be is found out later
            return self if self.dir is None else replace(self, dir=os.path.abspath(self.dir))
        return self

    def folder_of(self, run_id: str) -> str:
        """Of the files of a run; empty if there are none."""
        return "" if self.dir is None else os.path.join(self.dir, run_id)

    def inherits(self, stream: str) -> bool:
        """Whether the ranks have the caller's own stream."""
        return _of_stream(self.show, stream) == "inherit"

    def shows(self, stream: str, rank: int) -> bool:
        """Whether the watcher passes that on to the caller."""
        return _is_among(rank, _of_stream(self.show, stream))

    def writes(self, stream: str, rank: int) -> bool:
        """Whether that goes to a file."""
        return self.dir is not None and _is_among(rank, _of_stream(self.files, stream))

    def way_of(self, stream: str, rank: int) -> StreamRoute:
        """How that leaves the rank. The last lines of stderr are always kept, for the report of a failure."""
        if self.inherits(stream):
            return StreamRoute.INHERIT
        if self.shows(stream, rank):
            return StreamRoute.PIPE
        if self.writes(stream, rank):
            return StreamRoute.FILE
        return StreamRoute.PIPE if stream == "stderr" else StreamRoute.DISCARD

    def shown_ranks(self, ranks: Iterable[int]) -> int:
        """How many of these may be heard."""
        return sum(any(self.shows(stream, rank) for stream in STREAMS) for rank in ranks)

    def telling_ranks(self) -> list[int]:
        """Ranks that stand for all, where it is not known how many there will be: those that are named, and two others."""
        choices = [_of_stream(choice, stream) for choice in (self.show, self.files) for stream in STREAMS]
        named = {rank for choice in choices for rank in _named(choice)}
        beyond = max(named, default=-1) + 1
        return sorted(named | {beyond, beyond + 1})

    def check_ranks(self, nprocs: int) -> None:
        """Raises ValueError for a rank that there is none of."""
        for name in ("show", "files"):
            for stream in STREAMS:
                for rank in _named(_of_stream(getattr(self, name), stream)):
                    if rank >= nprocs:
                        raise ValueError(f"logs: {name} names rank {rank}, but nprocs={nprocs}: ranks are 0 to {nprocs - 1}")


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this program. IPython in a terminal is no notebook."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and getattr(get_ipython(), "kernel", None) is not None


def default_logs() -> LogSpec:
    """Let ranks inherit the caller's stdout and stderr, except in a notebook, whose cells do not show those descriptors."""
    return LogSpec() if in_notebook() else LogSpec(show="inherit")


def prefix_of(template: str, worker: Worker, host: str) -> str:
    """What a line of this rank that comes now begins with."""
    return _fill_in(template, rank=worker.rank, local_rank=worker.local_rank, role=worker.role, host=host)


def _fill_in(template: str, **who: object) -> str:
    return template.format(**who, time=_Now())


class _Now:
    """The time of day, in the format that the template asks for."""

    def __format__(self, form: str) -> str:
        return time.strftime(form or "%H:%M:%S")


def _of_stream(choice: Choice, stream: str) -> Ranks | Literal["inherit"]:
    return choice.get(stream, "none") if isinstance(choice, Mapping) else choice


def _is_among(rank: int, ranks: Ranks | Literal["inherit"]) -> bool:
    return ranks == "all" if isinstance(ranks, str) else rank in _named(ranks)


def _named(ranks: Ranks | Literal["inherit"]) -> Iterator[int]:
    if isinstance(ranks, Collection):
        yield from () if isinstance(ranks, str) else map(operator.index, ranks)
    else:
        yield operator.index(ranks)


def _check_dir(folder: object) -> None:
    if folder is not None and (not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str)):
        raise TypeError(f"logs: dir must be a path, not {folder!r}")
    if folder is not None and not os.fspath(folder):
        raise ValueError("logs: dir must be the path of a folder, not ''; '.' is the current one")


def _check_streams(name: str, choice: object) -> None:
    if isinstance(choice, Mapping):
        for stream in choice:
            if stream not in STREAMS:
                raise ValueError(f"logs: {name} may have the keys 'stdout' and 'stderr', not {stream!r}")


def _check_ranks(name: str, ranks: object, *, may_inherit: bool) -> None:
    words = ("all", "none", "inherit") if may_inherit else ("all", "none")
    if isinstance(ranks, str):
        if ranks not in words:
            raise ValueError(f"logs: {name} must be one of {', '.join(map(repr, words))}, or ranks, not {ranks!r}")
        return
    if isinstance(ranks, bytes | Mapping) or not (isinstance(ranks, Collection) or hasattr(ranks, "__index__")):
        raise TypeError(f"logs: {name} must be 'all', 'none', a rank or several of them, not {ranks!r}")
    for rank in ranks if isinstance(ranks, Collection) else [ranks]:
        check_count(f"logs: a rank in {name}", rank, at_least=0)


def _check_prefix(prefix: object) -> None:
    if prefix is None:
        return
    if not isinstance(prefix, str):
        raise TypeError(f"logs: prefix must be a string or None, not {prefix!r}")
    if len(prefix.splitlines()) > 1 or prefix.endswith(("\n", "\r")):
        raise ValueError(f"logs: prefix must be a part of a line, not {prefix!r}")
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(prefix) if name is not None}
        for name in names - set(FIELDS):
            raise ValueError(f"there is no field {name!r}")
        _fill_in(prefix, rank=0, local_rank=0, role="", host="")
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        fields = ", ".join(f"{{{name}}}" for name in FIELDS)
        raise ValueError(f"logs: prefix may have the fields {fields}, but {prefix!r} cannot be filled in: {error}") from None

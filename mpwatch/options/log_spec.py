"""`LogSpec` says where the stdout and stderr of the ranks go."""

import operator
import os
import string
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum, auto
from typing import IO, Any, Literal

from mpwatch.options.validation import check_count
from mpwatch.options.worker_info import Worker

STREAMS = ("stdout", "stderr")
AUTO_PREFIX = "[{rank}] "
FIELDS = ("rank", "local_rank", "node", "role", "host", "time")

Ranks = Literal["all", "none"] | int | Collection[int]
# Any: mypy would infer collections from the strings in a literal mapping, since a string is a collection.
Choice = Ranks | Literal["inherit"] | Mapping[str, Any]


class StreamRoute(Enum):
    INHERIT = auto()  # to where the caller's own descriptor leads
    PIPE = auto()  # to the watcher, which forwards the output, writes it to files, or keeps its last lines
    DISCARD = auto()  # to /dev/null


@dataclass(frozen=True)
class LogSpec:
    """The option `logs` of `run`: whether stdout and stderr of the ranks go to files, to the caller, to both, or nowhere.

    A LogSpec applies to the file descriptors 1 and 2 of the ranks, from the first line of output on. A LogSpec also applies
    to the output of compiled code, and of programs that a rank starts. In a rank, the stdout of Python and of C is flushed
    at the end of each line.

        LogSpec("logs")                    all output goes to files and to the caller
        LogSpec("logs", show="none")       all output goes to files
        LogSpec("logs", show=0)            all output goes to files, the output of rank 0 also to the caller
        LogSpec("logs", show={"stdout": 0, "stderr": "all"})
        LogSpec(show=0)                    only the output of rank 0 is shown
        LogSpec(show="inherit")            the ranks have the caller's own stdout and stderr, as without a LogSpec

    `show` and `files` choose ranks: "all", "none", one rank, or a collection of ranks. `show` and `files` can also be
    mappings that choose ranks for "stdout" and "stderr" separately. If a mapping leaves out a stream, the choice for this
    stream is "none".

    Args:
        dir: the folder for log files: `<dir>/<run_id>/attempt_<n>/<rank>/stdout.log` and `stderr.log`, where n is
            `restart_count`. Folders are made if they are missing. A file contains the bytes as the rank wrote them. None
            means that there are no files.
        show: the ranks whose lines are written to the caller's stdout and stderr. The lines go to the objects that
            `sys.stdout` and `sys.stderr` are at the time of the call. Lines stay whole. A line that is overwritten with
            carriage returns, such as a progress bar, is shown every two seconds, and in its final state. "inherit" means
            that the ranks write directly to the caller's file descriptors.
        files: the ranks whose output goes to files, if `dir` is set.
        prefix: a template for the beginning of each shown line. Its fields are {rank}, {local_rank}, {role}, {host}, {node}
            (the `group_rank` of a Worker) and {time}; {time:%H:%M:%S} formats the time as strftime does. None means
            "[{rank}] " if more than one rank is shown, and nothing if only one is shown: then its output is forwarded
            unchanged, carriage returns included.
        stdout: where the shown lines of stdout are written: any object with a `write` method for text. A thread of mpwatch
            calls this method. None means `sys.stdout`.
        stderr: where the shown lines of stderr are written, like `stdout`. None means `sys.stderr`.

    Raises TypeError or ValueError if an argument is invalid. The error text contains the name and the value of the invalid
    argument.
    """

    dir: str | os.PathLike[str] | None = None
    _: KW_ONLY
    show: Choice = "all"
    files: Choice = "all"
    prefix: str | None = None
    stdout: IO[str] | None = None
    stderr: IO[str] | None = None

    def __post_init__(self) -> None:
        _check_dir(self.dir)
        for name in ("show", "files"):
            choice = getattr(self, name)
            _check_streams(name, choice)
            for stream in STREAMS:
                _check_ranks(name, _choice_for(choice, stream), may_inherit=name == "show")
        for stream in STREAMS:
            if self.inherits(stream) and self.dir is not None and _choice_for(self.files, stream) != "none":
                raise ValueError(
                    f"logs: show='inherit' gives the ranks the caller's own {stream}, so its output cannot go to files;"
                    f" use show='all', or leave {stream} out of `files`"
                )
        _check_prefix(self.prefix)
        for stream in STREAMS:
            self._check_target(stream)

    def _check_target(self, stream: str) -> None:
        target = getattr(self, stream)
        if target is None:
            return
        if not callable(getattr(target, "write", None)):
            raise TypeError(f"logs: {stream} must have a method `write` for text, not {target!r:.200}")
        if self.inherits(stream):
            raise ValueError(f"logs: show='inherit' gives the ranks the caller's own {stream}; leave out `{stream}`")

    def with_absolute_dir(self) -> "LogSpec":
        """Return this LogSpec with an absolute `dir`, so that a later chdir() does not move the files."""
        return self if self.dir is None else replace(self, dir=os.path.abspath(self.dir))

    def folder_of_run(self, run_id: str) -> str:
        """Return the path of the folder for the log files of a run, or "" if this LogSpec has no folder."""
        return "" if self.dir is None else os.path.join(self.dir, run_id)

    def inherits(self, stream: str) -> bool:
        """Return whether the ranks write this stream (stdout or stderr) directly to the caller's file descriptor."""
        return _choice_for(self.show, stream) == "inherit"

    def shows(self, stream: str, rank: int) -> bool:
        """Return whether the watcher forwards this stream (stdout or stderr) of this rank to the caller."""
        return _is_among(rank, _choice_for(self.show, stream))

    def writes(self, stream: str, rank: int) -> bool:
        """Return whether this stream (stdout or stderr) of this rank goes to a file."""
        return self.dir is not None and _is_among(rank, _choice_for(self.files, stream))

    def route_of(self, stream: str, rank: int) -> StreamRoute:
        """Return where this stream (stdout or stderr) of a rank goes.

        The watcher can read the last lines of stderr on every route except INHERIT.
        """
        if self.inherits(stream):
            return StreamRoute.INHERIT
        is_read = self.shows(stream, rank) or self.writes(stream, rank) or stream == "stderr"
        return StreamRoute.PIPE if is_read else StreamRoute.DISCARD

    def count_shown_ranks(self, nprocs: int | None) -> int:
        """Return the number of ranks whose stdout or stderr is shown. "all" are 2 if `nprocs` is not known yet."""
        shown = [_choice_for(self.show, stream) for stream in STREAMS]
        if any(isinstance(ranks, str) and ranks == "all" for ranks in shown):
            return nprocs or 2
        return len({rank for ranks in shown for rank in _ranks_named_in(ranks)})

    def check_ranks(self, nprocs: int) -> None:
        """Raise ValueError if `show` or `files` names a rank that does not exist."""
        for name in ("show", "files"):
            for stream in STREAMS:
                for rank in _ranks_named_in(_choice_for(getattr(self, name), stream)):
                    if rank >= nprocs:
                        raise ValueError(f"logs: {name} names rank {rank}, but nprocs={nprocs}: ranks are 0 to {nprocs - 1}")


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs the calling program. IPython in a terminal is not a notebook."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and getattr(get_ipython(), "kernel", None) is not None


def default_logs() -> LogSpec:
    return LogSpec() if in_notebook() else LogSpec(show="inherit")


def format_prefix(template: str, worker: Worker, host: str) -> str:
    facts = {"rank": worker.rank, "local_rank": worker.local_rank, "node": worker.group_rank, "role": worker.role}
    return _fill_in(template, **facts, host=host)


def _fill_in(template: str, **who: object) -> str:
    return template.format(**who, time=_Now())


class _Now:
    def __format__(self, form: str) -> str:
        return time.strftime(form or "%H:%M:%S")


def _choice_for(choice: Choice, stream: str) -> Ranks | Literal["inherit"]:
    return choice.get(stream, "none") if isinstance(choice, Mapping) else choice


def _is_among(rank: int, ranks: Ranks | Literal["inherit"]) -> bool:
    return ranks == "all" if isinstance(ranks, str) else rank in _ranks_named_in(ranks)


def _ranks_named_in(ranks: Ranks | Literal["inherit"]) -> Iterator[int]:
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
    choices = ("all", "none", "inherit") if may_inherit else ("all", "none")
    if isinstance(ranks, str):
        if ranks not in choices:
            raise ValueError(f"logs: {name} must be one of {', '.join(map(repr, choices))}, or ranks, not {ranks!r}")
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
        _fill_in(prefix, rank=0, local_rank=0, node=0, role="", host="")
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        fields = ", ".join(f"{{{name}}}" for name in FIELDS)
        raise ValueError(f"logs: prefix may have the fields {fields}, but {prefix!r} cannot be filled in: {error}") from None

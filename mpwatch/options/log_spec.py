"""`LogSpec` says where the stdout and stderr of the ranks go."""

import os
import string
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import IO, Any, Literal

from mpwatch.options.validation import check_count

STREAMS = ("stdout", "stderr")
AUTO_PREFIX = "[{rank}] "
FIELDS = ("rank", "local_rank", "node", "role", "host", "time")
ALL: Collection[int] = range(1 << 31)

Ranks = Literal["all", "none"] | int | Collection[int]
# Any: mypy would infer collections from the strings in a literal mapping, since a string is a collection.
Choice = Ranks | Literal["inherit"] | Mapping[str, Any]


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
    # by option and stream; None: inherit
    _chosen: dict[str, dict[str, Collection[int] | None]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_dir(self.dir)
        chosen = {name: _choose_ranks(name, getattr(self, name)) for name in ("show", "files")}
        object.__setattr__(self, "_chosen", chosen)
        for stream in STREAMS:
            if self.inherits(stream) and self.dir is not None and chosen["files"][stream] != ():
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
        return self._chosen["show"][stream] is None

    def shows(self, stream: str, rank: int) -> bool:
        """Return whether the watcher forwards this stream (stdout or stderr) of this rank to the caller."""
        return rank in (self._chosen["show"][stream] or ())

    def writes(self, stream: str, rank: int) -> bool:
        """Return whether this stream (stdout or stderr) of this rank goes to a file."""
        return self.dir is not None and rank in (self._chosen["files"][stream] or ())

    def count_shown_ranks(self, nprocs: int | None) -> int:
        """Return the number of ranks whose stdout or stderr is shown. "all" are 2 if `nprocs` is not known yet."""
        shown = [ranks or () for ranks in self._chosen["show"].values()]
        return (nprocs or 2) if ALL in shown else len({rank for ranks in shown for rank in ranks})

    def check_ranks(self, nprocs: int) -> None:
        """Raise ValueError if `show` or `files` names a rank that does not exist."""
        for name, by_stream in self._chosen.items():
            named = [rank for ranks in by_stream.values() if ranks and ranks != ALL for rank in ranks]
            for rank in (rank for rank in named if rank >= nprocs):
                raise ValueError(f"logs: {name} names rank {rank}, but nprocs={nprocs}: ranks are 0 to {nprocs - 1}")


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs the calling program. IPython in a terminal is not a notebook."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and getattr(get_ipython(), "kernel", None) is not None


def default_logs() -> LogSpec:
    return LogSpec() if in_notebook() else LogSpec(show="inherit")


def format_prefix(template: str, **facts: object) -> str:
    """`facts` are all of FIELDS except the time."""
    return template.format(**facts, time=_Now())


class _Now:
    def __format__(self, form: str) -> str:
        return time.strftime(form or "%H:%M:%S")


def _check_dir(folder: object) -> None:
    if folder is not None and (not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str)):
        raise TypeError(f"logs: dir must be a path, not {folder!r}")
    if folder is not None and not os.fspath(folder):
        raise ValueError("logs: dir must be the path of a folder, not ''; '.' is the current one")


def _choose_ranks(name: str, choice: Any) -> dict[str, Collection[int] | None]:
    """Return which ranks the value of `show` or `files` chooses for each stream. None means "inherit"."""
    by_stream = choice if isinstance(choice, Mapping) else dict.fromkeys(STREAMS, choice)
    for stream in by_stream:
        if stream not in STREAMS:
            raise ValueError(f"logs: {name} may have the keys 'stdout' and 'stderr', not {stream!r}")
    return {stream: _parse_ranks(name, by_stream.get(stream, "none")) for stream in STREAMS}


def _parse_ranks(name: str, ranks: Any) -> Collection[int] | None:
    if isinstance(ranks, str):
        words: dict[str, Collection[int] | None] = {"all": ALL, "none": ()}
        if name == "show":
            words["inherit"] = None
        if ranks not in words:
            raise ValueError(f"logs: {name} must be one of {', '.join(map(repr, words))}, or ranks, not {ranks!r}")
        return words[ranks]
    if isinstance(ranks, bytes | Mapping) or not (isinstance(ranks, Collection) or hasattr(ranks, "__index__")):
        raise TypeError(f"logs: {name} must be 'all', 'none', a rank or several of them, not {ranks!r}")
    several = ranks if isinstance(ranks, Collection) else [ranks]
    return tuple(check_count(f"logs: a rank in {name}", rank, at_least=0) for rank in several)


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
        format_prefix(prefix, rank=0, local_rank=0, node=0, role="", host="")
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        fields = ", ".join(f"{{{name}}}" for name in FIELDS)
        raise ValueError(f"logs: prefix may have the fields {fields}, but {prefix!r} cannot be filled in: {error}") from None

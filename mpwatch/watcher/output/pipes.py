"""Before a rank starts, open the pipes that become its stdout and stderr."""

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from io import FileIO

from mpwatch.errors import LaunchError
from mpwatch.options.log_spec import AUTO_PREFIX, STREAMS, LogSpec, format_prefix
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.descriptors import grow_pipe, open_regular_file
from mpwatch.watcher.output.rank_stream import RankStream, remove_overwritten
from mpwatch.wire.resource_errors import with_remedy

PIPE_SIZE = 1 << 18  # bytes: a rank can go on writing while the output thread handles another rank
TAIL_BYTES = 8192
TAIL_LINES = 50  # C++ prints a stack of some twenty lines after the message of an exception


class StderrTail:
    """The last lines of a rank's stderr, which the output thread feeds, and the paths of its log files, for a report."""

    def __init__(self) -> None:
        self.log_files: dict[str, str] = {}  # by stream
        self._tail, self._is_cut = b"", False

    def feed(self, data: bytes) -> None:
        self._tail += data[-TAIL_BYTES:]
        if len(self._tail) > TAIL_BYTES or len(data) > TAIL_BYTES:
            self._tail, self._is_cut = self._tail[-TAIL_BYTES:], True

    def clear(self) -> None:
        self._tail, self._is_cut = b"", False

    def last_lines(self) -> str:
        """As a terminal would show them. Empty if the rank has inherited the caller's stderr."""
        text = remove_overwritten(self._tail).rstrip(b"\r").decode(errors="replace")
        return "\n".join(text.splitlines()[int(self._is_cut) :][-TAIL_LINES:])


@dataclass(eq=False)
class OutputPipe:
    """The output thread's end of the pipe of one stream, and its log file. `stderr_tail` is None for stdout."""

    fd: int
    file: FileIO | None
    rank_stream: RankStream
    stderr_tail: StderrTail | None
    is_open: bool = True

    def close(self) -> None:
        self.is_open = False
        os.close(self.fd)
        if self.file is not None:
            self.file.close()


@dataclass(eq=False)
class StdioFds:
    """The descriptors that become stdout and stderr of one rank. None: it inherits the caller's."""

    stdout: int | None = None
    stderr: int | None = None
    stderr_tail: StderrTail = field(default_factory=StderrTail)
    pipes: list[OutputPipe] = field(default_factory=list)

    @property
    def is_captured(self) -> bool:
        """Whether stdout or stderr goes to a pipe or /dev/null."""
        return (self.stdout, self.stderr) != (None, None)


def open_stdio(spec: LogSpec, worker: Worker, child_ends: ExitStack, *, host: str, has_lines: bool) -> StdioFds:
    """Raises LaunchError and OSError. `child_ends` receives the callbacks that close the child's ends here.

    `has_lines`: whether output is shown in lines with prefixes.
    """
    stdio, rank = StdioFds(), worker.rank
    template = AUTO_PREFIX if spec.prefix is None else spec.prefix
    facts = {"rank": rank, "local_rank": worker.local_rank, "node": worker.group_rank, "role": worker.role, "host": host}
    make_prefix = partial(format_prefix, template, **facts)

    def open_stream(stream: str) -> int | None:
        is_shown, is_written = spec.shows(stream, rank), spec.writes(stream, rank)
        if spec.inherits(stream):
            return None
        if not (is_shown or is_written or stream == "stderr"):  # whose last lines a report has
            return _close_with(child_ends, os.open(os.devnull, os.O_WRONLY))
        file = None
        if is_written:
            folder = os.path.join(spec.folder_of_run(worker.run_id), f"attempt_{worker.restart_count}", str(rank))
            path = stdio.stderr_tail.log_files[stream] = os.path.join(folder, f"{stream}.log")
            file = own_ends.enter_context(_open_file(path, f"the {stream} of rank {rank}"))
        read_fd, write_fd = os.pipe()
        _close_with(own_ends, read_fd)
        _close_with(child_ends, write_fd)
        os.set_blocking(read_fd, False)
        with suppress(OSError):  # a smaller pipe works, too
            grow_pipe(read_fd, PIPE_SIZE)
        rank_stream = RankStream(rank, stream if is_shown else None, make_prefix if is_shown and has_lines else None)
        tail = stdio.stderr_tail if stream == "stderr" else None
        stdio.pipes.append(OutputPipe(read_fd, file, rank_stream, tail))
        return write_fd

    with ExitStack() as own_ends:
        stdio.stdout, stdio.stderr = map(open_stream, STREAMS)
        own_ends.pop_all()
    return stdio


def _open_file(path: str, what: str) -> FileIO:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return open(path, "ab", buffering=0, opener=open_regular_file)
    except OSError as error:
        text = f"{what} cannot be written to {path!r} (see logs)"
        if isinstance(error, FileNotFoundError):  # in /proc, for example, or in a folder that was deleted
            raise LaunchError(f"{text}: no folder can be made there") from error
        raise LaunchError(with_remedy(text, error)) from error


def _close_with(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd

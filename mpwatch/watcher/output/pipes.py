"""Before a rank starts, open the pipes that become its stdout and stderr."""

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mpwatch.errors import LaunchError
from mpwatch.options.log_spec import AUTO_PREFIX, STREAMS, LogSpec, StreamRoute, format_prefix
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.descriptors import grow_pipe, open_regular_file
from mpwatch.watcher.output.rank_stream import LineAssembler, RankStream
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
        assembler = LineAssembler()
        text = (assembler.feed(self._tail) + assembler.flush()).decode(errors="replace")
        return "\n".join(text.splitlines()[int(self._is_cut) :][-TAIL_LINES:])


@dataclass(eq=False)
class StdioFds:
    """The descriptors that become stdout and stderr of one rank. None: it inherits the caller's."""

    stdout: int | None = None
    stderr: int | None = None
    stderr_tail: StderrTail = field(default_factory=StderrTail)
    pipes: list["OutputPipe"] = field(default_factory=list)

    @property
    def is_captured(self) -> bool:
        """Whether stdout or stderr goes to a pipe or /dev/null."""
        return (self.stdout, self.stderr) != (None, None)


@dataclass(eq=False)
class OutputPipe:
    """The output thread's end of the pipe of one stream, and its log file. `stderr_tail` is None for stdout."""

    fd: int
    file_fd: int | None
    path: str
    rank_stream: RankStream
    stderr_tail: StderrTail | None

    def close_file(self) -> None:
        file_fd, self.file_fd = self.file_fd, None
        if file_fd is not None:
            os.close(file_fd)

    def close(self) -> None:
        os.close(self.fd)
        self.close_file()


class StdioOpener:
    """`has_lines`: whether output is shown in lines with prefixes."""

    def __init__(self, spec: LogSpec, host: str, *, has_lines: bool) -> None:
        self._spec, self._host, self._has_lines = spec, host, has_lines

    def open(self, worker: Worker, child_ends: ExitStack) -> StdioFds:
        """Raises LaunchError and OSError. `child_ends` receives the callbacks that close the child's ends here."""
        stdio = StdioFds()
        with ExitStack() as own_ends:
            stdio.stdout, stdio.stderr = (self._open(stream, worker, stdio, own_ends, child_ends) for stream in STREAMS)
            own_ends.pop_all()
        return stdio

    def _open(self, stream: str, worker: Worker, stdio: StdioFds, own_ends: ExitStack, child_ends: ExitStack) -> int | None:
        route = self._spec.route_of(stream, worker.rank)
        if route is StreamRoute.INHERIT:
            return None
        if route is StreamRoute.DISCARD:
            return _close_with(child_ends, os.open(os.devnull, os.O_WRONLY))
        file_fd, path = None, ""
        if self._spec.writes(stream, worker.rank):
            path = stdio.stderr_tail.log_files[stream] = self._make_path(stream, worker)
            file_fd = _close_with(own_ends, _open_file(path, f"the {stream} of rank {worker.rank}"))
        read_fd, write_fd = os.pipe()
        _close_with(own_ends, read_fd)
        _close_with(child_ends, write_fd)
        os.set_blocking(read_fd, False)
        with suppress(OSError):  # a smaller pipe works, too
            grow_pipe(read_fd, PIPE_SIZE)
        is_shown = self._spec.shows(stream, worker.rank)
        make_prefix = self._get_prefix(worker) if is_shown and self._has_lines else None
        rank_stream = RankStream(worker.rank, stream if is_shown else None, make_prefix)
        stdio.pipes.append(
            OutputPipe(read_fd, file_fd, path, rank_stream, stdio.stderr_tail if stream == "stderr" else None)
        )
        return write_fd

    def _get_prefix(self, worker: Worker) -> Callable[[], bytes]:
        template = AUTO_PREFIX if self._spec.prefix is None else self._spec.prefix
        return lambda: format_prefix(template, worker, self._host).encode(errors="backslashreplace")

    def _make_path(self, stream: str, worker: Worker) -> str:
        folder = Path(self._spec.folder_of_run(worker.run_id)) / f"attempt_{worker.restart_count}" / str(worker.rank)
        return str(folder / f"{stream}.log")


def _open_file(path: str, what: str) -> int:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return open_regular_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        text = f"{what} cannot be written to {path!r} (see logs)"
        if isinstance(error, FileNotFoundError):  # in /proc, for example, or in a folder that was deleted
            raise LaunchError(f"{text}: no folder can be made there") from error
        raise LaunchError(with_remedy(text, error)) from error


def _close_with(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd

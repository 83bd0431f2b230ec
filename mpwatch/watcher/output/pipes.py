"""Before a rank starts, open the pipes that become its stdout and stderr."""

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mpwatch.errors import LaunchError
from mpwatch.options.log_spec import AUTO_PREFIX, STREAMS, LogSpec, StreamRoute, format_prefix
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.descriptors import grow_pipe, open_regular_file
from mpwatch.watcher.output.rank_stream import RankStream
from mpwatch.watcher.output.stderr_tail import StderrTail
from mpwatch.wire.resource_errors import with_remedy

PIPE_SIZE = 1 << 18  # bytes: a rank can go on writing while the output thread handles another rank


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
    """The watcher's end of the pipe of one stream, and its log file. Only the output thread uses it.

    `rank_stream` is None if the stream is not shown, and `stderr_tail` is None for stdout.
    """

    fd: int
    file_fd: int | None
    path: str
    rank_stream: RankStream | None
    stderr_tail: StderrTail | None
    is_polled: bool = False  # False before it is registered, and after its end was read

    def read(self, size: int) -> bytes | None:
        """Return bytes from the pipe, None if no bytes have come yet, or b"" if all writers have closed the pipe."""
        try:
            return os.read(self.fd, size)
        except BlockingIOError:
            return None

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
        self._spec = spec
        self._host = host
        self._has_lines = has_lines

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
        file_fd = None
        if self._spec.writes(stream, worker.rank):
            file_fd = _close_with(own_ends, self._open_file(stream, worker, stdio.stderr_tail))
        read_fd, write_fd = os.pipe()
        _close_with(own_ends, read_fd)
        _close_with(child_ends, write_fd)
        os.set_blocking(read_fd, False)
        with suppress(OSError):  # a smaller pipe works, too
            grow_pipe(read_fd, PIPE_SIZE)
        rank_stream = self._make_rank_stream(stream, worker) if self._spec.shows(stream, worker.rank) else None
        path, stderr_tail = stdio.stderr_tail.log_files.get(stream, ""), stdio.stderr_tail if stream == "stderr" else None
        stdio.pipes.append(OutputPipe(read_fd, file_fd, path, rank_stream, stderr_tail))
        return write_fd

    def _make_rank_stream(self, stream: str, worker: Worker) -> RankStream:
        template = AUTO_PREFIX if self._spec.prefix is None else self._spec.prefix

        def make_prefix() -> bytes:
            return format_prefix(template, worker, self._host).encode(errors="backslashreplace")

        return RankStream(worker.rank, stream, make_prefix if self._has_lines else None)

    def _open_file(self, stream: str, worker: Worker, stderr_tail: StderrTail) -> int:
        folder = Path(self._spec.folder_of_run(worker.run_id)) / f"attempt_{worker.restart_count}" / str(worker.rank)
        path = str(folder / f"{stream}.log")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd = open_regular_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            what = f"the {stream} of rank {worker.rank} cannot be written to {path!r} (see logs)"
            if isinstance(error, FileNotFoundError):  # in /proc, for example, or in a folder that was deleted
                raise LaunchError(f"{what}: no folder can be made there") from error
            raise LaunchError(with_remedy(what, error)) from error
        stderr_tail.log_files[stream] = path
        return fd


def _close_with(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd

"""The streams of a rank: what its process is started with, and the watcher's end of it."""

import os
from contextlib import ExitStack, suppress
from pathlib import Path

from mpwatch.errors import LaunchError
from mpwatch.options.log_spec import AUTO_PREFIX, STREAMS, LogSpec, StreamRoute, prefix_of
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.descriptors import grow_pipe
from mpwatch.watcher.output.multiplexer import RankStream
from mpwatch.watcher.output.stderr_tail import StderrTail
from mpwatch.wire.resource_errors import with_remedy

PIPE_SIZE = 1 << 18  # bytes: room for a rank to write on while the pump is at another


class StdioFds:
    """The rank's side: its stdout and stderr, None for the caller's own, and what is kept of them."""

    def __init__(self) -> None:
        self.stdout: int | None = None
        self.stderr: int | None = None
        self.stderr_tail = StderrTail()
        self.sources: list[OutputPipe] = []

    @property
    def are_ours(self) -> bool:
        """Whether any of them is not the caller's."""
        return (self.stdout, self.stderr) != (None, None)

    def leave(self, unsaid: bytes) -> None:
        """What the rank's interpreter has printed, and the rank has never taken over. Where its stderr is a file alone."""
        if unsaid and self.stderr_tail.unread:
            # the disk may be full: a rank that never started has it in its report, too
            with suppress(OSError), open(self.stderr_tail.unread, "ab") as file:
                file.write(unsaid)


class OutputPipe:
    """The watcher's side of one stream that comes over a pipe. Owns its descriptors."""

    def __init__(
        self, pipe: int, file: int | None, path: str, rank_stream: RankStream | None, stderr_tail: StderrTail | None
    ) -> None:
        self.pipe = pipe
        self.file = file
        self.path = path  # of that
        self.rank_stream = rank_stream  # None: nobody hears it
        self.stderr_tail = stderr_tail  # None: it is stdout
        self.is_open = False  # something may come

    def read(self, size: int) -> bytes | None:
        """What has come; None if nothing has; empty if nothing will."""
        try:
            return os.read(self.pipe, size)
        except BlockingIOError:
            return None

    def close_file(self) -> None:
        """Nothing more is written to it."""
        file, self.file = self.file, None
        if file is not None:
            os.close(file)

    def close(self) -> None:
        """The rank has ended, or is not listened to any more."""
        os.close(self.pipe)
        self.close_file()


class StdioOpener:
    """Opens the streams of ranks.

    Args:
        spec: where their output goes.
        host: the name of this machine.
    """

    def __init__(self, spec: LogSpec, host: str) -> None:
        self._spec = spec
        self._host = host

    def open(self, worker: Worker, passed: ExitStack) -> StdioFds:
        """Those of a rank that is about to be started. `passed` closes its ends here, when it has them.

        Raises LaunchError and OSError.
        """
        stdio = StdioFds()
        with ExitStack() as kept:
            stdio.stdout, stdio.stderr = (self._open(stream, worker, stdio, kept, passed) for stream in STREAMS)
            kept.pop_all()
        return stdio

    def _open(self, stream: str, worker: Worker, stdio: StdioFds, kept: ExitStack, passed: ExitStack) -> int | None:
        way = self._spec.way_of(stream, worker.rank)
        if way is StreamRoute.INHERIT:
            return None
        if way is StreamRoute.DISCARD:
            return _closed_by(passed, os.open(os.devnull, os.O_WRONLY))
        file = self._open_file(stream, worker, stdio.stderr_tail) if self._spec.writes(stream, worker.rank) else None
        if file is not None:
            _closed_by(passed if way is StreamRoute.FILE else kept, file)
        if way is StreamRoute.FILE:
            if stream == "stderr":
                stdio.stderr_tail.unread = stdio.stderr_tail.files[stream]
            return file
        ours, theirs = os.pipe()
        _closed_by(kept, ours)
        _closed_by(passed, theirs)
        _prepare(ours)
        rank_stream = self._voice_of(stream, worker) if self._spec.shows(stream, worker.rank) else None
        path, stderr_tail = stdio.stderr_tail.files.get(stream, ""), stdio.stderr_tail if stream == "stderr" else None
        stdio.sources.append(OutputPipe(ours, file, path, rank_stream, stderr_tail))
        return theirs

    def _voice_of(self, stream: str, worker: Worker) -> RankStream:
        template = AUTO_PREFIX if self._spec.prefix is None else self._spec.prefix
        return RankStream(
            worker.rank, stream, lambda: prefix_of(template, worker, self._host).encode(errors="backslashreplace")
        )

    def _open_file(self, stream: str, worker: Worker, stderr_tail: StderrTail) -> int:
        folder = Path(self._spec.folder_of(worker.run_id)) / f"attempt_{worker.restart_count}" / str(worker.rank)
        path = str(folder / f"{stream}.log")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            what = f"the {stream} of rank {worker.rank} cannot be written to {path!r} (see logs)"
            raise LaunchError(with_remedy(what, error)) from error
        stderr_tail.files[stream] = path
        return fd


def _closed_by(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _prepare(pipe: int) -> None:
    os.set_blocking(pipe, False)
    with suppress(OSError):  # a smaller pipe will do
        grow_pipe(pipe, PIPE_SIZE)

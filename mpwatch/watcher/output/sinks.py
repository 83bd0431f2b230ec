"""Sinks: the caller's stdout and stderr, to which the output thread writes what the ranks print.

    sys.stdout is a file, pipe or terminal     _FileSink    bytes, to a second descriptor of the same file
    any other object: a notebook cell, a test  _TextSink    text, by the object's own `write`

If the reader of a stream is slow, the output thread waits for the reader, and the ranks may wait, too. When the descriptor
`stop_fd` becomes readable, a _FileSink stops waiting for the reader. So a reader that never reads again cannot prevent the
end of a run.
"""

import codecs
import io
import os
import select
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from io import FileIO
from typing import IO, Any, Protocol

from mpwatch.os_support.descriptors import count_unread_bytes, read_pipe_size

# Their bytes go to the descriptor unchanged. A file opened by gzip has a descriptor, too, but does not do so.
RAW_STREAMS = (io.BufferedWriter, io.BufferedRandom, io.FileIO)


class Sink(Protocol):
    def write(self, data: bytes) -> bool:
        """Return False if `stop_fd` becomes readable while this waits for a slow reader. Raises what the stream raises."""

    def flush(self) -> None:
        """Flush the stream. Raises any exception that the stream raises."""

    def close(self) -> None:
        """Close the sink, and leave the caller's stream open."""


def open_sink(stream: IO[str] | None, stop_fd: int) -> Sink | None:
    """Return a sink for sys.stdout or sys.stderr, or for what has replaced it. None: there is no open stream.

    Call this in the caller's thread: in a notebook, its contextvars determine in which cell the output appears.
    """
    if stream is None:
        return None
    try:
        if getattr(stream, "closed", False):
            return None
        if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, RAW_STREAMS):
            stream.flush()  # what the caller printed before comes first
            return _FileSink(stream, stop_fd)
    except (OSError, ValueError):  # detached or in memory; or its reader is gone; or no descriptor is left
        pass
    return _TextSink(stream, copy_context())


class _FileSink:
    """Writes bytes to the file, pipe or terminal behind the caller's stream, to which the caller may write at any time, too.

    To keep lines whole, each write is atomic, and ends at the end of a line if possible. A write of PIPE_BUF bytes is
    atomic, and one of up to 3/4 of the pipe's size is in practice, if the pipe is empty.
    """

    def __init__(self, stream: io.TextIOWrapper, stop_fd: int) -> None:
        self._poll = select.poll()
        self._poll.register(stop_fd, select.POLLIN)
        self._file, self._can_block, self._atomic_bytes = _reopen(stream.fileno())
        self._empty_pipe_bytes = 0 if self._can_block else read_pipe_size(self._file.fileno()) * 3 // 4
        self._poll.register(self._file, select.POLLOUT)

    def write(self, data: bytes) -> bool:
        view = memoryview(data)
        at = 0
        while at < len(data):
            if self._can_block and not self._wait_for_room():
                return False
            written = self._try_write(view[at : self._end_of_piece(data, at)])
            at += written
            if not written and not self._wait_for_room():
                return False
        return True

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._file.close()

    def _end_of_piece(self, data: bytes, at: int) -> int:
        limit = at + self._atomic_bytes
        if len(data) > limit and self._empty_pipe_bytes > self._atomic_bytes and not count_unread_bytes(self._file.fileno()):
            limit = at + self._empty_pipe_bytes
        return len(data) if len(data) <= limit else data.rfind(b"\n", at, limit) + 1 or limit

    def _try_write(self, data: memoryview) -> int:
        try:
            return os.write(self._file.fileno(), data)
        except BlockingIOError:
            return 0

    def _wait_for_room(self) -> bool:
        """Wait for the reader to make room for more bytes. Return False if `stop_fd` becomes readable during the wait."""
        return any(fd == self._file.fileno() for fd, _ in self._poll.poll())


def _reopen(fd: int) -> tuple[FileIO, bool, int]:
    """Return a new file for the file behind `fd`, whether a write to it can block, and how many bytes one write may have.

    Other processes may share the caller's open file, so its blocking mode stays as it is. With /proc, a pipe or a terminal
    can be opened again, in non-blocking mode. A socket cannot.
    """
    # One C call opens the descriptor and makes the object that owns it. A signal handler runs between two bytecodes. So its
    # exception cannot leak the descriptor.
    is_file = stat.S_ISREG(os.fstat(fd).st_mode)
    if not is_file:
        with suppress(OSError):
            (file,) = map(FileIO, map(os.open, [f"/proc/self/fd/{fd}"], [os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY]), ["wb"])
            return file, False, select.PIPE_BUF
    (file,) = map(FileIO, map(os.dup, [fd]), ["wb"])
    return (file, False, sys.maxsize) if is_file else (file, True, select.PIPE_BUF)


class _TextSink:
    """Writes text to any object with a method `write`, which runs with the contextvars of the caller's thread."""

    def __init__(self, stream: IO[str], context: Context) -> None:
        self._stream = stream
        self._context = context
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def write(self, data: bytes) -> bool:
        self._call(self._stream.write, self._decode(data))
        return True

    def flush(self) -> None:
        flush = getattr(self._stream, "flush", None)
        if flush is not None:
            self._call(flush)

    def close(self) -> None:
        pass

    def _call(self, function: Callable[..., Any], *args: Any) -> None:
        self._context.run(function, *args)

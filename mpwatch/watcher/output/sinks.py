"""The caller's stdout and stderr, as what the ranks print is written to them by a thread of ours.

Whoever reads them may be slow, and is waited for: then the ranks wait, too. But that wait can be given up, or a run could
not end while somebody has stopped their pager.
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

from mpwatch.os_support.descriptors import bytes_in, pipe_size

# These write to a descriptor what is written to them; what gzip opens has one, too, and does not.
PLAIN = (io.BufferedWriter, io.BufferedRandom, io.FileIO)


class Sink(Protocol):
    """Where to write."""

    def write(self, data: bytes) -> bool:
        """All of it; False if the wait for who reads it was given up. Raises whatever the stream raises."""

    def flush(self) -> None:
        """What has been written is on its way. Raises whatever the stream raises."""

    def close(self) -> None:
        """Give back what was taken."""


def sink_of(stream: IO[str] | None, stop_waiting_for_reader: int) -> Sink | None:
    """One for a stream of the caller's, as it is now; None if nothing can be written to it.

    Args:
        stream: sys.stdout, say. A notebook's knows by the context it is written in which cell it belongs to.
        gives_up: a descriptor that becomes readable when no more is to be waited for.
    """
    if stream is None:
        return None
    try:
        if getattr(stream, "closed", False):
            return None
        if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, PLAIN):
            stream.flush()  # what was printed before comes before
            return _FileSink(stream, stop_waiting_for_reader)
    except (OSError, ValueError):  # it is detached, or in memory; nobody reads it, or there is no room for one more
        pass
    return _TextSink(stream, copy_context())


class _FileSink:
    """A descriptor: bytes as they are.

    The caller may write to it, too, at any time. So whole lines are written, and no more at a time than is taken in one
    piece: nobody comes between the parts of a line. A pipe promises that for a page; one that is empty has room for more.
    """

    def __init__(self, stream: io.TextIOWrapper, stop_waiting_for_reader: int) -> None:
        self._poll = select.poll()
        self._poll.register(stop_waiting_for_reader, select.POLLIN)
        self._file, self._blocks, self._portion = _open_again(stream.fileno())
        self._room_if_empty = 0 if self._blocks else pipe_size(self._file.fileno()) * 3 // 4
        self._poll.register(self._file, select.POLLOUT)

    def write(self, data: bytes) -> bool:
        rest = memoryview(data)
        at = 0
        while at < len(data):
            if self._blocks and not self._has_room():
                return False
            written = self._write(rest[at : self._end_of_portion(data, at)])
            at += written
            if not written and not self._has_room():
                return False
        return True

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._file.close()

    def _end_of_portion(self, data: bytes, at: int) -> int:
        most = at + self._portion
        if len(data) > most and self._room_if_empty > self._portion and not bytes_in(self._file.fileno()):
            most = at + self._room_if_empty
        return len(data) if len(data) <= most else data.rfind(b"\n", at, most) + 1 or most

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._file.fileno(), data)
        except BlockingIOError:
            return 0

    def _has_room(self) -> bool:
        return any(fd == self._file.fileno() for fd, _ in self._poll.poll())


def _open_again(fd: int) -> tuple[FileIO, bool, int]:
    """The same file once more, whether to write to it blocks where there is no room, and how much is written in one piece.

    The descriptor that is there may block, and is not ours alone to change. A pipe or a terminal can be opened anew, where
    there is a /proc.
    """
    # each in one call of C: between two bytecodes an exception could be thrown at us, and the descriptor be nobody's
    is_file = stat.S_ISREG(os.fstat(fd).st_mode)
    if not is_file:
        with suppress(OSError):
            (file,) = map(FileIO, map(os.open, [f"/proc/self/fd/{fd}"], [os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY]), ["wb"])
            return file, False, select.PIPE_BUF
    (file,) = map(FileIO, map(os.dup, [fd]), ["wb"])
    return (file, False, sys.maxsize) if is_file else (file, True, select.PIPE_BUF)


class _TextSink:
    """Any object that text can be written to, in the context of the thread that has made this."""

    def __init__(self, stream: IO[str], context: Context) -> None:
        self._stream = stream
        self._context = context
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def write(self, data: bytes) -> bool:
        self._run(self._stream.write, self._decode(data))
        return True

    def flush(self) -> None:
        flush = getattr(self._stream, "flush", None)
        if flush is not None:
            self._run(flush)

    def close(self) -> None:
        pass

    def _run(self, do: Callable[..., Any], *args: Any) -> None:
        self._context.run(do, *args)

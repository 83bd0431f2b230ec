"""Sinks: the caller's stdout and stderr, to which the output thread writes what the ranks print.

    sys.stdout is a file, pipe or terminal     FileSink    bytes, to a second descriptor of the same file
    any other object: a notebook cell, a test  TextSink    text, by the object's own `write`

`write` and `flush` raise what the stream raises. `close` leaves the caller's stream open. If the reader of a stream is slow,
the output thread waits for the reader, and the ranks may wait, too.
"""

import codecs
import io
import os
import select
import stat
import sys
from contextlib import suppress
from contextvars import Context, copy_context
from typing import IO

# Their bytes go to the descriptor unchanged. A file opened by gzip has a descriptor, too, but does not do so.
RAW_STREAMS = (io.BufferedWriter, io.BufferedRandom, io.FileIO)


def open_sink(stream: IO[str] | None) -> "Sink | None":
    """Return None if there is no open stream. For the caller's thread, whose contextvars choose the cell of a notebook."""
    if stream is None:
        return None
    try:
        if getattr(stream, "closed", False):
            return None
        if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, RAW_STREAMS):
            stream.flush()  # what the caller printed before comes first
            return FileSink(stream)
    except (OSError, ValueError):  # detached or in memory; or its reader is gone; or no descriptor is left
        pass
    return TextSink(stream, copy_context())


class FileSink:
    """Writes bytes to the file, pipe or terminal behind the caller's stream, to which the caller may write at any time, too.

    To keep lines whole, each write to a pipe has at most PIPE_BUF bytes, which makes it atomic, and ends at the end of a
    line if possible.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self.has_colours = _shows_colours(stream)
        self._fd = os.dup(stream.fileno())
        is_file = stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._atomic_bytes = sys.maxsize if is_file else select.PIPE_BUF

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        at = 0
        while at < len(data):
            try:
                at += os.write(self._fd, view[at : self._end_of_piece(data, at)])
            except BlockingIOError:  # another user of the open file, such as asyncio, has made it non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._fd)

    def _end_of_piece(self, data: bytes, at: int) -> int:
        limit = at + self._atomic_bytes
        return len(data) if len(data) <= limit else data.rfind(b"\n", at, limit) + 1 or limit


class TextSink:
    """Writes text to any object with a method `write`, which runs with the contextvars of the caller's thread."""

    def __init__(self, stream: IO[str], context: Context) -> None:
        self._stream, self._context, self.has_colours = stream, context, _shows_colours(stream)
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def write(self, data: bytes) -> None:
        self._context.run(self._stream.write, self._decode(data))

    def flush(self) -> None:
        if hasattr(self._stream, "flush"):
            self._context.run(self._stream.flush)

    def close(self) -> None:
        pass


Sink = FileSink | TextSink


def _shows_colours(stream: IO[str]) -> bool:
    """Whether the stream is a terminal with colours, and the user has not turned them off (https://no-color.org)."""
    with suppress(Exception):  # the calling program may have put any object there
        return bool(stream.isatty()) and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
    return False

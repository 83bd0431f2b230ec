"""What is kept of what a rank has written: the last lines of its stderr, for the report, and where all of it is."""

import os
from contextlib import suppress

from mpwatch.watcher.output.line_assembler import LineAssembler

KEPT = 8192  # bytes
LAST_LINES = 50  # C++ adds a stack of some twenty lines to the last words of an exception


class StderrTail:
    """Of one rank in one life. Fed by the thread that reads its streams."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}  # by stream, the paths of those that are written to files
        self.unread = ""  # that of its stderr, if it goes there alone
        self._end = b""
        self._is_cut = False
        self._begins_at = 0  # of that file

    def hear(self, data: bytes) -> None:
        """It has written this to its stderr."""
        self._end += data[-KEPT:]
        if len(self._end) > KEPT or len(data) > KEPT:
            self._end, self._is_cut = self._end[-KEPT:], True

    def forget(self) -> None:
        """What was written in an earlier call is none of the next."""
        self._end, self._is_cut = b"", False
        if self.unread:
            with suppress(OSError):
                self._begins_at = os.stat(self.unread).st_size

    def last_lines(self) -> str:
        """The end of its stderr, as a terminal would show it; empty if that went to the caller's own."""
        end, is_cut = self._end, self._is_cut
        if self.unread:
            end, is_cut = _end_of(self.unread, self._begins_at)
        lines = LineAssembler()
        text = (lines.feed(end) + lines.end()).decode(errors="replace")
        return "\n".join(text.splitlines()[int(is_cut) :][-LAST_LINES:])


def _end_of(path: str, begins_at: int) -> tuple[bytes, bool]:
    """Of what a file holds from there on, and whether something of that comes before it."""
    with suppress(OSError), open(path, "rb") as file:
        end_begins_at = max(begins_at, file.seek(0, os.SEEK_END) - KEPT)
        file.seek(end_begins_at)
        return file.read(KEPT), end_begins_at > begins_at
    return b"", False

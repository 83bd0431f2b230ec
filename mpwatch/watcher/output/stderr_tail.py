"""Keep the last lines of a rank's stderr, and the paths of its log files, for the report of a failure."""

import os
from contextlib import suppress

from mpwatch.os_support.descriptors import open_regular_file
from mpwatch.watcher.output.line_assembler import LineAssembler

TAIL_BYTES = 8192
TAIL_LINES = 50  # C++ prints a stack of some twenty lines after the message of an exception


class StderrTail:
    """Keeps the end of one rank's stderr. If the rank's stderr is a pipe, the output thread calls `feed`."""

    def __init__(self) -> None:
        self.log_files: dict[str, str] = {}  # paths of the log files, by stream
        self.direct_file = ""  # the path of the stderr file, if the rank writes to it directly and not to a pipe
        self._tail = b""
        self._is_cut = False
        self._call_offset = 0  # in `direct_file`: where the output of the current call begins

    def feed(self, data: bytes) -> None:
        self._tail += data[-TAIL_BYTES:]
        if len(self._tail) > TAIL_BYTES or len(data) > TAIL_BYTES:
            self._tail, self._is_cut = self._tail[-TAIL_BYTES:], True

    def clear(self) -> None:
        self._tail, self._is_cut = b"", False
        if self.direct_file:
            with suppress(OSError):
                self._call_offset = os.stat(self.direct_file).st_size

    def last_lines(self) -> str:
        """As a terminal would show them. Empty if the rank has inherited the caller's stderr."""
        tail, is_cut = self._tail, self._is_cut
        if self.direct_file:
            tail, is_cut = _read_tail(self.direct_file, self._call_offset)
        assembler = LineAssembler()
        text = (assembler.feed(tail) + assembler.flush()).decode(errors="replace")
        return "\n".join(text.splitlines()[int(is_cut) :][-TAIL_LINES:])


def _read_tail(path: str, offset: int) -> tuple[bytes, bool]:
    with suppress(OSError), open(path, "rb", opener=open_regular_file) as file:
        tail_offset = max(offset, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(tail_offset)
        return file.read(TAIL_BYTES), tail_offset > offset
    return b"", False

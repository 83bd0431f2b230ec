"""Keep the last lines of a rank's stderr, and the paths of its log files, for the report of a failure."""

from mpwatch.watcher.output.line_assembler import LineAssembler

TAIL_BYTES = 8192
TAIL_LINES = 50  # C++ prints a stack of some twenty lines after the message of an exception


class StderrTail:
    """The output thread calls `feed`."""

    def __init__(self) -> None:
        self.log_files: dict[str, str] = {}  # paths of the log files, by stream
        self._tail = b""
        self._is_cut = False

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

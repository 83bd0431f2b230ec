r"""Turns what one rank writes to stdout or stderr into what is shown of it. Pure.

    passthrough    only one rank is shown       bytes as they come: a progress bar moves, half a line appears at once
    lines          several ranks, or a prefix   complete lines, each with the prefix of its rank, such as "[3] "

A progress bar writes the same line many times, with a carriage return between two updates. Only the text after the last one
is kept: "10%\r20%\r30%\n" becomes "30%\n". A new update is shown as a separate line, at most once in SHOW_SECONDS, and the
last one always. Escape sequences that move the cursor or erase text are removed, because they would damage the lines of
other ranks in the same terminal. Those for colours are kept.
"""

import math
import re
from collections.abc import Callable

SHOW_SECONDS = 2.0  # before an unfinished line is shown, and between two updates of it
COLOURS = (36, 33, 32, 35, 34)  # of prefixes, by rank: cyan, yellow, green, magenta and blue in a terminal
MAX_LINE_BYTES = 1 << 20  # a longer line is split, because an unfinished line is kept in memory
OVERWRITTEN = re.compile(rb"^[^\n]*\r(?=[^\r\n])", re.MULTILINE)  # all before the last "\r" that is followed by text
REPEATED_RETURNS = re.compile(rb"\r{2,}")  # same effect as one
CURSOR_CONTROLS = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")  # move the cursor, erase, scroll, set a mode


class LineAssembler:
    """Makes the lines that a terminal would show."""

    def __init__(self) -> None:
        self._unfinished = b""  # the line without a newline so far

    def feed(self, data: bytes) -> bytes:
        """Add bytes that the rank has written, and return the lines that are now complete, each with its newline."""
        end = data.rfind(b"\n") + 1
        complete = b"".join((self._unfinished, memoryview(data)[:end])) if end else b""
        self._unfinished = _remove_overwritten(data[end:] if end else self._unfinished + data)
        too_long = self.flush() if len(self._unfinished) > MAX_LINE_BYTES else b""
        return _remove_overwritten(complete) + too_long

    @property
    def unfinished_line(self) -> bytes:
        """The visible text of the line that has no newline yet."""
        return self._unfinished.rstrip(b"\r")

    def flush(self) -> bytes:
        line, self._unfinished = self.unfinished_line, b""
        return line + b"\n" if line else b""


def _remove_overwritten(text: bytes) -> bytes:
    if b"\x1b" in text:
        text = CURSOR_CONTROLS.sub(b"", text)
    if b"\r" in text:
        text = OVERWRITTEN.sub(b"", REPEATED_RETURNS.sub(b"\r", text).replace(b"\r\n", b"\n"))
    return text


class RankStream:
    """`make_prefix` is None for passthrough. `stream` is None if it is not shown."""

    def __init__(self, rank: int, stream: str | None, make_prefix: Callable[[], bytes] | None) -> None:
        self.stream = stream
        self._rank = rank
        self._make_prefix = make_prefix
        self._assembler = LineAssembler()
        self._shown = b""  # the state of the unfinished line that was shown last
        self.due_at = math.inf  # when the unfinished line is shown next

    def feed(self, data: bytes, now: float) -> bytes:
        """Return the lines that are now complete, but not one that was shown without its newline."""
        if self._make_prefix is None:
            return data
        lines, shown = self._assembler.feed(data), self._shown
        if lines:
            self._shown, self.due_at = b"", math.inf
        if self._assembler.unfinished_line not in (b"", self._shown):
            self.due_at = min(self.due_at, now + SHOW_SECONDS)
        return lines.removeprefix(shown + b"\n") if shown else lines

    def take_update(self) -> bytes:
        """Return the unfinished line with a newline, unless it is empty or was shown."""
        line, shown = self._assembler.unfinished_line, self._shown
        self._shown, self.due_at = line, math.inf
        return line + b"\n" if line not in (b"", shown) else b""

    def end_line(self) -> bytes:
        """Do the same. The next byte begins a new line."""
        update = self.take_update()
        self._assembler.flush()
        self._shown = b""
        return update

    def add_prefix(self, lines: bytes, *, is_coloured: bool) -> bytes:
        prefix = b"" if self._make_prefix is None else self._make_prefix()
        if not prefix:
            return lines
        if is_coloured:
            prefix = b"\x1b[%dm%b\x1b[0m" % (COLOURS[self._rank % len(COLOURS)], prefix)
        with_one_more = memoryview(lines.replace(b"\n", b"\n" + prefix))
        return b"".join((prefix, with_one_more[: -len(prefix)]))

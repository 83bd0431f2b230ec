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


def remove_overwritten(text: bytes) -> bytes:
    """Return the lines that a terminal would show. The last one may be unfinished, and end with a carriage return."""
    if b"\x1b" in text:
        text = CURSOR_CONTROLS.sub(b"", text)
    if b"\r" in text:
        text = OVERWRITTEN.sub(b"", REPEATED_RETURNS.sub(b"\r", text).replace(b"\r\n", b"\n"))
    return text


class RankStream:
    """`make_prefix` is None for passthrough. `stream` is None if it is not shown."""

    def __init__(self, rank: int, stream: str | None, make_prefix: Callable[[], str] | None) -> None:
        self.stream = stream
        self._rank = rank
        self._make_prefix = make_prefix
        self._unfinished = b""  # the line without a newline so far
        self._shown = b""  # the state of the unfinished line that was shown last
        self.due_at = math.inf  # when the unfinished line is shown next

    def feed(self, data: bytes, now: float) -> bytes:
        """Return the lines that are now complete, but not one that was shown without its newline."""
        if self._make_prefix is None:
            return data
        end, shown = data.rfind(b"\n") + 1, self._shown
        lines = remove_overwritten(self._unfinished + data[:end]) if end else b""
        self._unfinished = remove_overwritten(data[end:] if end else self._unfinished + data)
        if len(self._unfinished) > MAX_LINE_BYTES:
            lines, self._unfinished = lines + self._unfinished.rstrip(b"\r") + b"\n", b""
        if lines:
            self._shown, self.due_at = b"", math.inf
        if self._unfinished.rstrip(b"\r") not in (b"", self._shown):
            self.due_at = min(self.due_at, now + SHOW_SECONDS)
        return lines.removeprefix(shown + b"\n") if shown else lines

    def take_update(self) -> bytes:
        """Return the unfinished line with a newline, unless it is empty or was shown."""
        line, shown = self._unfinished.rstrip(b"\r"), self._shown
        self._shown, self.due_at = line, math.inf
        return line + b"\n" if line not in (b"", shown) else b""

    def end_line(self) -> bytes:
        """Do the same. The next byte begins a new line."""
        update = self.take_update()
        self._unfinished = self._shown = b""
        return update

    def add_prefix(self, lines: bytes, *, is_coloured: bool) -> bytes:
        prefix = b"" if self._make_prefix is None else self._make_prefix().encode(errors="backslashreplace")
        if not prefix:
            return lines
        if is_coloured:
            prefix = b"\x1b[%dm%b\x1b[0m" % (COLOURS[self._rank % len(COLOURS)], prefix)
        with_one_more = memoryview(lines.replace(b"\n", b"\n" + prefix))
        return b"".join((prefix, with_one_more[: -len(prefix)]))

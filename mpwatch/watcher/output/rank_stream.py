"""Turns what one rank writes to stdout or stderr into what is shown of it. This module reads no clock and no pipe.

    passthrough    only one rank is shown       bytes as they come: a progress bar moves, half a line appears at once
    lines          several ranks, or a prefix   complete lines, each with the prefix of its rank, such as "[3] "

LineAssembler keeps only the latest update of a progress bar. A new update is shown as a separate line, at most once in
SHOW_SECONDS, and the last one always.
"""

import math
from collections.abc import Callable

from mpwatch.watcher.output.line_assembler import LineAssembler, add_prefix

SHOW_SECONDS = 2.0  # before an unfinished line is shown, and between two updates of it
COLOURS = (36, 33, 32, 35, 34)  # of prefixes, by rank: cyan, yellow, green, magenta and blue in a terminal


class RankStream:
    """`make_prefix` is None for passthrough."""

    def __init__(self, rank: int, stream: str, make_prefix: Callable[[], bytes] | None) -> None:
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
        if prefix and is_coloured:
            prefix = b"\x1b[%dm%b\x1b[0m" % (COLOURS[self._rank % len(COLOURS)], prefix)
        return add_prefix(lines, prefix)

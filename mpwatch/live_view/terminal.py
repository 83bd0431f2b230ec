"""The live view in the last rows of a terminal, while this program is in the foreground.

It reads nothing from the terminal, installs no signal handler, and writes nothing while output is paused (Ctrl-S).
When the terminal changes its size, it forgets which rows are reserved, until the next drawing.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from mpwatch.live_view.formatting import format_overall
from mpwatch.live_view.model import Snapshot
from mpwatch.live_view.scroll_region import RECOVER, ScrollRegion, go_to_line_start
from mpwatch.live_view.tty import is_foreground, is_writable
from mpwatch.os_support.clock import monotonic

MAX_GAP = 2.0  # if the time between two drawings is longer, this program was stopped, and others had the terminal
WRITE_SECONDS = 1.0  # if the terminal takes no output for this time, the write ends

_latest: "Callable[[], TerminalDisplay | None]" = lambda: None  # noqa: E731  weak reference to the last display made


class Renderer(Protocol):
    def render(self, snapshot: Snapshot, columns: int, rows: int) -> Sequence[str]:
        """Return the rows of the view for a terminal of this size."""


def is_terminal_free() -> bool:
    latest = _latest()
    return latest is None or latest.is_closed


class TerminalDisplay:
    period = 0.25

    def __init__(self, fd: int, renderer: Renderer, encoding: str, clock: Callable[[], float] = monotonic) -> None:
        global _latest
        self._fd = fd
        self._renderer = renderer
        self._encoding = encoding
        self._clock = clock
        self._region = ScrollRegion()
        self._drawn_at = clock()
        self._was_drawn = self.is_closed = False
        self._is_write_incomplete = False  # the last write was interrupted, or the terminal did not take all of it
        _latest = weakref.ref(self)

    def show(self, snapshot: Snapshot) -> None:
        if not is_foreground(self._fd):
            self.pause()  # the program in the foreground needs all rows
            return
        columns, rows = os.get_terminal_size(self._fd)
        if not is_writable(self._fd, 0.0):
            return
        now = self._clock()
        lines = self._renderer.render(snapshot, columns, rows)
        is_state_known = now - self._drawn_at < MAX_GAP and not self._is_write_incomplete
        self._write(self._region.draw(columns, rows, lines, is_state_known=is_state_known), WRITE_SECONDS)
        self._drawn_at = now
        self._was_drawn = self._was_drawn or bool(lines)

    def pause(self) -> None:
        """Release the reserved rows. At Ctrl-Z the kernel discards output, perhaps the end of an escape sequence."""
        self._write(self._region.recover() + self._region.release(), WRITE_SECONDS)
        self._region.mark_released()

    def close(self, snapshot: Snapshot) -> None:
        """Release the reserved rows, and then write one line that shows the final progress."""
        text = self._region.release()
        if self._was_drawn and is_foreground(self._fd):
            columns, _ = os.get_terminal_size(self._fd)
            text += f"{go_to_line_start(columns)}mpwatch: {format_overall(snapshot)}\r\n"
        self._write(text, WRITE_SECONDS)
        self._region.mark_released()
        self._was_drawn, self.is_closed = False, True

    def _write(self, text: str, timeout: float) -> None:
        """Stop writing if the terminal accepts no output for `timeout` seconds."""
        if text and self._is_write_incomplete:
            text = RECOVER + text
        rest = memoryview(text.encode(self._encoding, errors="replace"))
        while rest and is_writable(self._fd, timeout):
            self._is_write_incomplete = True  # stays so if an exception is raised
            with suppress(BlockingIOError):  # another process may have filled the terminal's buffer meanwhile
                rest = rest[os.write(self._fd, rest) :]
        if not rest:
            self._is_write_incomplete = False

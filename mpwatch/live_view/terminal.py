"""The live view in a terminal: the last rows of it, as long as this program is in its foreground.

What is written there is made in region.py. Nothing is read from the terminal, no handler is set, and one that takes nothing
for a while (Ctrl-S) is left alone until it does. When its size changes it forgets which rows are kept, and we see that when
the next picture is due: what ranks print in that quarter of a second may come among the rows of the view.
"""

import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from mpwatch.live_view.formatting import line_of
from mpwatch.live_view.model import Snapshot
from mpwatch.live_view.scroll_region import MEND, ScrollRegion, at_line_start
from mpwatch.live_view.tty import is_foreground, name_of, takes

PERIOD = 0.25
GAP = 2.0  # seconds between two pictures, after which somebody else may have had the terminal: this program was stopped
LAST_SECONDS = 1.0  # for a terminal to take what puts it in order again

_latest: "Callable[[], TerminalDisplay | None]" = lambda: None  # noqa: E731  that was made, if it is still there


class Renderer(Protocol):
    """What makes rows of a picture: table.py."""

    def render(self, picture: Snapshot, columns: int, rows: int) -> Sequence[str]:
        """For a terminal of that size."""


def is_free() -> bool:
    """Whether no view of this process is in a terminal now: another thread's, or of a run within which this one is."""
    latest = _latest()
    return latest is None or latest.has_left


class TerminalDisplay:
    """In the terminal that this descriptor is of."""

    def __init__(self, fd: int, rows: Renderer, encoding: str, clock: Callable[[], float] = time.monotonic) -> None:
        global _latest
        self._fd = fd
        self._rows = rows
        self._encoding = encoding
        self._clock = clock
        self._region = ScrollRegion()
        self._name = name_of(fd)
        self._drawn_at = clock()
        self._was_drawn = self.has_left = False
        self._is_cut = False  # what was last written: it was interrupted, or not taken
        _latest = weakref.ref(self)

    @property
    def period(self) -> float:
        """Seconds between two pictures."""
        return PERIOD

    @property
    def repair(self) -> tuple[str, bytes] | None:
        """What gives back the rows that are kept, if the terminal has a name."""
        text = self._region.release()
        return (self._name, text.encode()) if text and self._name else None

    def show(self, picture: Snapshot) -> None:
        """In one write; nothing while this program is in the background, or the terminal takes nothing."""
        if not is_foreground(self._fd):
            self._write(self._region.release(), patience=0.0)  # else it would stay in the way of whoever is there now
            self._region.forget()
            return
        columns, rows = os.get_terminal_size(self._fd)
        if not takes(self._fd, 0.0):
            return
        now = self._clock()
        lines = self._rows.render(picture, columns, rows)
        is_sure = now - self._drawn_at < GAP and not self._is_cut
        self._write(self._region.draw(columns, rows, lines, is_sure=is_sure), patience=LAST_SECONDS)
        self._drawn_at = now
        self._was_drawn = self._was_drawn or bool(lines)

    def leave(self, picture: Snapshot) -> None:
        """The rows are everybody's again; a line stays, where the cursor is."""
        text = self._region.release()
        if self._was_drawn and is_foreground(self._fd):
            columns, _ = os.get_terminal_size(self._fd)
            text += f"{at_line_start(columns)}mpwatch: {line_of(picture)}\r\n"
        self._write(text, patience=LAST_SECONDS)
        self._region.forget()
        self._was_drawn, self.has_left = False, True

    def _write(self, text: str, patience: float) -> None:
        """All of it, or as much as the terminal takes before it takes nothing for that long."""
        if text and self._is_cut:
            text = MEND + text
        rest = memoryview(text.encode(self._encoding, errors="replace"))
        while rest and takes(self._fd, patience):
            self._is_cut = True  # unless the rest follows
            with suppress(BlockingIOError):  # others may have filled it meanwhile
                rest = rest[os.write(self._fd, rest) :]
        if not rest:
            self._is_cut = False

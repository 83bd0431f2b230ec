"""The live view in the last rows of a terminal, while this program is in the foreground.

It reads nothing from the terminal, installs no signal handler, and writes nothing while output is paused (Ctrl-S).
"""

import os
from typing import ClassVar, TextIO

from mpwatch.live_view.formatting import format_overall
from mpwatch.live_view.live import Display
from mpwatch.live_view.model import Snapshot
from mpwatch.live_view.rich_rows import render
from mpwatch.live_view.scroll_region import ScrollRegion, go_to_line_start
from mpwatch.live_view.tty import is_foreground, is_writable

WRITE_SECONDS = 1.0  # if the terminal takes no output for this time, nothing is written


class TerminalDisplay(Display):
    period = 0.25
    is_in_use: ClassVar = False
    """Whether a view is in the terminal, which has room for one."""

    def __init__(self, terminal: TextIO) -> None:
        self._fd = terminal.fileno()
        self._encoding = getattr(terminal, "encoding", None) or "utf-8"  # a stream object of the user may have none
        self._region = ScrollRegion()
        self._was_drawn, TerminalDisplay.is_in_use = False, True

    def show(self, snapshot: Snapshot) -> None:
        if not is_foreground(self._fd):
            self.pause()  # the program in the foreground needs all rows
        elif is_writable(self._fd, 0.0):
            columns, rows = os.get_terminal_size(self._fd)
            lines = render(snapshot, columns, rows, self._encoding)
            self._write(self._region.draw(columns, rows, lines))
            self._was_drawn = self._was_drawn or bool(lines)

    def pause(self) -> None:
        self._write(self._region.release())

    def close(self, snapshot: Snapshot) -> None:
        """Release the reserved rows, and then write one line that shows the final progress."""
        was_drawn, self._was_drawn, TerminalDisplay.is_in_use = self._was_drawn, False, False
        text = self._region.release()
        if was_drawn and is_foreground(self._fd):
            columns, _ = os.get_terminal_size(self._fd)
            text += f"{go_to_line_start(columns)}mpwatch: {format_overall(snapshot)}\r\n"
        self._write(text)

    def _write(self, text: str) -> None:
        if text and is_writable(self._fd, WRITE_SECONDS):
            os.write(self._fd, text.encode(self._encoding, errors="replace"))

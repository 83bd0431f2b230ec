r"""The live view in the last rows of a terminal, while this program is in the foreground.

    row 1        earlier output
    ...          present output_                 <- the cursor; this part scrolls
    row H - N    ----------------------------
    ...          the view, N rows
    row H

Ranks write to the terminal directly and at any time. After the escape sequence DECSTBM the terminal scrolls only the rows
above the view. Each drawing saves and restores the cursor (DECSC, DECRC), and is a single write. All modern terminals
understand this. The view reads nothing from the terminal, installs no signal handler, and writes nothing while output is
paused (Ctrl-S).
"""

import os
from collections.abc import Sequence
from typing import ClassVar, TextIO

from mpwatch.live_view.formatting import format_overall
from mpwatch.live_view.live import Display
from mpwatch.live_view.model import Snapshot
from mpwatch.live_view.rich_rows import render
from mpwatch.live_view.tty import is_foreground, is_writable

WRITE_SECONDS = 1.0  # if the terminal takes no output for this time, nothing is written
SAVE_CURSOR, RESTORE_CURSOR = "\x1b7", "\x1b8"
INDEX = "\x1bD"  # scrolls like a newline, but keeps the cursor's column
SCROLL_ALL = f"{SAVE_CURSOR}\x1b[r{RESTORE_CURSOR}"  # reserves no rows. The sequence inside moves the cursor
ERASE_BELOW = f"{SAVE_CURSOR}\x1b[B\r\x1b[J{RESTORE_CURSOR}"  # erases the rows below the cursor's row
WRAP_OFF, WRAP_ON = "\x1b[?7l", "\x1b[?7h"  # a row may be wider than computed
RESET_STYLE, CLEAR_ROW, CLEAR_REST = "\x1b[0m", "\x1b[2K", "\x1b[K"
END_SEQUENCE = f"\x18{RESET_STYLE}{WRAP_ON}"  # after an incomplete drawing. CAN ends an incomplete escape sequence


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


class ScrollRegion:
    """The rows that are reserved for the view. Its methods only return text."""

    def __init__(self) -> None:
        self._reserved: tuple[int, int, int] | None = None  # columns and rows of the terminal, rows of the view

    def draw(self, columns: int, rows: int, lines: Sequence[str]) -> str:
        """Return the text that draws `lines`, which are fewer than `rows`, in the reserved rows."""
        if not lines:
            return self.release()
        height, size = len(lines), (columns, rows, len(lines))
        text = ""
        if size != self._reserved:  # make empty rows below the cursor, and reserve the last rows
            room = INDEX * height + f"\x1b[{height}A"
            text = f"{SCROLL_ALL}{room}{ERASE_BELOW}{SAVE_CURSOR}\x1b[1;{rows - height}r{RESTORE_CURSOR}"
        self._reserved = size
        first = rows - height + 1
        drawn = "".join(f"\x1b[{first + n};1H{RESET_STYLE}{CLEAR_ROW}{line}" for n, line in enumerate(lines))
        return f"{text}{SAVE_CURSOR}{WRAP_OFF}{drawn}{RESET_STYLE}{WRAP_ON}{RESTORE_CURSOR}"

    def release(self) -> str:
        """Return the text that erases the reserved rows and lets the whole terminal scroll. The cursor stays.

        The last drawing may be incomplete, with the cursor inside the view: at Ctrl-Z the kernel discards output.
        """
        if self._reserved is None:
            return ""
        _, rows, height = self._reserved
        self._reserved = None
        erase_view = f"{SAVE_CURSOR}\x1b[{rows - height + 1};1H\x1b[J{RESTORE_CURSOR}"
        return f"{END_SEQUENCE}{SCROLL_ALL}{erase_view}{ERASE_BELOW}"


def go_to_line_start(columns: int) -> str:
    """Move to the start of an empty line: blanks fill the rest of a line that has begun, and then a line of their own."""
    return " " * columns + "\r" + CLEAR_REST

r"""Reserve the last rows of a terminal for the view, while ranks go on printing above them. Pure: it returns what to write.

Ranks write to the terminal themselves, at any time and from other processes. So the view cannot be erased before they print
and drawn again afterwards. Instead, the terminal scrolls only the rows above the view (DECSTBM). Each drawing saves the
cursor, moves it to the view, and restores it (DECSC, DECRC). It is one write, so that no other output comes between.

    row 1        what was printed
    ...          what is being printed_          <- the cursor; this part scrolls
    row H - N    ----------------------------
    ...          the view, N rows
    row H

The escape sequences are those of ECMA-48 and DEC, which all of today's terminals understand. IND makes room below the
cursor: it scrolls like a newline and leaves the cursor in its column.
"""

from collections.abc import Sequence

SAVE_CURSOR, RESTORE_CURSOR = "\x1b7", "\x1b8"
INDEX = "\x1bD"
SCROLL_ALL = f"{SAVE_CURSOR}\x1b[r{RESTORE_CURSOR}"  # no rows reserved; the sequence itself moves the cursor
ERASE_BELOW = f"{SAVE_CURSOR}\x1b[B\r\x1b[J{RESTORE_CURSOR}"  # below the cursor's row, which may have printed text
WRAP_OFF, WRAP_ON = "\x1b[?7l", "\x1b[?7h"  # a row may be wider than computed
RESET_STYLE, CLEAR_ROW, CLEAR_REST = "\x1b[0m", "\x1b[2K", "\x1b[K"
END_SEQUENCE = f"\x18{RESET_STYLE}{WRAP_ON}"  # after an incomplete drawing: CAN ends half an escape sequence
RECOVER = END_SEQUENCE + RESTORE_CURSOR


class ScrollRegion:
    """The reserved rows of one terminal. Each method returns text; the caller writes it to the terminal."""

    def __init__(self) -> None:
        self._reserved: tuple[int, int, int] | None = None  # columns and rows of the terminal, rows of the view

    def draw(self, columns: int, rows: int, lines: Sequence[str], *, is_state_known: bool = True) -> str:
        """Return what draws these lines in the place of the last ones. No lines: release the rows.

        Args:
            columns: width of the terminal.
            rows: height of the terminal; more than there are lines.
            lines: rows of the view, with colours.
            is_state_known: False if another program may have used the terminal meanwhile. The rows are then reserved again,
                in a way that works for every state of the terminal, as after a change of its size.
        """
        if not lines:
            text = self.release()
            self.mark_released()
            return text
        size = (columns, rows, len(lines))
        text = "" if size == self._reserved and is_state_known else _reserve(rows, len(lines))
        self._reserved = size
        first = rows - len(lines) + 1
        drawn = "".join(f"\x1b[{first + n};1H{RESET_STYLE}{CLEAR_ROW}{line}" for n, line in enumerate(lines))
        return f"{text}{SAVE_CURSOR}{WRAP_OFF}{drawn}{RESET_STYLE}{WRAP_ON}{RESTORE_CURSOR}"

    def release(self) -> str:
        """Return what makes the whole terminal scroll again, with the cursor where it is. Empty if no rows are reserved."""
        return "" if self._reserved is None else SCROLL_ALL + ERASE_BELOW

    def recover(self) -> str:
        """Return what releases the rows after the death of this process, which may have come in the middle of a drawing.

        The cursor may be in the view then. So the rows of the view are erased by their numbers, and not as those below the
        cursor. The cursor stays where it is. Empty if no rows are reserved.
        """
        if self._reserved is None:
            return ""
        _, rows, height = self._reserved
        erase_view = f"{SAVE_CURSOR}\x1b[{rows - height + 1};1H\x1b[J{RESTORE_CURSOR}"
        return f"{END_SEQUENCE}{SCROLL_ALL}{erase_view}"

    def mark_released(self) -> None:
        """Call this after the text of `release` was written. An exception may come before that, so `release` does not."""
        self._reserved = None


def go_to_line_start(columns: int) -> str:
    """Return what moves the cursor to the next line, unless it is at the start of a line.

    As many blanks as the terminal has columns do so: they wrap to the next line only if the cursor was not at the start.
    """
    return " " * columns + "\r" + CLEAR_REST


def _reserve(rows: int, height: int) -> str:
    """Return what reserves rows from any state: scroll everything, make room below the cursor, erase it, set the region."""
    room = INDEX * height + f"\x1b[{height}A"
    return f"{SCROLL_ALL}{room}{ERASE_BELOW}{SAVE_CURSOR}\x1b[1;{rows - height}r{RESTORE_CURSOR}"

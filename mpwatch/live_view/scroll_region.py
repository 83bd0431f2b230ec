r"""Reserve the last rows of a terminal for the live view, so that the output of ranks appears above the view.

The functions of this module only return text. terminal.py writes the text to the terminal.

Ranks are other processes, which write to the terminal directly and at any time. To protect the view from the ranks' output,
mpwatch sends the escape sequence DECSTBM, after which the terminal scrolls only the rows above the view. Each drawing of the
view saves and restores the position of the cursor (DECSC, DECRC). Each drawing of the view is a single write, so that no
output of ranks can appear in the middle of a drawing.

    row 1        earlier output
    ...          present output_                 <- the cursor; this part scrolls
    row H - N    ----------------------------
    ...          the view, N rows
    row H

The escape sequences are from ECMA-48 and DEC, and all modern terminals understand them. The escape sequence IND makes empty
rows below the cursor. IND scrolls the terminal like a newline, but does not change the column of the cursor.
"""

from collections.abc import Sequence

SAVE_CURSOR, RESTORE_CURSOR = "\x1b7", "\x1b8"
INDEX = "\x1bD"
SCROLL_ALL = f"{SAVE_CURSOR}\x1b[r{RESTORE_CURSOR}"  # reserves no rows. The sequence inside moves the cursor
ERASE_BELOW = f"{SAVE_CURSOR}\x1b[B\r\x1b[J{RESTORE_CURSOR}"  # erases the rows below the cursor's row
WRAP_OFF, WRAP_ON = "\x1b[?7l", "\x1b[?7h"  # a row may be wider than computed
RESET_STYLE, CLEAR_ROW, CLEAR_REST = "\x1b[0m", "\x1b[2K", "\x1b[K"
END_SEQUENCE = f"\x18{RESET_STYLE}{WRAP_ON}"  # after an incomplete drawing. CAN ends an incomplete escape sequence
RECOVER = END_SEQUENCE + RESTORE_CURSOR


class ScrollRegion:
    """The reserved rows of one terminal."""

    def __init__(self) -> None:
        self._reserved: tuple[int, int, int] | None = None  # columns and rows of the terminal, rows of the view

    def draw(self, columns: int, rows: int, lines: Sequence[str], *, is_state_known: bool = True) -> str:
        """Return the text that draws `lines` in the reserved rows. If `lines` is empty, return the same text as `release`.

        Args:
            columns: width of the terminal.
            rows: height of the terminal, which must be more than the number of lines.
            lines: rows of the view, with colours.
            is_state_known: False if the last drawing is incomplete, or if another program may have used the terminal since
                the last drawing. If it is False, the text reserves the rows again.
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
        """Return the escape sequences that make the whole terminal scroll again, and erase the reserved rows.

        The returned text does not move the cursor. If no rows are reserved, the returned text is empty.
        """
        return "" if self._reserved is None else SCROLL_ALL + ERASE_BELOW

    def recover(self) -> str:
        """Return what `release` returns, but in a form that also works after an incomplete drawing.

        After an incomplete drawing, the cursor may be inside the view. So the text contains the number of the view's first
        row, and the terminal erases this row and all rows below it. The returned text does not move the cursor. If no rows
        are reserved, the returned text is empty.
        """
        if self._reserved is None:
            return ""
        _, rows, height = self._reserved
        erase_view = f"{SAVE_CURSOR}\x1b[{rows - height + 1};1H\x1b[J{RESTORE_CURSOR}"
        return f"{END_SEQUENCE}{SCROLL_ALL}{erase_view}"

    def mark_released(self) -> None:
        """Record that no rows are reserved. Call this method after you have written the text that `release` returned."""
        self._reserved = None


def go_to_line_start(columns: int) -> str:
    """Return the text that moves the cursor to the start of an empty line.

    The text begins with one blank for each column of the terminal, for example 80 blanks. If the cursor is at the start of a
    line, this line has room for 80 blanks. If the cursor is in the middle of a line, the terminal puts some of the 80 blanks
    into the next line. After the blanks, the text contains a carriage return, which moves the cursor to the start of the
    line that contains the last blank.
    """
    return " " * columns + "\r" + CLEAR_REST


def _reserve(rows: int, height: int) -> str:
    """Return the text that reserves the last `height` rows of the terminal.

    The terminal reads the text and does three things:

    1. The terminal releases the rows that were reserved earlier.
    2. The terminal makes empty rows below the cursor.
    3. From now on, the terminal scrolls only the rows above the view.
    """
    room = INDEX * height + f"\x1b[{height}A"
    return f"{SCROLL_ALL}{room}{ERASE_BELOW}{SAVE_CURSOR}\x1b[1;{rows - height}r{RESTORE_CURSOR}"

r"""The last rows of a terminal, kept for the view while everybody goes on printing above them. Pure: it makes what to write.

Ranks write to the terminal themselves, whenever they like, from processes of their own; so nobody can take the view away
before they print and draw it again after. The terminal does it instead: what scrolls is confined to the rows above
(DECSTBM), and whoever draws below puts the cursor back to where it was (DECSC, DECRC), all in one write, which nothing that
others write comes between.

    row 1        what was printed
    ...          what is being printed_          <- the cursor; this part scrolls
    row H - N    ----------------------------
    ...          the view, N rows
    row H

In the words of ECMA-48 and DEC, which every terminal of today understands. Room is made by index (IND), which scrolls as a
newline does and leaves the cursor in its column.
"""

from collections.abc import Sequence

SAVE, RESTORE = "\x1b7", "\x1b8"
INDEX = "\x1bD"
WHOLE = f"{SAVE}\x1b[r{RESTORE}"  # everything scrolls; to say so moves the cursor
ERASE_BELOW = f"{SAVE}\x1b[B\r\x1b[J{RESTORE}"  # the cursor's own row is somebody's
WRAP_OFF, WRAP_ON = "\x1b[?7l", "\x1b[?7h"  # should a row be wider than it was taken for
PLAIN, CLEAR_ROW, CLEAR_REST = "\x1b[0m", "\x1b[2K", "\x1b[K"
MEND = f"\x18{PLAIN}{WRAP_ON}{RESTORE}"  # of what was cut short while it was drawn: CAN ends half a sequence


class ScrollRegion:
    """What has been kept so far, of a terminal of which size."""

    def __init__(self) -> None:
        self._kept: tuple[int, int, int] | None = None  # columns and rows of the terminal, rows of the view

    def draw(self, columns: int, rows: int, lines: Sequence[str], *, is_sure: bool = True) -> str:
        """These lines, fewer than the terminal has rows, in the place of the last ones.

        If the size has changed, or somebody else may have had the terminal meanwhile (not `is_sure`), the rows are kept
        anew, in a way that holds for any state that the terminal may be in.
        """
        if not lines:
            text = self.release()
            self.forget()
            return text
        size = (columns, rows, len(lines))
        text = "" if size == self._kept and is_sure else _keep(rows, len(lines))
        self._kept = size
        first = rows - len(lines) + 1
        drawn = "".join(f"\x1b[{first + n};1H{PLAIN}{CLEAR_ROW}{line}" for n, line in enumerate(lines))
        return f"{text}{SAVE}{WRAP_OFF}{drawn}{PLAIN}{WRAP_ON}{RESTORE}"

    def release(self) -> str:
        """The whole terminal is everybody's again; the cursor is where it was. Nothing if nothing was kept."""
        return "" if self._kept is None else WHOLE + ERASE_BELOW

    def forget(self) -> None:
        """That has been written; not before, since something may be thrown at who is about to."""
        self._kept = None


def at_line_start(columns: int) -> str:
    """Goes to the next line, unless the cursor is at the start of one: as many blanks as there are columns do that."""
    return " " * columns + "\r" + CLEAR_REST


def _keep(rows: int, height: int) -> str:
    """From any state: everything scrolls; there is room below the cursor, which it scrolls for if need be; that is empty."""
    room = INDEX * height + f"\x1b[{height}A"
    return f"{WHOLE}{room}{ERASE_BELOW}{SAVE}\x1b[1;{rows - height}r{RESTORE}"

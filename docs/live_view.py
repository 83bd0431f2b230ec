"""Make docs/live_view.svg: run examples/live_view.py in a pseudo-terminal and save an image of its screen.

    python docs/live_view.py [PATH [STEPS [PERCENT]]]

The program writes to a pseudo-terminal, and a terminal emulator (pyte) computes the screen. When PERCENT of the steps are
done, rich saves the screen as SVG. This takes half a minute and needs the packages of the extra `test`.
"""

import io
import os
import re
import sys
from functools import partial
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.screens import Program

PROGRAM = ROOT / "examples" / "live_view.py"
COLUMNS, ROWS = 100, 13
ENOUGH_STEPS = 1000  # for the slow rank to be known
PYTE_COLOURS = {"brown": "yellow"}  # pyte's names of colours, and rich's


def capture_screen(steps: int, percent: int) -> list[Text]:
    """Return the rows of the screen when so many per cent are done."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLORTERM": "truecolor"}
    with Program(str(PROGRAM), str(steps), env=env, columns=COLUMNS, rows=ROWS) as program:
        if not program.read_until(partial(is_complete, percent, has_slow_rank=steps >= ENOUGH_STEPS)):
            raise SystemExit("\n".join([f"the program ended before {percent} % were done:", *program.emulator.rows()]))
        screen = program.emulator.screen
        return [make_row_text([screen.buffer[row][column] for column in range(COLUMNS)]) for row in range(ROWS)]


def is_complete(percent: int, rows: list[str], *, has_slow_rank: bool) -> bool:
    """Whether the view is drawn completely and shows that enough steps are done."""
    done = re.search(r"step \d+ of \d+ \((\d+) %\).*; loss .*; 4 ranks running", "\n".join(rows[-6:-5]))
    return (
        done is not None
        and int(done[1]) >= percent
        and ("running, slow (" in rows[-2] or not has_slow_rank)
        and all("running" in row and "ago" in row for row in rows[-4:])
    )


def make_row_text(cells: list[object]) -> Text:
    """Return a row of the screen as rich text."""
    text = Text()
    for style, same in groupby(cells, key=make_cell_style):
        text.append("".join(cell.data for cell in same), style)
    return text


def make_cell_style(cell: object) -> Style:
    """Return the style of a cell."""
    name = PYTE_COLOURS.get(cell.fg, cell.fg)
    colour = f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else name.replace("bright", "bright_")
    return Style(color=colour, bold=cell.bold)


def main(path: str = str(ROOT / "docs" / "live_view.svg"), steps: str = "1000", percent: str = "60") -> None:
    """Save the image."""
    rows = capture_screen(int(steps), int(percent))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for row in rows:
        console.print(row, no_wrap=True, crop=False)
    console.save_svg(path, title=f"python {PROGRAM.relative_to(ROOT)}", unique_id="live-view")


if __name__ == "__main__":
    main(*sys.argv[1:])

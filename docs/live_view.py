"""Makes docs/live_view.svg: runs examples/live_view.py in a terminal of its own, and takes a picture of what that shows.

    python docs/live_view.py [PATH [STEPS [PERCENT]]]

Nothing in it is drawn by hand: the program writes to a pseudo-terminal, an emulator of terminals (pyte) makes a screen of
that, and rich an SVG of the screen, when so much per cent is done. It takes half a minute, and wants what the extra `test`
has.
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

from screens import Program

PROGRAM = ROOT / "examples" / "live_view.py"
COLUMNS, ROWS = 100, 13
COLOURS = {"brown": "yellow"}  # as pyte calls them, and rich


def run(steps: int, percent: int) -> list[Text]:
    """What the screen shows when so much is done."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLORTERM": "truecolor"}
    with Program(str(PROGRAM), str(steps), env=env, columns=COLUMNS, rows=ROWS) as program:
        if not program.read_until(partial(is_the_moment, percent)):
            raise SystemExit("\n".join(["the program has ended before that:", *program.emulator.rows()]))
        screen = program.emulator.screen
        return [text_of([screen.buffer[row][column] for column in range(COLUMNS)]) for row in range(ROWS)]


def is_the_moment(percent: int, rows: list[str]) -> bool:
    """Whether the view is there as a whole, and shows that enough is done."""
    done = re.search(r"step \d+ of \d+ \((\d+) %\).*; loss .*; 4 ranks at work", "\n".join(rows[-6:-5]))
    return done is not None and int(done[1]) >= percent and all("at work" in row and "ago" in row for row in rows[-4:])


def text_of(cells: list[object]) -> Text:
    """A row of the screen."""
    text = Text()
    for style, same in groupby(cells, key=style_of):
        text.append("".join(cell.data for cell in same), style)
    return text


def style_of(cell: object) -> Style:
    """How a cell is drawn."""
    name = COLOURS.get(cell.fg, cell.fg)
    colour = f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else name.replace("bright", "bright_")
    return Style(color=colour, bold=cell.bold)


def main(path: str = str(ROOT / "docs" / "live_view.svg"), steps: str = "1000", percent: str = "60") -> None:
    """Save the picture."""
    rows = run(int(steps), int(percent))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for row in rows:
        console.print(row, no_wrap=True, crop=False)
    console.save_svg(path, title=f"python {PROGRAM.relative_to(ROOT)}", unique_id="live-view")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Make docs/failure_report.svg: run examples/crash.py in a pseudo-terminal and save an image of its screen.

    python docs/failure_report.py [PATH]

This takes a few seconds and needs the packages of the extra `test`.
"""

import io
import os
import sys

from rich.console import Console
from rich.text import Text

from live_view import ROOT, make_row_text
from support.screens import Emulator, Program

PROGRAM = ROOT / "examples" / "crash.py"
COLUMNS, ROWS = 104, 10  # the verdict fits into a row


def capture_screen() -> list[Text]:
    """Return the rows of the screen when the program has ended."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    with Program(str(PROGRAM), env=env, columns=COLUMNS, rows=ROWS) as program:
        program.read_until()
        output = bytes(program.output).replace(f"{PROGRAM.parent}/".encode(), b"")
    screen = Emulator(COLUMNS, ROWS).feed(output).screen
    return [make_row_text([screen.buffer[row][column] for column in range(COLUMNS)]) for row in range(ROWS - 1)]


def main(path: str = str(ROOT / "docs" / "failure_report.svg")) -> None:
    """Save the image."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for row in [*capture_screen(), Text()]:  # below the last line, or its underscores are cut off
        console.print(row, no_wrap=True, crop=False)
    console.save_svg(path, title=f"python {PROGRAM.name}", unique_id="failure-report")


if __name__ == "__main__":
    main(*sys.argv[1:])

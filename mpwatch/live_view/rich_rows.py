"""The live view as rows of a terminal, by rich, which is imported here and nowhere else."""

import io
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mpwatch.live_view.formatting import HEADING, cells, is_folded, line_of, summary
from mpwatch.live_view.model import RankRow, Snapshot
from mpwatch.results.model import WorkerState

STYLES = {
    WorkerState.INIT: "dim",
    WorkerState.HEALTHY: "green",
    WorkerState.UNHEALTHY: "yellow",
    WorkerState.SUCCEEDED: "cyan",
    WorkerState.FAILED: "bold red",
    WorkerState.STOPPED: "magenta",
}
FEWEST_ROWS, FEWEST_COLUMNS = 4, 20  # of a terminal in which anything is shown
NARROW = 72  # columns: with less there is no room for the last three of ours
BAR = 24
GAP = 2  # between columns
STATE, METRICS = HEADING.index("state"), HEADING.index("metrics")
TEXTS = ("state", "metrics")  # columns
LEAST_METRICS = 8


class RichRenderer:
    """For a terminal that understands this encoding."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding

    def render(self, picture: Snapshot, columns: int, rows: int) -> list[str]:
        """As much of the picture as half of the terminal has room for, with the colours that it has."""
        if rows < FEWEST_ROWS or columns < FEWEST_COLUMNS:
            return []
        for shape in _shapes(picture, columns):
            lines = self._lines(shape, columns)
            if len(lines) <= rows // 2:
                return lines
        return []

    def _lines(self, shape: RenderableType, columns: int) -> list[str]:
        file = io.TextIOWrapper(io.BytesIO(), encoding=self._encoding, errors="replace", newline="\n")
        console = Console(file=file, width=columns, force_terminal=True, force_jupyter=False, legacy_windows=False)
        console.print(shape)
        file.seek(0)
        return file.read().splitlines()


def _shapes(picture: Snapshot, columns: int) -> Iterator[RenderableType]:
    """From the largest to the smallest."""
    overall = _overall(picture, columns)
    if not picture.lines:
        yield overall
        return
    if not is_folded(picture):
        yield Group(overall, _table(picture, columns))
    folded = Table.grid(padding=(0, 2))
    for name, text in summary(picture):
        folded.add_row(Text(name, style="dim"), Text(text, no_wrap=True, overflow="ellipsis"))
    yield Group(overall, folded)
    yield overall


def _overall(picture: Snapshot, columns: int) -> RenderableType:
    text = Text(line_of(picture), style="bold", no_wrap=True, overflow="ellipsis")
    if picture.overall.done is None:
        return text
    grid = Table.grid(padding=(0, 1))
    width = min(BAR, columns // 5)
    bar = ProgressBar(1.0, picture.overall.done, width=width, complete_style="green", finished_style="green")
    grid.add_row(bar, text)
    return grid


def _table(picture: Snapshot, columns: int) -> Table:
    """With room for all columns; if there is too little, the metrics have what the others leave."""
    count = len(HEADING) if columns >= NARROW else METRICS + 1
    rows = [HEADING[:count], *(cells(line)[:count] for line in picture.lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[METRICS] = max(LEAST_METRICS, columns - sum(widths) + widths[METRICS] - GAP * (count - 1))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for name, width in zip(HEADING, widths, strict=False):
        table.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=True, max_width=width)
    for line, row in zip(picture.lines, rows[1:], strict=True):
        table.add_row(*_styled(line, row))
    return table


def _styled(line: RankRow, row: tuple[str, ...]) -> list[Text]:
    texts = [Text(cell, overflow="ellipsis") for cell in row]  # and not markup, which the name of a metric might look like
    texts[STATE].stylize(STYLES.get(line.state, ""))
    return texts

"""Use the package rich to render a snapshot as rows for a terminal. No other module of mpwatch imports rich."""

import io
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mpwatch.live_view.formatting import COLUMN_TITLES, format_overall, format_row, format_summary, is_summarized
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
MIN_ROWS, MIN_COLUMNS = 4, 20  # in a smaller terminal nothing is shown
NARROW = 72  # a terminal with fewer columns has no room for the last three columns of the table
BAR_WIDTH = 24
GAP = 2  # between columns
STATE, METRICS = COLUMN_TITLES.index("state"), COLUMN_TITLES.index("metrics")
LEFT_ALIGNED = ("state", "metrics")
MIN_METRICS_WIDTH = 8


class RichRenderer:
    """Renders a snapshot as rows for a terminal that uses the text encoding `encoding`."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding

    def render(self, snapshot: Snapshot, columns: int, rows: int) -> list[str]:
        """Return the rows of the largest layout that fits into half of the terminal.

        The rows contain escape sequences for colours.
        """
        if rows < MIN_ROWS or columns < MIN_COLUMNS:
            return []
        for layout in _layouts(snapshot, columns):
            lines = self._render_lines(layout, columns)
            if len(lines) <= rows // 2:
                return lines
        return []

    def _render_lines(self, layout: RenderableType, columns: int) -> list[str]:
        file = io.TextIOWrapper(io.BytesIO(), encoding=self._encoding, errors="replace", newline="\n")
        console = Console(file=file, width=columns, force_terminal=True, force_jupyter=False, legacy_windows=False)
        console.print(layout)
        file.seek(0)
        return file.read().splitlines()


def _layouts(snapshot: Snapshot, columns: int) -> Iterator[RenderableType]:
    """Yield the layouts of the view, from the largest to the smallest.

    A layout shows a row for each rank, a summary of all ranks, or only the overall line.
    """
    overall = _overall_line(snapshot, columns)
    if not snapshot.rows:
        yield overall
        return
    if not is_summarized(snapshot):
        yield Group(overall, _rank_table(snapshot, columns))
    summary = Table.grid(padding=(0, 2))
    for name, text in format_summary(snapshot):
        summary.add_row(Text(name, style="dim"), Text(text, no_wrap=True, overflow="ellipsis"))
    yield Group(overall, summary)
    yield overall


def _overall_line(snapshot: Snapshot, columns: int) -> RenderableType:
    text = Text(format_overall(snapshot), style="bold", no_wrap=True, overflow="ellipsis")
    fraction = snapshot.overall.fraction_done
    if fraction is None:
        return text
    grid = Table.grid(padding=(0, 1))
    width = min(BAR_WIDTH, columns // 5)
    bar = ProgressBar(1.0, fraction, width=width, complete_style="green", finished_style="green")
    grid.add_row(bar, text)
    return grid


def _rank_table(snapshot: Snapshot, columns: int) -> Table:
    """Return a table with the columns for which the terminal has room."""
    count = len(COLUMN_TITLES) if columns >= NARROW else METRICS + 1
    cells = [COLUMN_TITLES[:count], *(format_row(row)[:count] for row in snapshot.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[METRICS] = max(MIN_METRICS_WIDTH, columns - sum(widths) + widths[METRICS] - GAP * (count - 1))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for title, width in zip(COLUMN_TITLES, widths, strict=False):
        table.add_column(title, justify="left" if title in LEFT_ALIGNED else "right", no_wrap=True, max_width=width)
    for row, row_cells in zip(snapshot.rows, cells[1:], strict=True):
        table.add_row(*_styled_cells(row, row_cells))
    return table


def _styled_cells(row: RankRow, cells: tuple[str, ...]) -> list[Text]:
    texts = [Text(cell, overflow="ellipsis") for cell in cells]  # Text, and not markup, as a metric may be called "[red]"
    texts[STATE].stylize(STYLES.get(row.state, ""))
    return texts

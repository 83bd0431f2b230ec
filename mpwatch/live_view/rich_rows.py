"""Uses the package rich to render a snapshot as rows for a terminal. No other module of mpwatch imports rich."""

import io
from collections.abc import Iterator
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mpwatch.live_view.formatting import COLUMN_TITLES, format_overall, format_row, format_summary, is_summarized
from mpwatch.live_view.model import Snapshot
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
NARROW, VERY_NARROW = 72, 52  # terminals without room for the last three columns of the table, and for the metrics
BAR_WIDTH = 24
METRICS = COLUMN_TITLES.index("metrics")


def render(snapshot: Snapshot, columns: int, rows: int, encoding: str) -> list[str]:
    """Return the coloured rows of the largest layout that fits into half of the terminal."""
    if rows < MIN_ROWS or columns < MIN_COLUMNS:
        return []
    for layout in _layouts(snapshot, columns):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace", newline="\n")
        console = Console(file=file, width=columns, force_terminal=True, force_jupyter=False, legacy_windows=False)
        console.print(layout)
        file.seek(0)
        lines = file.read().splitlines()
        if len(lines) <= rows // 2:
            return lines
    return []


def _layouts(snapshot: Snapshot, columns: int) -> Iterator[RenderableType]:
    """Yield a row for each rank, then a summary of the ranks, then only the overall line."""
    text, width = format_overall(snapshot), min(BAR_WIDTH, columns // 5)
    overall: RenderableType = _text(text, "bold") if len(text) <= columns else Text(text, "bold")  # which takes more lines
    if (fraction := snapshot.overall.fraction_done) is not None and width + 1 + len(text) <= columns:
        bar = ProgressBar(1.0, fraction, width=width, complete_style="green", finished_style="green")
        grid = Table.grid(padding=(0, 1))
        grid.add_row(bar, overall)
        overall = grid
    if snapshot.rows:
        if not is_summarized(snapshot):
            yield Group(overall, _rank_table(snapshot, columns))
        summary = Table.grid(padding=(0, 2))
        for name, text in format_summary(snapshot):
            summary.add_row(_text(name, "dim"), _text(text))
        yield Group(overall, summary)
    yield overall


def _rank_table(snapshot: Snapshot, columns: int) -> Table:
    """Return a table with the columns for which the terminal has room. Only that of the metrics becomes narrower."""
    count = len(COLUMN_TITLES) if columns >= NARROW else METRICS + (columns >= VERY_NARROW)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in COLUMN_TITLES[:count]:
        side: Literal["left", "right"] = "left" if title in ("state", "metrics") else "right"
        table.add_column(_text(title), justify=side, no_wrap=title != "metrics")
    for row in snapshot.rows:
        number, state, *rest = format_row(row)[:count]
        table.add_row(_text(number), _text(state, STYLES.get(row.status.state, "")), *map(_text, rest))
    return table


def _text(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")  # not markup, as a metric may be called "[red]"

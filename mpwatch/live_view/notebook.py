"""The live view in a notebook: a table in the output of the running cell, updated in place. It needs only IPython."""

from importlib import import_module
from typing import Any

from mpwatch.live_view.formatting import COLUMN_TITLES, format_overall, format_row, format_summary, is_summarized
from mpwatch.live_view.live import Display
from mpwatch.live_view.model import Snapshot
from mpwatch.results.html import make_table


class NotebookDisplay(Display):
    period = 0.5

    def __init__(self) -> None:
        self._display_handle: Any = None  # IPython's handle of the table

    def show(self, snapshot: Snapshot) -> None:
        bundle = {"text/html": render_html(snapshot), "text/plain": format_overall(snapshot)}
        if self._display_handle is None:
            self._display_handle = import_module("IPython.display").display(bundle, raw=True, display_id=True)
        else:
            self._display_handle.update(bundle, raw=True)


def render_html(snapshot: Snapshot) -> str:
    fraction = snapshot.overall.fraction_done
    bar = f'<progress value="{fraction:.4f}" max="1"></progress> ' if fraction is not None else ""
    if is_summarized(snapshot):
        return make_table(format_overall(snapshot), format_summary(snapshot), bar=bar)
    rows = [format_row(row) for row in snapshot.rows]
    return make_table(format_overall(snapshot), rows, head=COLUMN_TITLES if rows else (), bar=bar)

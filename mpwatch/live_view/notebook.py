"""The live view in a notebook: a table in the output of the running cell. The table is updated in place.

The view in a notebook needs only IPython.
"""

from html import escape
from importlib import import_module
from typing import Any

from mpwatch.live_view.formatting import COLUMN_TITLES, format_overall, format_row, format_summary, is_summarized
from mpwatch.live_view.model import Snapshot

PERIOD = 0.5
ALIGN_LEFT = ' style="text-align:left"'


class NotebookDisplay:
    """A table below the output that the running cell already has."""

    period = PERIOD

    def __init__(self) -> None:
        self._display_handle: Any = None  # IPython's handle of the table

    def show(self, snapshot: Snapshot) -> None:
        bundle = {"text/html": render_html(snapshot), "text/plain": format_overall(snapshot)}
        if self._display_handle is None:
            self._display_handle = import_module("IPython.display").display(bundle, raw=True, display_id=True)
        else:
            self._display_handle.update(bundle, raw=True)

    def pause(self) -> None:
        """Do nothing, because other output of the cell does not change the table."""

    def close(self, snapshot: Snapshot) -> None:
        """Draw the last snapshot, which stays visible in the notebook."""
        self.show(snapshot)


def render_html(snapshot: Snapshot) -> str:
    """Return an HTML table that shows the snapshot.

    The table has one row for each rank. If there are many ranks, the table has a summary of all ranks instead.
    """
    fraction = snapshot.overall.fraction_done
    bar = f'<progress value="{fraction:.4f}" max="1"></progress> ' if fraction is not None else ""
    caption = f"<caption{ALIGN_LEFT}>{bar}<b>{escape(format_overall(snapshot))}</b></caption>"
    if not snapshot.rows:
        return f"<table>{caption}</table>"
    if is_summarized(snapshot):
        body = "".join(
            f"<tr><th{ALIGN_LEFT}>{escape(name)}</th>{_render_cell(text)}</tr>" for name, text in format_summary(snapshot)
        )
        return f"<table>{caption}<tbody>{body}</tbody></table>"
    head = "".join(f"<th{ALIGN_LEFT}>{escape(title)}</th>" for title in COLUMN_TITLES)
    body = "".join(f"<tr>{''.join(map(_render_cell, format_row(row)))}</tr>" for row in snapshot.rows)
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _render_cell(text: str) -> str:
    return f"<td{ALIGN_LEFT}>{escape(text)}</td>"

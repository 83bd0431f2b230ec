"""The live view in a notebook: a small table in the cell that runs, brought up to date in its place. It needs nothing but
IPython's own display.
"""

from html import escape
from importlib import import_module
from typing import Any

from mpwatch.live_view.formatting import HEADING, cells, is_folded, line_of, summary
from mpwatch.live_view.model import Snapshot

PERIOD = 0.5
LEFT = ' style="text-align:left"'


class NotebookDisplay:
    """Below what the cell has put out so far."""

    period = PERIOD
    repair = None  # nothing of anybody's is kept

    def __init__(self) -> None:
        self._handle: Any = None  # IPython's, of what is shown

    def show(self, picture: Snapshot) -> None:
        """In the place of the last one."""
        bundle = {"text/html": html_of(picture), "text/plain": line_of(picture)}
        if self._handle is None:
            self._handle = import_module("IPython.display").display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def leave(self, picture: Snapshot) -> None:
        """The last one stays in the notebook."""
        self.show(picture)


def html_of(picture: Snapshot) -> str:
    """The bar, what is said of all, and a row a rank, or a few of many ranks together."""
    done = picture.overall.done
    bar = f'<progress value="{done:.4f}" max="1"></progress> ' if done is not None else ""
    caption = f"<caption{LEFT}>{bar}<b>{escape(line_of(picture))}</b></caption>"
    if not picture.lines:
        return f"<table>{caption}</table>"
    if is_folded(picture):
        body = "".join(f"<tr><th{LEFT}>{escape(name)}</th>{_cell(text)}</tr>" for name, text in summary(picture))
        return f"<table>{caption}<tbody>{body}</tbody></table>"
    head = "".join(f"<th{LEFT}>{escape(name)}</th>" for name in HEADING)
    body = "".join(f"<tr>{''.join(map(_cell, cells(line)))}</tr>" for line in picture.lines)
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    return f"<td{LEFT}>{escape(text)}</td>"

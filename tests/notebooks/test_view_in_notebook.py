"""The live view in a real kernel: a table in the cell that runs, updated in place."""

import re

import pytest

from notebooks.run_cells import run_cells

CELLS = {
    "definitions": """
import mpwatch
from multiprocessing import get_context
from mpwatch.live_view import live, notebook
event = get_context("spawn").Event()
live.WAITING_PERIOD = notebook.NotebookDisplay.period = 0.01
show = notebook.NotebookDisplay.show
def show_and_set_event(self, snapshot):
    show(self, snapshot)
    if snapshot.overall.step == 2 and sum(row.step == 2 for row in snapshot.rows) == 2:
        event.set()
notebook.NotebookDisplay.show = show_and_set_event
def report_steps(event):
    mpwatch.report(step=2, total=4, loss=0.5)
    event.wait()
    mpwatch.report(step=4, total=4, loss=0.25)
def return_at_once(): pass
""",
    "reports": "list(mpwatch.run(report_steps, 2, args=(event,)))",
    "without reports": "list(mpwatch.run(return_at_once, 2))",
    "without a view": "list(mpwatch.run(report_steps, 2, args=(event,), progress=False))",
    "fails": "event.clear(); mpwatch.run(report_steps, 2, args=(event,), timeout=0.001, progress=True)",
}


@pytest.fixture(scope="module")
def cells():
    """Return the final outputs and the display messages of each cell."""
    outputs, messages = run_cells(CELLS.values())
    return {name: (outputs[n], [message[1:] for message in messages if message[0] == n]) for n, name in enumerate(CELLS)}


def test_a_table_is_updated_in_place(cells):
    (shown, value), messages = cells["reports"]
    assert value["data"]["text/plain"] == "[None, None]"
    kinds = [kind for kind, _ in messages]
    assert kinds[0] == "display_data"
    assert set(kinds[1:]) == {"update_display_data"}
    assert any(re.match(r"step 2 of 4 \(50 %\).*; loss 0.5; 2 ranks running", text) for _, text in messages)
    assert shown["data"]["text/plain"] == "step 4 of 4 (100 %); loss 0.25; 2 ranks returned"
    assert shown["data"]["text/html"].count("<tr>") == 3
    assert '<progress value="1.0000" max="1">' in shown["data"]["text/html"]


@pytest.mark.parametrize("cell", ["without reports", "without a view"])
def test_no_view_without_reports_or_with_progress_false(cells, cell):
    (value,), messages = cells[cell]
    assert value["data"]["text/plain"] == "[None, None]"
    assert messages == []


def test_an_error_is_shown_below(cells):
    *_, error = cells["fails"][0]
    assert error["ename"] == "RunTimeoutError"

"""The live view in a real kernel: a table in the cell that runs, brought up to date in its place."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from programs import ENV, python

# In a Python of its own: the client leaves an event loop behind. What it is told on the way is kept beside what is left.
CLIENT = """
import json, sys
import nbformat
from nbclient import NotebookClient
class Client(NotebookClient):
    def process_message(self, message, cell, number):
        if message["msg_type"] in ("display_data", "update_display_data"):
            told.append((number, message["msg_type"], message["content"]["data"].get("text/plain")))
        return super().process_message(message, cell, number)
told = []
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)])
Client(notebook, timeout=60, allow_errors=True, shutdown_kernel="immediate").execute()  # no need to ask it
json.dump([[cell.outputs for cell in notebook.cells], told], sys.stdout)
"""
CELLS = {
    "definitions": """
import mpwatch
from multiprocessing import get_context
from mpwatch.live_view import live, notebook
event = get_context("spawn").Event()
live.WAITING_SECONDS = notebook.NotebookDisplay.period = 0.01
show = notebook.NotebookDisplay.show
def and_go_on(self, picture):
    show(self, picture)
    if picture.overall.step == 2 and sum(line.step == 2 for line in picture.lines) == 2:
        event.set()
notebook.NotebookDisplay.show = and_go_on
def steps(event):
    mpwatch.report(step=2, total=4, loss=0.5)
    event.wait()
    mpwatch.report(step=4, total=4, loss=0.25)
def silent(): pass
""",
    "reports": "list(mpwatch.run(steps, 2, args=(event,)))",
    "does not": "list(mpwatch.run(silent, 2))",
    "does not want it": "list(mpwatch.run(steps, 2, args=(event,), progress=False))",
    "fails": "event.clear(); mpwatch.run(steps, 2, args=(event,), timeout=0.001, progress=True)",
}


@pytest.fixture(scope="module")
def told():
    """By cell: what is left in it, and what was told of displays."""
    env = {**ENV, "PYTHONWARNINGS": "ignore"}
    done = python("-W", "ignore", "-c", CLIENT, program=json.dumps(list(CELLS.values())), env=env)
    outputs, messages = json.loads(done.stdout)
    return {name: (outputs[n], [message[1:] for message in messages if message[0] == n]) for n, name in enumerate(CELLS)}


def test_a_table_is_brought_up_to_date_in_its_place(told):
    (shown, value), messages = told["reports"]
    assert value["data"]["text/plain"] == "[None, None]"
    kinds = [kind for kind, _ in messages]
    assert kinds[0] == "display_data"
    assert set(kinds[1:]) == {"update_display_data"}
    assert any(re.match(r"step 2 of 4 \(50 %\).*; loss 0.5; 2 ranks at work", text) for _, text in messages)
    assert shown["data"]["text/plain"] == "step 4 of 4 (100 %); loss 0.25; 2 ranks returned"
    assert shown["data"]["text/html"].count("<tr>") == 3
    assert '<progress value="1.0000" max="1">' in shown["data"]["text/html"]


@pytest.mark.parametrize("cell", ["does not", "does not want it"])
def test_where_nothing_is_to_be_shown_nothing_is(told, cell):
    (value,), messages = told[cell]
    assert value["data"]["text/plain"] == "[None, None]"
    assert messages == []


def test_an_error_comes_below(told):
    *_, error = told["fails"][0]
    assert error["ename"] == "RunTimeoutError"

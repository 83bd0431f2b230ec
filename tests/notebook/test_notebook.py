"""A real kernel: functions, classes and exceptions of cells, and an interrupt."""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from programs import ENV, python

# In a Python of its own: the client leaves an event loop behind.
CLIENT = """
import json, sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)])
NotebookClient(notebook, timeout=60, allow_errors=True).execute()
json.dump(notebook.cells[-1].outputs, sys.stdout)
"""


def run_cells(*sources):
    """The outputs of the last of these cells."""
    done = python("-W", "ignore", "-c", CLIENT, program=json.dumps(sources), env={**ENV, "PYTHONWARNINGS": "ignore"})
    return json.loads(done.stdout)


DEFINITIONS = """
import mpwatch
class Cfg:
    def __init__(self, lr): self.lr = lr
class TooBad(Exception): pass
def train(cfg): return Cfg(cfg.lr * scale), mpwatch.current_worker().rank
def fail(): raise TooBad("of a cell")
"""


def test_functions_and_classes_of_cells():
    check = "[(type(cfg) is Cfg, cfg.lr, rank) for cfg, rank in mpwatch.run(train, 2, args=(Cfg(2),))]"
    (output,) = run_cells(DEFINITIONS, "scale = 3", check)
    assert output["data"]["text/plain"] == "[(True, 6, 0), (True, 6, 1)]"


def test_exceptions_of_cells():
    caught = (
        "try: mpwatch.run(fail, 2)\nexcept mpwatch.RunFailedError as error: cause = error.__cause__\ntype(cause) is TooBad"
    )
    (output,) = run_cells(DEFINITIONS, caught)
    assert output["data"]["text/plain"] == "True"
    (output,) = run_cells(DEFINITIONS, "mpwatch.run(fail, 2)")
    assert (output["output_type"], output["ename"]) == ("error", "RunFailedError")
    assert "failed first: TooBad: of a cell" in output["evalue"]
    printed = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output["traceback"]))
    assert 'raise TooBad("of a cell")' in printed


def test_a_failed_cell_shows_source_here_and_there():
    caught = "try: mpwatch.run(fail, 2)\nexcept mpwatch.RunFailedError as caught: error = caught"
    (output,) = run_cells(DEFINITIONS, caught, "print(error.root_cause.traceback)")
    assert 'raise TooBad("of a cell")' in output["text"]
    (output,) = run_cells(DEFINITIONS, caught, "error")
    assert "failed first: TooBad: of a cell" in output["data"]["text/html"]
    assert "<summary>traceback of rank" in output["data"]["text/html"]


def test_a_result_is_a_table():
    (output,) = run_cells(DEFINITIONS, "scale = 3", "mpwatch.run(lambda: mpwatch.current_worker().rank * 7, 2)")
    assert "<b>2 ranks succeeded</b>" in output["data"]["text/html"]
    assert '<td style="text-align:left">7</td>' in output["data"]["text/html"]


def test_where_ranks_are_in_a_cell():
    wait = "def wait():\n    import threading\n    threading.Event().wait()  # for ever"
    (output,) = run_cells(DEFINITIONS, wait, "mpwatch.run(wait, 2, timeout=3)")
    assert output["ename"] == "RunTimeoutError"
    assert "ranks 0-1: still at work in wait (" in output["evalue"]
    assert ":3 in wait: threading.Event().wait()  # for ever)" in output["evalue"]

"""Functions, classes and exceptions of cells in a real kernel without a user, and how they are shown. One kernel runs all cells.

This file is also the program that runs the cells, since the client of the kernel leaves an event loop behind.
"""

import json
import re
import sys

import pytest

from support.programs import ENV, python

CELLS = {
    "definitions": """
import multiprocessing, mpwatch
from IPython.display import DisplayHandle
class Cfg:
    def __init__(self, lr): self.lr = lr
class TooBad(Exception): pass
def train(cfg): return Cfg(cfg.lr * scale), mpwatch.current_worker().rank
def fail():
    message = "of a cell"
    for attempt in range(3):
        if attempt == 2:
            raise TooBad(message)
    return attempt
def stop():
    breakpoint()
scale = 3
event = multiprocessing.get_context("spawn").Event()
update = DisplayHandle.update
def update_and_set_event(self, bundle, **more):
    update(self, bundle, **more)
    if "step 2 of 4" in bundle["text/plain"] and "2 ranks running" in bundle["text/plain"]:
        event.set()
DisplayHandle.update = update_and_set_event
def report_steps(event):
    mpwatch.report(step=2, total=4, loss=0.5)
    event.wait()
    mpwatch.report(step=4, total=4, loss=0.25)
""",
    "values": "[(type(cfg) is Cfg, cfg.lr, rank) for cfg, rank in mpwatch.run(train, 2, args=(Cfg(2),))]",
    "result": "mpwatch.run(lambda: mpwatch.current_worker().rank * 7, 2)",
    "failure": "mpwatch.run(fail, 2)",
    "caught": "try: mpwatch.run(fail, 2)\nexcept mpwatch.RunFailedError as caught: error = caught\ntype(error.__cause__) is TooBad",
    "error": "error",
    "traceback": "print(error.root_cause.traceback)",
    "view": "list(mpwatch.run(report_steps, 2, args=(event,)))",
    "no view": "list(mpwatch.run(report_steps, 2, args=(event,), progress=False))",
    "breakpoint": "mpwatch.run(stop, 1)",
    "post-mortem": "mpwatch.run(fail, 1, debug='post_mortem')",
}


def main():
    """Run the cells. Print the outputs of each, and the number of the cell, kind and text of each message about displays."""
    import nbformat
    from nbclient import NotebookClient

    displays = []

    class Client(NotebookClient):
        def process_message(self, message, cell, number):
            if message["msg_type"] in ("display_data", "update_display_data"):
                displays.append((number, message["msg_type"], message["content"]["data"].get("text/plain")))
            return super().process_message(message, cell, number)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS.values()])
    Client(notebook, timeout=60, allow_errors=True, shutdown_kernel="immediate").execute()  # faster than asking it to end
    json.dump([[cell.outputs for cell in notebook.cells], displays], sys.stdout)


@pytest.fixture(scope="module")
def cells():
    """Return the outputs and the display messages of each cell."""
    outputs, messages = json.loads(python("-W", "ignore", __file__, env={**ENV, "PYTHONWARNINGS": "ignore"}).stdout)
    return {name: (outputs[n], [message[1:] for message in messages if message[0] == n]) for n, name in enumerate(CELLS)}


@pytest.fixture
def outputs(cells):
    return {name: outputs for name, (outputs, _) in cells.items()}


def strip_colours(traceback):
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(traceback))


def test_functions_and_classes_of_cells(outputs):
    (output,) = outputs["values"]
    assert output["data"]["text/plain"] == "[(True, 6, 0), (True, 6, 1)]"


def test_exceptions_of_cells(outputs):
    assert outputs["caught"][0]["data"]["text/plain"] == "True"
    assert "raise TooBad(message)" in outputs["traceback"][0]["text"]
    (output,) = outputs["failure"]
    assert (output["output_type"], output["ename"]) == ("error", "RunFailedError")
    line = next(n for n, line in enumerate(CELLS["definitions"].splitlines(), 1) if "raise TooBad" in line) - 1
    assert f"failed first: TooBad: of a cell (Cell In[1]:{line} in fail)" in output["evalue"]
    text = strip_colours(output["traceback"])
    assert f"Cell In[1], line {line}, in fail()" in text
    assert re.search(rf"-+> {line} +raise TooBad\(message\)", text)
    assert not re.findall(r"^File .*/mpwatch/", text, re.MULTILINE)


def test_an_error_and_a_result_are_tables(outputs):
    html = outputs["error"][0]["data"]["text/html"]
    assert "failed first: TooBad: of a cell" in html
    assert "<summary>traceback of rank" in html
    assert "in fail\n    raise TooBad(message)" in html
    html = outputs["result"][0]["data"]["text/html"]
    assert "<b>2 ranks succeeded</b>" in html
    assert '<td style="text-align:left">7</td>' in html


def test_the_live_view_is_a_table_that_is_updated_in_place(cells):
    (shown, value), messages = cells["view"]
    assert value["data"]["text/plain"] == "[None, None]"
    assert [kind for kind, _ in messages[:2]] == ["display_data", "update_display_data"]
    assert any(re.match(r"step 2 of 4 \(50 %\).*; loss 0.5; 2 ranks running", text) for _, text in messages)
    assert shown["data"]["text/plain"].startswith("step 4 of 4 (100 %); loss 0.25; 2 ranks returned after ")
    assert shown["data"]["text/html"].count("<tr>") == 3
    assert '<progress value="1.0000" max="1">' in shown["data"]["text/html"]
    (value,), messages = cells["no view"]
    assert value["data"]["text/plain"] == "[None, None]"
    assert messages == []


def test_a_notebook_without_a_user_has_no_prompt(outputs):
    assert "breakpoint() can open no prompt: this notebook is executed without a user" in str(outputs["breakpoint"])
    text = "".join(output["text"] for output in outputs["post-mortem"] if output["output_type"] == "stream")
    assert text.count("debug='post_mortem' can open no prompt: this notebook is executed without a user") == 1


if __name__ == "__main__":
    main()

"""Functions, classes and exceptions of cells in a real kernel, and how they are shown. One kernel runs all the cells."""

import re

import pytest

from notebooks.run_cells import run_cells

CELLS = {
    "definitions": """
import mpwatch
from support import failing
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
def wait():
    import threading
    threading.Event().wait()  # without end
scale = 3
""",
    "values": "[(type(cfg) is Cfg, cfg.lr, rank) for cfg, rank in mpwatch.run(train, 2, args=(Cfg(2),))]",
    "result": "mpwatch.run(lambda: mpwatch.current_worker().rank * 7, 2)",
    "failure": "mpwatch.run(fail, 2)",
    "failure of a module": "mpwatch.run(failing.raises_value_error, 1)",
    "caught": "try: mpwatch.run(fail, 2)\nexcept mpwatch.RunFailedError as caught: error = caught\ntype(error.__cause__) is TooBad",
    "error": "error",
    "traceback": "print(error.root_cause.traceback)",
    "timeout": "mpwatch.run(wait, 2, timeout=3)",
}


@pytest.fixture(scope="module")
def outputs():
    """Return the outputs of each cell."""
    outputs, _ = run_cells(CELLS.values())
    return dict(zip(CELLS, outputs, strict=True))


def strip_colours(traceback):
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(traceback))


def test_functions_and_classes_of_cells(outputs):
    (output,) = outputs["values"]
    assert output["data"]["text/plain"] == "[(True, 6, 0), (True, 6, 1)]"


def test_exceptions_of_cells(outputs):
    assert outputs["caught"][0]["data"]["text/plain"] == "True"
    (output,) = outputs["failure"]
    assert (output["output_type"], output["ename"]) == ("error", "RunFailedError")
    assert "failed first: TooBad: of a cell (Cell In[1]:11 in fail)" in output["evalue"]
    assert re.search(r"Cell In\[1\], line 11, in fail\(\)", strip_colours(output["traceback"]))
    assert re.search(r"-+> 11 +raise TooBad\(message\)", strip_colours(output["traceback"]))


def test_frames_of_mpwatch_are_hidden(outputs):
    (output,) = outputs["failure"]
    assert not re.findall(r"^File .*/mpwatch/", strip_colours(output["traceback"]), re.MULTILINE)


def test_exceptions_of_modules(outputs):
    (output,) = outputs["failure of a module"]
    assert "in raises_value_error()" in strip_colours(output["traceback"])
    assert re.search(r'-+> \d+ +raise ValueError\("the batch is bad"\)', strip_colours(output["traceback"]))


def test_the_rank_has_the_source_of_the_cell(outputs):
    assert "raise TooBad(message)" in outputs["traceback"][0]["text"]


def test_an_error_and_a_result_are_tables(outputs):
    html = outputs["error"][0]["data"]["text/html"]
    assert "failed first: TooBad: of a cell" in html
    assert "<summary>traceback of rank" in html
    assert "  Cell In[1], line 11, in fail\n    raise TooBad(message)" in html
    html = outputs["result"][0]["data"]["text/html"]
    assert "<b>2 ranks succeeded</b>" in html
    assert '<td style="text-align:left">7</td>' in html


def test_a_timeout_shows_the_cell_lines_of_the_ranks(outputs):
    (output,) = outputs["timeout"]
    assert output["ename"] == "RunTimeoutError"
    assert "ranks 0-1: still at work in wait (" in output["evalue"]
    assert "(Cell In[1]:15 in wait: threading.Event().wait())" in output["evalue"]

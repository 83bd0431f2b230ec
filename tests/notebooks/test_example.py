"""examples/notebook.ipynb: its outputs when it is executed, and the outputs stored in it."""

import json
import re
from pathlib import Path

import pytest

from support.programs import ENV, python

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NOTEBOOK = HERE.parents[1] / "examples/notebook.ipynb"


def shown_text(path):
    """Return the text that each cell shows."""
    cells = json.loads(path.read_text())["cells"]
    return {cell["id"]: "".join(map(text_of, cell["outputs"])) for cell in cells if cell["cell_type"] == "code"}


def text_of(output):
    if output["output_type"] == "stream":
        return "".join(output["text"])
    if output["output_type"] == "error":
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output["traceback"]))
    return "".join(output["data"].get("text/html", output["data"]["text/plain"]))


@pytest.fixture(scope="module")
def new_outputs(tmp_path_factory):
    """Execute the notebook and return what its cells show."""
    output = tmp_path_factory.mktemp("executed") / "notebook.ipynb"
    python(str(HERE / "execute.py"), str(NOTEBOOK), "-o", str(output), env={**ENV, "PYTHONWARNINGS": "default"})
    return shown_text(output)


@pytest.fixture(params=["new", "stored"])
def cells(request):
    """What the cells show: after an execution, and as stored."""
    return request.getfixturevalue("new_outputs") if request.param == "new" else shown_text(NOTEBOOK)


def test_the_ranks_train(cells):
    assert "epoch 9: loss 0." in cells["train"]
    assert "<b>4 ranks succeeded</b>" in cells["train"]
    assert len(set(re.findall(r"Trained\(accuracy=([\d.]+)\)", cells["train"]))) == 1  # the same in all ranks
    assert float(re.match(r"([\d.]+)% of the test images", cells["use"])[1]) > 95


def test_the_failure_is_shown(cells):
    text = cells["failure"]
    assert "Cell In[4], line 7, in brightness()" in text
    assert "----> 7         raise ValueError(" in text
    assert "ValueError: 1 pixel in the share of rank 2 is not a number" in text
    assert "RunFailedError: rank 2 failed first: ValueError: 1 pixel in the share of rank 2" in text
    assert "stopped by the watcher" in text
    assert "<b>rank 2 failed first" in cells["error"]
    assert cells["cause"] == "2 FailureKind.EXCEPTION ValueError('1 pixel in the share of rank 2 is not a number')\n"


def test_the_failure_names_the_positions_of_the_other_ranks():
    """Only for the stored notebook: in another execution a rank may start too late to be in the collective."""
    text = shown_text(NOTEBOOK)["failure"]
    assert "ranks 0-1, 3: stopped by the watcher in all_reduce (Cell In[4]:9 in brightness: dist.all_reduce(total))" in text


def test_the_group_serves_many_cells(cells):
    assert cells["group"] == "images by rank: [450, 449, 449, 449]\n"
    assert sum(map(int, re.findall(r"\d+", cells["step"]))) == 1797
    assert int(re.search(r"(\d+)% agree", cells["purity"])[1]) > 60
    assert "HEALTHY" in cells["purity"]
    assert "STOPPED: closed" in cells["close"]


def test_the_last_live_view_is_stored():
    """Only for the stored notebook: in another execution the ranks may be too quick for a view."""
    assert "<b>step 9 of 9 (100 %); loss 0." in shown_text(NOTEBOOK)["train"]
    assert "4 ranks returned" in shown_text(NOTEBOOK)["train"]


def test_nothing_specific_to_a_machine_is_stored():
    text = NOTEBOOK.read_text()
    assert not re.search(r"/tmp|/home|/root|/Users|site-packages|iopub\.execute|Warning|UTC", text)
    assert set(json.loads(text)["metadata"]) == {"kernelspec", "language_info"}

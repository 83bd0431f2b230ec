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


@pytest.mark.parametrize("source", ["new", "stored"])
def test_the_ranks_train_fail_and_serve_many_cells(source, tmp_path):
    path = NOTEBOOK
    if source == "new":
        path = tmp_path / "notebook.ipynb"
        python(str(HERE / "execute.py"), str(NOTEBOOK), "-o", str(path), env={**ENV, "PYTHONWARNINGS": "default"})
    cells = shown_text(path)

    assert "epoch 9: loss 0." in cells["train"]
    assert "<b>4 ranks succeeded</b>" in cells["train"]
    assert len(set(re.findall(r"Trained\(accuracy=([\d.]+)\)", cells["train"]))) == 1  # the same in all ranks
    assert float(re.match(r"([\d.]+)% of the test images", cells["use"])[1]) > 95

    assert "Cell In[4], line 7, in brightness()" in cells["failure"]
    assert "----> 7         raise ValueError(" in cells["failure"]
    expected = "RunFailedError: rank 2 failed first: ValueError: 1 pixel in the share of rank 2 is not a number"
    assert expected in cells["failure"]
    assert "stopped by the watcher" in cells["failure"]
    assert "<b>rank 2 failed first" in cells["error"]
    assert cells["cause"] == "2 FailureKind.EXCEPTION ValueError('1 pixel in the share of rank 2 is not a number')\n"

    assert cells["group"] == "images by rank: [450, 449, 449, 449]\n"
    assert sum(map(int, re.findall(r"\d+", cells["step"]))) == 1797
    assert int(re.search(r"(\d+)% agree", cells["purity"])[1]) > 60
    assert "HEALTHY" in cells["purity"]
    assert "STOPPED" in cells["close"]


def test_nothing_specific_to_a_machine_is_stored():
    text = NOTEBOOK.read_text()
    assert not re.search(r"/tmp|/home|/root|/Users|site-packages|iopub\.execute|Warning|UTC", text)
    assert set(json.loads(text)["metadata"]) == {"kernelspec", "language_info"}

"""Executes a notebook: `python tests/notebook/execute.py examples/notebook.ipynb` stores in it what its cells put out.

Nothing of the machine is stored: no times, versions and folders. With `-o FILE` it is written there instead.
"""

import argparse
from itertools import pairwise
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


def executed(path):
    """The notebook, with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=60,
        record_timing=False,
        shutdown_kernel="immediate",  # else two seconds: see README
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


def joined(outputs):
    """Pieces of the same stream in one, as a notebook shows them."""
    for earlier, later in pairwise(outputs):
        if earlier.get("name", "no stream") == later.get("name"):
            later.text = earlier.pop("text") + later.text
    return [output for output in outputs if output.output_type != "stream" or "text" in output]


def without_folder(text):
    """Files of this repository have the names that they have in it; IPython calls the home directory ~."""
    text = text.replace(f"{ROOT}/", "")
    return text.replace(f"~/{ROOT.relative_to(Path.home())}/", "") if ROOT.is_relative_to(Path.home()) else text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    text = without_folder(nbformat.writes(executed(options.notebook)))
    (options.output or options.notebook).write_text(text + "\n")

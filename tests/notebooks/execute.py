"""Execute a notebook and store its outputs in it: `python tests/notebooks/execute.py examples/notebook.ipynb`.

Nothing specific to the machine is stored: no times, versions or folders. With `-o FILE` the result is written there.
"""

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


def execute(path):
    """Return the notebook with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=60,
        record_timing=False,
        coalesce_streams=True,
        shutdown_kernel="immediate",  # otherwise the end takes two seconds: see docs/how-to/notebooks.md
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def remove_folder(text):
    """Make paths of this repository relative to it. IPython writes ~ for the home directory."""
    text = text.replace(f"{ROOT}/", "")
    return text.replace(f"~/{ROOT.relative_to(Path.home())}/", "") if ROOT.is_relative_to(Path.home()) else text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    text = remove_folder(nbformat.writes(execute(options.notebook)))
    (options.output or options.notebook).write_text(text + "\n")

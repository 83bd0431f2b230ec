"""A program: run cells in a new kernel. `run_cells()` starts it.

The cells come as a JSON list on stdin. The program prints the outputs of each cell, and all messages about displays, as JSON.
It is a process of its own, because the client leaves an event loop behind.
"""

import json
import sys

import nbformat
from nbclient import NotebookClient

from support.programs import ENV, python

displays = []  # all messages about displays


class Client(NotebookClient):
    def process_message(self, message, cell, number):
        if message["msg_type"] in ("display_data", "update_display_data"):
            displays.append((number, message["msg_type"], message["content"]["data"].get("text/plain")))
        return super().process_message(message, cell, number)


def run_cells(cells):
    """Return the outputs of each cell, and a list of (number of the cell, kind of message, its text) for displays."""
    env = {**ENV, "PYTHONWARNINGS": "ignore"}
    return json.loads(python("-W", "ignore", __file__, program=json.dumps(list(cells)), env=env).stdout)


if __name__ == "__main__":
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)])
    Client(notebook, timeout=60, allow_errors=True, shutdown_kernel="immediate").execute()  # faster than asking it to end
    json.dump([[cell.outputs for cell in notebook.cells], displays], sys.stdout)

"""The legal transitions of the state of a run, as the diagram of states in ARCHITECTURE.md shows them."""

import re
from pathlib import Path

from mpwatch import WorkerState

ARCHITECTURE = Path(__file__).parents[3] / "ARCHITECTURE.md"
ARROWS = re.findall(r"^    (\S+) --> (\S+?)(?::.*)?$", ARCHITECTURE.read_text(), re.MULTILINE)  # [*] is the begin or the end
TRANSITIONS = {
    state: {WorkerState[after] for before, after in ARROWS if before == state.name and after != "[*]"}
    for state in WorkerState
}

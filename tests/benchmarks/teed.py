"""The way of measures whose ranks print: how long it takes to show it all, and whether it is all there.

The calling process's stdout is a pipe for that time. A fast reader, a process of its own, takes in what comes, and looks at
it only when nothing more comes. The files are looked at afterwards: they must be right, and with mpwatch so must be what is
shown, or there are no figures. torch elastic would never have any: a thread for each rank writes to one text stream, and
some lines are shown torn, twice or not at all. How many is a figure, too.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import tasks
from launchers import LAUNCH
from measures import OURS
from reader import END

__all__ = ["tee"]

READER = Path(__file__).parent / "reader.py"


def tee(measure, launcher, ranks, folder):
    for fifo in ("door", "gate"):
        os.mkfifo(f"{folder}/{fifo}")
    call, task = LAUNCH[launcher](logs=f"{folder}/logs"), getattr(tasks, measure.task)
    with reading(ranks, measure.lines) as figures:
        call(task, ranks, (folder, measure.lines))
    figures["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    look_at_files(f"{folder}/logs", ranks, measure.lines)
    assert launcher != OURS or not figures["faults"], f"{figures['faults']} lines are not shown as they were printed"
    return figures


@contextlib.contextmanager
def reading(ranks, lines):
    """The block's stdout goes to the reader, and gives the figures, filled in at its end."""
    figures, stdout = {}, os.dup(1)
    command = [sys.executable, str(READER), str(ranks), str(lines)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        os.dup2(reader.stdin.fileno(), 1)
        try:
            yield figures
        finally:
            sys.stdout.flush()
            os.write(1, END)  # no reader of it sees an end of file: multiprocessing's resource tracker holds it open, too
            os.dup2(stdout, 1)
            os.close(stdout)
            reader.stdin.close()
        figures.update(json.load(reader.stdout))


def look_at_files(logs, ranks, lines):
    paths = list(Path(logs).glob("*/attempt_0/*/stdout.log"))
    assert len(paths) == ranks, paths
    for path in paths:
        block = "".join(f"{line}\n" for line in tasks.lines_of(int(path.parent.name))).encode()
        assert path.stat().st_size == lines * tasks.LINE, f"{path} has {path.stat().st_size} bytes"
        with path.open("rb") as file:
            for at in range(0, lines, tasks.CYCLE):
                assert file.read(len(block)) == block, f"{path}: not what was printed, somewhere from line {at} on"

"""The procedure of measures whose ranks print: how long it takes to show all lines, and whether all are shown correctly.

The stdout of the calling process is a pipe during the call. A reader process stores the output, and checks it after the end.
Then the log files are checked. They must be correct, else there are no figures. For mpwatch the shown lines must be correct,
too. torch elastic would never have figures by that rule: a thread for each rank writes to one text stream, and some lines are
torn, shown twice or lost. The number of such lines is a figure.
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
from measures import MPWATCH
from reader import END_MARK

READER = Path(__file__).parent / "reader.py"


def tee(measure, launcher, ranks, folder):
    for fifo in ("arrivals", "release"):
        os.mkfifo(f"{folder}/{fifo}")
    call, task = LAUNCH[launcher](logs=f"{folder}/logs"), getattr(tasks, measure.task)
    with read_stdout(ranks, measure.lines) as figures:
        call(task, ranks, (folder, measure.lines))
    figures["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    check_log_files(f"{folder}/logs", ranks, measure.lines)
    assert launcher != MPWATCH or not figures["wrong_lines"], (
        f"{figures['wrong_lines']} lines are not shown as they were printed"
    )
    return figures


@contextlib.contextmanager
def read_stdout(ranks, lines):
    """Redirect stdout to a reader process within a `with` block. The figures are filled in at the end of the block."""
    figures, stdout = {}, os.dup(1)
    command = [sys.executable, str(READER), str(ranks), str(lines)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        os.dup2(reader.stdin.fileno(), 1)
        try:
            yield figures
        finally:
            sys.stdout.flush()
            os.write(1, END_MARK)  # instead of an end of file: the resource tracker of multiprocessing keeps the pipe open
            os.dup2(stdout, 1)
            os.close(stdout)
            reader.stdin.close()
        figures.update(json.load(reader.stdout))


def check_log_files(logs, ranks, lines):
    paths = list(Path(logs).glob("*/attempt_0/*/stdout.log"))
    assert len(paths) == ranks, paths
    for path in paths:
        block = "".join(f"{line}\n" for line in tasks.make_lines(int(path.parent.name))).encode()
        assert path.stat().st_size == lines * tasks.LINE, f"{path} has {path.stat().st_size} bytes"
        with path.open("rb") as file:
            for at in range(0, lines, tasks.LINES_PER_BLOCK):
                assert file.read(len(block)) == block, f"{path}: not what was printed, somewhere from line {at} on"

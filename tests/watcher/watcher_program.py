"""`Program` starts a program with a run, for tests that send signals to the watcher and its ranks."""

import os
import subprocess
import sys
import time
from pathlib import Path

from support.process_state import is_alive
from support.programs import ENV, command
from watcher.watched_program import PATIENT_RUN, RUN, main

__all__ = ["PATIENT_RUN", "RUN", "Program", "alive", "guardian_of"]


class Program:
    """A running program whose pids are known. Its arguments are statements in the names of watched_program.py."""

    def __init__(self, call=RUN, in_rank="", in_host=""):
        self.process = subprocess.Popen(
            [sys.executable, *command(main, call, in_rank, in_host)],
            env=ENV,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pids = [int(pid) for _ in range(2) for pid in self.process.stdout.readline().split()[1:]]
        assert len(self.pids) == 4, self.process.stderr.read()

    def signal(self, number, *, group=False):
        self.since = time.monotonic()
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self):
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err, time.monotonic() - self.since


def alive(pids):
    return [pid for pid in pids if is_alive(pid)]


def children_of(pid):
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def guardian_of(pid):
    for child in children_of(pid):
        if b"guardian/main.py" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise AssertionError("no guardian")

"""Programs with two ranks, each with a helper, for tests that send signals to them. See watched_program.py."""

import os
import subprocess
import sys
import time

from support.process_state import is_alive
from support.programs import ENV, command
from watcher.watched_program import RUN, main


def alive(pids):
    return [pid for pid in pids if is_alive(pid)]


class Program:
    """A running program whose pids are known. Its arguments are statements in the names of watched_program.py."""

    def __init__(self, call=RUN, in_rank="", in_host=""):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        arguments = [sys.executable, *command(main, call, in_rank, in_host)]
        self.process = subprocess.Popen(arguments, env={**ENV, "PYTHONWARNINGS": "default"}, process_group=0, **pipes)
        self.pids = [int(pid) for _ in range(2) for pid in self.process.stdout.readline().split()[1:]]
        assert len(self.pids) == 4, self.process.stderr.read()
        self.ranks = self.pids[::2]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def signal(self, number, *, group=False):
        self.since = time.monotonic()
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self):
        out, err = self.process.communicate(timeout=60)
        assert not alive(self.pids)
        return self.process.returncode, out, err

    def end_soon(self, number):
        status, out, err = self.end()
        assert status == -number, err
        assert time.monotonic() - self.since < 4
        return out, err

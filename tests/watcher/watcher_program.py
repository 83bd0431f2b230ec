"""Programs with a run, for tests that send signals to the watcher and its ranks."""

import os
import subprocess
import sys
import time
from pathlib import Path

from support.process_state import is_alive
from support.programs import ENV

# When the ranks run, each prints its own pid and the pid of a helper that it has started.
PROGRAM = """
import os, pathlib, signal, subprocess, sys, threading, time
import mpwatch
from support import failing
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup

def work():
    {in_rank}
    helper = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", "import signal; signal.pause()"], os.environ)
    os.write(1, f"running {{os.getpid()}} {{helper}}\\n".encode())
    failing.wait_to_be_stopped()

def before(): return (signal.getsignal(2), signal.getsignal(15), signal.getsignal(1), signal.set_wakeup_fd(-1))
{in_host}
state = before()
try:
    {call}
except BaseException as error:
    assert before() == state
    children = pathlib.Path(f"/proc/self/task/{{os.getpid()}}/children").read_text().split()
    assert all("resource_tracker" in pathlib.Path(f"/proc/{{pid}}/cmdline").read_text() for pid in children)
    raise
"""
RUN = "mpwatch.run(work, 2, grace_period=5)"
PATIENT_RUN = "mpwatch.run(work, 2, grace_period=60)"


class Program:
    """A running program whose pids are known."""

    def __init__(self, call=RUN, in_rank="", in_host=""):
        code = PROGRAM.format(call=call, in_rank=in_rank, in_host=in_host)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
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

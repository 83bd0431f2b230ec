"""The harness must see what it is there to see."""

import os
import subprocess
import sys
import threading

import pytest

from nodes import harness
from support.process_state import is_alive

ALONE = {"rendezvous": None}  # a job of its own


def leave_daemon():
    """Start a process in a session of its own, which no watcher ends. Return its pid."""
    lasting = [sys.executable, "-c", "import signal; signal.pause()"]
    return os.posix_spawn(sys.executable, lasting, os.environ, setsid=True)


def leave_thread(worker):
    """For `env`, which is called in the watcher's process."""
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()
    return {}


def test_what_a_node_leaves_is_reported(job):
    node = job.start(subprocess.list2cmdline, args=([],), env=leave_thread, **ALONE)
    with pytest.raises(AssertionError, match=r"node0 left .*forgotten"):
        node.outcome()


def test_processes_that_ranks_leave_are_killed_and_reported(monkeypatch, eventually):
    monkeypatch.setattr(harness, "CLEANUP_SECONDS", 0.1)
    job = harness.Job()
    (pid,) = job.start(leave_daemon, **ALONE).outcome().result
    with pytest.raises(AssertionError, match="processes that were left"):
        job.close()
    eventually(lambda: not is_alive(pid))

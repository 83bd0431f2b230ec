"""The processes of a test of several nodes, from outside: the nursery that nodes are forked from, and what a job has left."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from programs import ENV

__all__ = ["MARK", "Nursery", "kill", "processes_of"]

MARK = "MPWATCH_NODES_MARK"  # variable by which all are known that nodes of one job have started, and what those have
PATIENCE = 30.0  # seconds
LARGEST = 65536  # bytes of an answer


class Nursery:
    """The process that nodes are forked from."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nodes.nursery", str(theirs.fileno())],
                env={**ENV, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},  # a fork takes one thread along
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(self, request, fds):
        """Returns a pid, which stays that of the node until it is reaped."""
        return self._ask(request, fds)

    def reap(self, pid):
        """Returns its exit status, negative for a signal. It has ended."""
        return os.waitstatus_to_exitcode(self._ask({"reap": pid}))

    def close(self):
        self._socket.close()
        self._process.wait(PATIENCE)

    def _ask(self, request, fds=()):
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        return json.loads(self._socket.recv(LARGEST))


def kill(pid):
    """Returns when it has ended."""
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            wait([pidfd], PATIENCE)
        finally:
            os.close(pidfd)


def processes_of(mark):
    """All that live and were started by nodes of this job, or by their ranks, with their command lines."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = line
    return found

"""The processes of tests of several nodes: the fork server that starts the nodes, and processes that a job has left."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from support.programs import ENV

__all__ = ["MARK", "ForkServer", "kill", "processes_of"]

MARK = "MPWATCH_NODES_MARK"  # variable in the environment of all processes that a job has started
WAIT_SECONDS = 30.0  # seconds
MAX_ANSWER = 65536  # bytes of an answer


class ForkServer:
    """Start the fork server, and send it requests. See fork_server.py."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nodes.fork_server", str(theirs.fileno())],
                env={**ENV, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},  # a fork copies only one thread
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(self, request, fds):
        """Fork a node. Return its pid, which stays that of the node until `reap`."""
        return self._request(request, fds)

    def reap(self, pid):
        """Reap a node that has ended. Return its exit status, negative for a signal."""
        return os.waitstatus_to_exitcode(self._request({"reap": pid}))

    def close(self):
        self._socket.close()
        self._process.wait(WAIT_SECONDS)

    def _request(self, request, fds=()):
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        return json.loads(self._socket.recv(MAX_ANSWER))


def kill(pid):
    """Kill the process, and wait for its end."""
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            wait([pidfd], WAIT_SECONDS)
        finally:
            os.close(pidfd)


def processes_of(mark):
    """Return the processes that nodes of this job, or their ranks, have started, with their command lines."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = line
    return found

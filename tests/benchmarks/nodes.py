"""Measurements of a job of two nodes on this machine's loopback device. The clock starts when both have all their imports.

    conductor --- stdin: go ---> node.py, twice --- spawn ---> ranks
              <-- stdout: ready --'                            |  ^
              <-- door, a FIFO: "entered", "failed", "again" --'  |
              --- gate, a FIFO: the rank that is to fail may -----'

Nodes are ended by this process when the figure is there, with their ranks, whatever they have come to; but for `start`, where
they have to end by themselves. What takes longer than the measure's cap counts as having taken that long.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launchers import At

__all__ = ["nodes_failure", "nodes_loss", "nodes_start"]

COUNT = 2
LOST = 1  # the node that is killed: not the one that serves the store. Where a rank fails, it is there, too
STARTS_WITHIN = 60.0  # seconds, for all that is not measured
LARGEST = 1 << 16


def nodes_start(measure, launcher, ranks, folder):
    with Nodes(measure, launcher, ranks, folder) as nodes:
        began = nodes.go()
        entered = nodes.hear("entered", COUNT * ranks, began + measure.cap)
        assert len(entered) == COUNT * ranks, f"{len(entered)} ranks have come"
        nodes.await_end()
    return {"entered": max(said.at for said in entered) - began}


def nodes_failure(measure, launcher, ranks, folder):
    with Nodes(measure, launcher, ranks, folder) as nodes:
        nodes.all_in(ranks)
        nodes.open_gate()
        (failed,) = nodes.hear("failed", 1, time.monotonic() + STARTS_WITHIN)
        return {"stopped": nodes.await_deaths(failed.at + measure.cap) - failed.at}


def nodes_loss(measure, launcher, ranks, folder):
    with Nodes(measure, launcher, ranks, folder) as nodes:
        nodes.all_in(ranks)
        lost = nodes.lose()
        again = nodes.hear("again", ranks, lost + measure.cap)
        return {"again": max(said.at for said in again) - lost if len(again) == ranks else measure.cap}


@dataclass(frozen=True)
class Said:
    """By a rank."""

    what: str
    at: float
    pid: int
    node: int


class Nodes:
    """Two of them, and who their ranks are."""

    def __init__(self, measure, launcher, ranks, folder):
        self._stack = contextlib.ExitStack()
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._unheard = b""
        self._said = []  # of the ranks, in the order in which it came
        self._alive = {}  # pid of a rank: its pidfd
        self._died_at = 0.0
        for name in ("door", "gate"):
            os.mkfifo(f"{folder}/{name}")
        self._door, self._gate = (os.open(f"{folder}/{name}", os.O_RDWR) for name in ("door", "gate"))
        self._stack.callback(os.close, self._door)
        self._stack.callback(os.close, self._gate)
        self._selector.register(self._door, selectors.EVENT_READ, self._listen)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        at = At(0, port, measure.least_nodes, COUNT, measure.node_timeout)
        command = [sys.executable, str(Path(__file__).with_name("node.py")), launcher, measure.task, str(ranks), folder]
        self._nodes = [self._start([*command, json.dumps(asdict(replace(at, node=node)))]) for node in range(COUNT)]
        for node in self._nodes:
            assert node.stdout.readline() == b"ready\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node in self._nodes:
            node.kill()
        for pidfd in self._alive.values():
            kill(pidfd)
        self._stack.close()

    def go(self):
        """Returns when that was."""
        at = time.monotonic()
        for node in self._nodes:
            node.stdin.write(b"go\n")
            node.stdin.flush()
        return at

    def all_in(self, ranks):
        """The nodes are told to go, and all of their ranks have come."""
        entered = self.hear("entered", COUNT * ranks, self.go() + STARTS_WITHIN)
        assert len(entered) == COUNT * ranks, f"{len(entered)} ranks have come"

    def open_gate(self):
        os.write(self._gate, b"1")

    def lose(self):
        """Kill a node and its ranks. Returns when that was."""
        ranks = [said.pid for said in self._said if said.node == LOST]
        at = time.monotonic()
        self._nodes[LOST].kill()
        for pid in ranks:
            kill(self._alive[pid])
        return at

    def hear(self, what, count, deadline):
        """So many ranks say this; fewer, if it becomes too late."""
        while len(found := [said for said in self._said if said.what == what]) < count:
            if not self._take_in(deadline):
                break
        return found

    def await_deaths(self, deadline):
        """Of all ranks. Returns when the last one had died, or when it is too late."""
        while self._alive:
            if not self._take_in(deadline):
                return deadline
        return self._died_at

    def await_end(self):
        """Of both nodes, by themselves, and well."""
        for node in self._nodes:
            assert node.wait(STARTS_WITHIN) == 0, f"exit status {node.returncode}"

    def _start(self, command):
        node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for close in (node.wait, node.stdout.close, node.stdin.close):
            self._stack.callback(close)
        return node

    def _take_in(self, deadline):
        """Whether anything has come in before it was too late."""
        events = self._selector.select(max(0.0, deadline - time.monotonic()))
        for key, _ in events:
            key.data(key.fileobj)
        return bool(events)

    def _listen(self, door):
        *lines, self._unheard = (self._unheard + os.read(door, LARGEST)).split(b"\n")
        for line in lines:
            what, at, pid, node = line.decode().split()
            said = Said(what, float(at), int(pid), int(node))
            self._said.append(said)
            if said.pid not in self._alive:
                self._meet(said.pid)

    def _meet(self, pid):
        with contextlib.suppress(ProcessLookupError):  # it had no more to do
            pidfd = self._alive[pid] = os.pidfd_open(pid)
            self._stack.callback(os.close, pidfd)
            self._selector.register(pidfd, selectors.EVENT_READ, lambda pidfd: self._bury(pid, pidfd))

    def _bury(self, pid, pidfd):
        self._died_at = time.monotonic()
        self._selector.unregister(pidfd)
        del self._alive[pid]


def kill(pidfd):
    with contextlib.suppress(ProcessLookupError):  # it has ended, and we have not seen it yet
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)

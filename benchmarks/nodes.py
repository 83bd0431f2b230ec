"""Measurements of a job of two nodes on this machine's loopback device. The clock starts when both nodes have imported all.

    this process --- stdin: go ------------------------------> node.py, twice --- spawn ---> ranks
                 <-- stdout: ready ---------------------------'                               |  ^
                 <-- arrivals, a FIFO: entered, failed, restarted ----------------------------'  |
                 --- release, a FIFO: the rank that is to fail goes on ---------------------------'

This process kills the nodes and their ranks when it has the figure. In `nodes_start` the nodes must exit by themselves. If a
measurement takes longer than the cap of the measure, its figure is the cap.
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

from launchers import NodeConfig

NODE_COUNT = 2
FAILING_NODE = 1  # not the node that serves the store
START_TIMEOUT = 60.0  # seconds, for all that is not measured
READ_SIZE = 1 << 16


def nodes_start(measure, launcher, ranks, folder):
    with Nodes(measure, launcher, ranks, folder) as nodes:
        began = nodes.send_go()
        entered = nodes.wait_for_messages("entered", NODE_COUNT * ranks, began + measure.cap)
        assert len(entered) == NODE_COUNT * ranks, f"{len(entered)} ranks have entered the function"
        nodes.wait_for_node_exits()
    return {"entered": max(message.at for message in entered) - began}


def nodes_failure(measure, launcher, ranks, folder):
    with Nodes(measure, launcher, ranks, folder) as nodes:
        nodes.start_ranks(ranks)
        nodes.release_failing_rank()
        (failed,) = nodes.wait_for_messages("failed", 1, time.monotonic() + START_TIMEOUT)
        return {"stopped": nodes.wait_for_rank_exits(failed.at + measure.cap) - failed.at}


def nodes_loss(measure, launcher, ranks, folder):
    with Nodes(measure, launcher, ranks, folder) as nodes:
        nodes.start_ranks(ranks)
        killed_at = nodes.kill_failing_node()
        restarted = nodes.wait_for_messages("restarted", ranks, killed_at + measure.cap)
        if len(restarted) < ranks:
            return {"restarted": measure.cap}
        return {"restarted": max(message.at for message in restarted) - killed_at}


@dataclass(frozen=True)
class RankMessage:
    """A message of a rank: what it has done, and when."""

    name: str
    at: float
    pid: int
    node: int


class Nodes:
    """The processes of the two nodes, and their ranks."""

    def __init__(self, measure, launcher, ranks, folder):
        self._stack = contextlib.ExitStack()
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._buffer = b""
        self._messages = []  # of the ranks, in the order of arrival
        self._pidfds = {}  # of the ranks that are alive, by pid
        self._last_exit_at = 0.0
        for name in ("arrivals", "release"):
            os.mkfifo(f"{folder}/{name}")
        self._arrivals, self._release = (os.open(f"{folder}/{name}", os.O_RDWR) for name in ("arrivals", "release"))
        self._stack.callback(os.close, self._arrivals)
        self._stack.callback(os.close, self._release)
        self._selector.register(self._arrivals, selectors.EVENT_READ, self._read_messages)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        config = NodeConfig(0, port, measure.min_nodes, NODE_COUNT, measure.node_timeout)
        command = [sys.executable, str(Path(__file__).with_name("node.py")), launcher, measure.task, str(ranks), folder]
        self._nodes = [
            self._start_node([*command, json.dumps(asdict(replace(config, node=node)))]) for node in range(NODE_COUNT)
        ]
        for node in self._nodes:
            assert node.stdout.readline() == b"ready\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node in self._nodes:
            node.kill()
        for pidfd in self._pidfds.values():
            kill(pidfd)
        self._stack.close()

    def send_go(self):
        """Let the nodes make the call. Return when that was."""
        at = time.monotonic()
        for node in self._nodes:
            node.stdin.write(b"go\n")
            node.stdin.flush()
        return at

    def start_ranks(self, ranks):
        """Let the nodes make the call, and wait until all ranks have entered the function."""
        entered = self.wait_for_messages("entered", NODE_COUNT * ranks, self.send_go() + START_TIMEOUT)
        assert len(entered) == NODE_COUNT * ranks, f"{len(entered)} ranks have entered the function"

    def release_failing_rank(self):
        os.write(self._release, b"1")

    def kill_failing_node(self):
        """Kill a node and its ranks. Return when that was."""
        pids = [message.pid for message in self._messages if message.node == FAILING_NODE]
        at = time.monotonic()
        self._nodes[FAILING_NODE].kill()
        for pid in pids:
            kill(self._pidfds[pid])
        return at

    def wait_for_messages(self, name, count, deadline):
        """Wait until so many ranks have sent this message. Return the messages: fewer if the deadline has passed."""
        while len(found := [message for message in self._messages if message.name == name]) < count:
            if not self._process_events(deadline):
                break
        return found

    def wait_for_rank_exits(self, deadline):
        """Wait until all ranks have exited. Return when the last one did, or the deadline if that has passed."""
        while self._pidfds:
            if not self._process_events(deadline):
                return deadline
        return self._last_exit_at

    def wait_for_node_exits(self):
        """Wait until both nodes have exited by themselves with status 0."""
        for node in self._nodes:
            assert node.wait(START_TIMEOUT) == 0, f"exit status {node.returncode}"

    def _start_node(self, command):
        node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for close in (node.wait, node.stdout.close, node.stdin.close):
            self._stack.callback(close)
        return node

    def _process_events(self, deadline):
        """Wait for events and process them. Return False if the deadline passed before."""
        events = self._selector.select(max(0.0, deadline - time.monotonic()))
        for key, _ in events:
            key.data(key.fileobj)
        return bool(events)

    def _read_messages(self, fifo):
        *lines, self._buffer = (self._buffer + os.read(fifo, READ_SIZE)).split(b"\n")
        for line in lines:
            name, at, pid, node = line.decode().split()
            message = RankMessage(name, float(at), int(pid), int(node))
            self._messages.append(message)
            if message.pid not in self._pidfds:
                self._watch_rank(message.pid)

    def _watch_rank(self, pid):
        with contextlib.suppress(ProcessLookupError):  # the rank has already exited
            pidfd = self._pidfds[pid] = os.pidfd_open(pid)
            self._stack.callback(os.close, pidfd)
            self._selector.register(pidfd, selectors.EVENT_READ, lambda pidfd: self._on_rank_exit(pid, pidfd))

    def _on_rank_exit(self, pid, pidfd):
        self._last_exit_at = time.monotonic()
        self._selector.unregister(pidfd)
        del self._pidfds[pid]


def kill(pidfd):
    with contextlib.suppress(ProcessLookupError):  # it has exited, and this process has not yet seen that
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)

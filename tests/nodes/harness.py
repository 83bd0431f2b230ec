"""Jobs of several nodes for tests: start nodes, wait for their ranks, give each rank an order, and read the outcomes.

    test ---- starts ----> node: mpwatch.run(...) ---- starts ----> rank: tasks.follow_order
      ^                     |                                        |      ^
      +--- file: outcome ---+                                        |      |
      +--- socket: "I am rank 3, ..." -------------------------------+      |
      +--- socket: an order, such as "raise" or "return" -------------------+

`Job.wait_until` does all the waiting, for descriptors and with a deadline. Times are of CLOCK_MONOTONIC, which all nodes here
share. When a job is closed, all its processes must have ended, and it must have left no file.
"""

import ctypes
import json
import os
import pickle
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import mpwatch
from nodes import tasks
from support.ports import free_port
from support.programs import ENV

WAIT_SECONDS = 30.0  # after which a test fails; what happens normally takes less than a second
LONG = 1000.0  # seconds: a limit in options that no test waits for, so what happens within WAIT_SECONDS has another reason
CLEANUP_SECONDS = 10.0  # after the last node has ended, for processes that end by themselves
NODE_TIMEOUT = 2.0  # seconds, for tests of silent nodes
CLONE_NEWUTS = 0x04000000
MARK = "MPWATCH_NODES_MARK"  # variable in the environment of all processes that a job has started


@cache
def may_rename_hosts():
    """Return whether this user may give a process a hostname of its own."""
    with ThreadPoolExecutor(1) as pool:  # whose namespaces end with it
        return pool.submit(ctypes.CDLL(None).unshare, CLONE_NEWUTS).result() == 0


class Node:
    def __init__(self, job, files, hostname, process):
        self.name, self.hostname, self.process, self.pid = files.name, hostname, process, process.pid
        self.ended_at = None
        self._job, self._files = job, files

    def send(self, number):
        if self.ended_at is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send(signal.SIGKILL)

    def outcome(self, within=WAIT_SECONDS):
        """Wait for the end of the process. Return error, cause and result of its call of `run`.

        Assert that it left nothing in the process.
        """
        status = self.exit_status(within)
        assert status == 0, f"{self.name} ended with status {status} and no outcome"
        outcome, left = pickle.loads(self._files.with_suffix(".outcome").read_bytes())
        assert not left, f"{self.name} left {left}"
        return SimpleNamespace(**pickle.loads(outcome))

    def exit_status(self, within=WAIT_SECONDS):
        """Return the exit status of the process, negative for a signal."""
        self._job.wait_until(lambda: self.ended_at, f"the end of {self.name}", within)
        return self.process.wait()

    @property
    def log(self):
        """What the node and its ranks have printed."""
        return self._files.with_suffix(".log").read_text(errors="replace")

    def __repr__(self):
        return f"{self.name}: pid {self.pid}, " + ("running" if self.ended_at is None else "ended")


class RankProcess:
    """A process of a rank that runs `tasks.follow_order`."""

    def __init__(self, connection, introduction):
        self.worker = SimpleNamespace(**introduction)
        self.rank, self.pid, self.node, self.started_at = (introduction[name] for name in ("rank", "pid", "node", "at"))
        self.ended_at = None
        self._connection = connection

    @property
    def round(self):
        """What only the ranks that were started together have in common. Each attempt has a new port."""
        return self.worker.master_addr, self.worker.master_port, self.worker.world_size

    def order(self, *order):
        """The order is lost if the rank has just been stopped."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(json.dumps(order).encode() + b"\n")

    def __repr__(self):
        state = "running" if self.ended_at is None else "ended"
        return f"rank {self.rank} of {self.worker.world_size} on {self.node}, pid {self.pid}, {state}"


class World(tuple):
    """The processes of all ranks that were started together, by rank."""

    __slots__ = ()

    def order(self, *order):
        for process in self:
            process.order(*order)

    def of(self, node):
        return World(process for process in self if process.node == node.name)

    @property
    def restart_counts(self):
        return {process.worker.restart_count for process in self}

    @property
    def ended_at(self):
        """When the last process ended. None if a process still runs."""
        times = [process.ended_at for process in self]
        return None if None in times else max(times)


class Job:
    """The nodes of one job, on addresses of the loopback device."""

    def __init__(self):
        self.nodes, self.processes = [], []
        self.rendezvous = {"nnodes": 2, "node_timeout": LONG, "join_timeout": LONG, "run_id": "job"}
        self.port = free_port()
        self._mark, self._seen = uuid.uuid4().hex, set()
        self._selector = selectors.DefaultSelector()
        self._stack = ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="nodes-"))  # pytest's own names are too long for a socket
        self._stack.callback(shutil.rmtree, self._folder)
        (self._folder / "tmp").mkdir()
        server = socket.create_server(str(self._folder / "ranks"), family=socket.AF_UNIX)
        self._rank_socket = self._stack.enter_context(server)
        self._stack.callback(self._selector.close)
        self.register(self._rank_socket, self._accept_rank)

    # starting

    def start(self, function=tasks.follow_order, nprocs=1, *, rendezvous=(), through="run", **options):
        """Start a node that calls `run` with these options. The coordinator runs in the first node by default.

        `rendezvous` has options of its Rendezvous, in addition to `job.rendezvous`. With None the node runs alone, without one.
        """
        number = len(self.nodes)
        options = {"grace_period": 5.0, "nprocs": nprocs, **options}
        if rendezvous is not None:
            chosen = {
                "endpoint": f"127.0.0.1:{self.port}",
                "local_addr": f"127.0.0.{1 + number}",
                "is_host": number == 0,
                "last_call_timeout": 1.0,
                **self.rendezvous,
                **dict(rendezvous),
            }
            options["rendezvous"] = mpwatch.Rendezvous(**chosen)
        return self._start(number, pickle.dumps((through, function, options)))

    def start_several(self, count, function=tasks.follow_order, nprocs=1, **options):
        return [self.start(function, nprocs, **options) for _ in range(count)]

    def _start(self, number, call):
        """Start it in a process group of its own, as a shell does: so SIGTSTP stops it."""
        files = self._folder / f"node{number}"
        hostname = f"host{number}" if may_rename_hosts() else ""
        environment = {
            tasks.RANK_SOCKET: self._rank_socket.getsockname(),
            tasks.NODE: files.name,
            MARK: self._mark,
            "TMPDIR": str(self._folder / "tmp"),
        }
        command = [sys.executable, "-m", "nodes.node", str(files), hostname]
        with open(files.with_suffix(".log"), "wb") as log:
            output = {"stdout": log, "stderr": log, "env": {**ENV, **environment}}
            process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0, **output)
        with process.stdin:
            process.stdin.write(call)
        node = Node(self, files, hostname or socket.gethostname(), process)
        self.nodes.append(node)
        self._watch(node)
        return node

    # waiting

    def await_world(self, size, within=WAIT_SECONDS):
        """Wait for all ranks of an attempt with so many ranks, which this method has not returned before."""

        def complete():
            rounds = {}
            for process in self.processes:
                if process.ended_at is None and process not in self._seen:
                    rounds.setdefault(process.round, []).append(process)
            worlds = [World(sorted(processes, key=lambda process: process.rank)) for processes in rounds.values()]
            return next((world for world in worlds if [process.rank for process in world] == list(range(size))), None)

        self.wait_until(lambda: complete() or all(node.ended_at for node in self.nodes), f"a world of {size}", within)
        world = complete()
        assert world, f"all nodes have ended\n{self._describe()}"
        assert {process.worker.world_size for process in world} == {size}
        self._seen.update(world)
        return world

    def await_coordinator(self):
        while True:
            with suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", self.port)).close()
            self.watch_for(0.01)

    def await_end(self, world):
        self.wait_until(lambda: world.ended_at is not None, f"the end of {list(world)}")

    def outcomes(self, nodes=None, within=WAIT_SECONDS):
        """Return the outcomes of all nodes when they have ended, in the order in which they were started."""
        return [node.outcome(within) for node in (self.nodes if nodes is None else nodes)]

    def results(self, nodes=None, within=WAIT_SECONDS):
        """Assert that all nodes have succeeded, and return their results."""
        outcomes = self.outcomes(nodes, within)
        assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
        return [outcome.result for outcome in outcomes]

    def node_of(self, process):
        return next(node for node in self.nodes if node.name == process.node)

    def wait_until(self, condition, what, within=WAIT_SECONDS):
        """Handle events until the condition holds."""
        deadline = time.monotonic() + within
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"waited {within:g} s for {what}\n{self._describe()}"
            self._handle_events(left)

    def watch_for(self, seconds):
        """Handle events for so many seconds, to see that something does not happen."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._handle_events(left)

    def _handle_events(self, seconds):
        for key, _ in self._selector.select(seconds):
            key.data(key.fileobj)

    def _describe(self):
        return "\n".join(map(repr, [*self.nodes, *self.processes]))

    # events

    def register(self, fd, do):
        self._selector.register(fd, selectors.EVENT_READ, do)

    def unregister(self, fd):
        self._selector.unregister(fd)

    def _watch(self, process):
        """Note when this process ends."""
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            process.ended_at = time.monotonic()
        else:
            self._stack.callback(os.close, fd)
            self.register(fd, partial(self._handle_exit, process))

    def _handle_exit(self, process, pidfd):
        process.ended_at = time.monotonic()
        self.unregister(pidfd)

    def _accept_rank(self, server):
        connection = self._stack.enter_context(server.accept()[0])
        with connection.makefile("rb") as lines:
            introduction = lines.readline()
        if not introduction.endswith(b"\n"):  # the rank ended before it had introduced itself
            return
        process = RankProcess(connection, json.loads(introduction))
        self.processes.append(process)
        self._watch(process)

    # the end

    def close(self):
        """Assert that all nodes have ended by themselves, and that nothing is left. Kill the rest."""
        running = [repr(node) for node in self.nodes if node.ended_at is None]
        left = []
        try:
            for node in self.nodes:
                node.kill()
            self.wait_until(lambda: all(node.ended_at for node in self.nodes), "the end of killed nodes")
            left = self._kill_leftovers()
        finally:
            for node in self.nodes:
                print(f"--- {node!r} with {node.process.wait()}\n{node.log}")
            files = os.listdir(self._folder / "tmp")
            self._stack.close()
        assert not running, "nodes that the test had not seen end"
        assert not left, "processes that were left"
        assert not files, f"files that were left: {files}"

    def _kill_leftovers(self):
        deadline = time.monotonic() + CLEANUP_SECONDS
        while (left := processes_of(self._mark)) and time.monotonic() < deadline:
            os.sched_yield()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


def processes_of(mark):
    """Return the processes that nodes of this job, or their ranks, have started, with their command lines."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found

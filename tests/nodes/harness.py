"""Jobs of several nodes for tests: start nodes, wait for their ranks, give each rank an order, and read the outcomes.

    test ---- requests ----> fork server ---- fork ----> node: mpwatch.run(...) ---- spawn ----> rank: tasks.follow_order
      ^                                                   |                                       |      ^
      +-------------------- pipe: outcome ----------------+                                       |      |
      +------------------- socket: "I am rank 3, ..." --------------------------------------------+      |
      +------------------- socket: an order, such as "raise" or "return" --------------------------------+

`Job.wait_until` does all the waiting, for descriptors and with a deadline. Times are of CLOCK_MONOTONIC, which all nodes here
share. When a job is closed, all its processes must have ended, and it must have left no file.
"""

import json
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from nodes import tasks
from nodes.processes import MARK, kill, processes_of
from support.ports import free_port

__all__ = ["Job", "Node", "Outcome", "RankProcess", "World"]

WAIT_SECONDS = 30.0  # after which a test fails; what happens normally takes less than a second
CLEANUP_SECONDS = 1.0  # after the last node has ended, for processes that end by themselves
CHUNK = 65536
NODE_TIMEOUT = 2  # seconds
AT_ONCE = 0.95 * NODE_TIMEOUT  # seconds, also on a busy machine: a node that waited for a silent node would need longer
LAST_CALL = 1  # seconds that torch waits for more nodes than it needs
STORE_PORT = 29400  # on a host of its own


@dataclass
class Outcome:
    """The outcome of a node's call of `run`. See node_program.py."""

    hostname: str
    clocks: list[float]  # seconds since 1970, by Python's clock on the node, and by that of torch's rendezvous
    started: float
    ended: float
    left: dict[str, str]  # what the run has left in the process, by kind
    modules: list[str]
    error: str = ""  # name of its type; empty if `run` returned
    text: str = ""
    exit_code: int | None = None  # of the error
    cause: dict | None = None
    state: str = ""
    size: int = 0
    missing: str = ""  # what iteration of the result raises
    values: dict[int, object] = field(default_factory=dict)
    failures: dict[int, dict] = field(default_factory=dict)
    root_cause: dict | None = None
    workers: list[dict] = field(default_factory=list)
    worker_states: dict[int, str] = field(default_factory=dict)
    attempts: list[dict] = field(default_factory=list)
    restarts: int = 0
    reason: str = ""
    notes: list[str] = field(default_factory=list)
    stopped_at: int | None = None
    stop_cause: str = ""
    events: list[str] = field(default_factory=list)
    blamed: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self):
        for name in ("values", "failures", "worker_states", "blamed"):
            setattr(self, name, {int(rank): what for rank, what in getattr(self, name).items()})


class Node:
    """One node of a job."""

    def __init__(self, job, name, hostname, pid):
        self.name = name
        self.hostname = hostname
        self.pid = pid
        self.ended_at = None
        self.status = None
        self.output = b""
        self.is_pipe_open = True
        self._job = job

    def send(self, number):
        """Send a signal to the watcher. Return the time."""
        at = time.monotonic()
        if self.ended_at is None:
            os.kill(self.pid, number)
        return at

    def kill(self):
        return self.send(signal.SIGKILL)

    def outcome(self, within=WAIT_SECONDS):
        """Return the outcome when the process has ended. Assert that it left nothing."""
        self._job.wait_until(lambda: self.is_over, f"the end of {self.name}", within)
        assert self.output, f"{self.name} ended with status {self.status} without output"
        outcome = Outcome(**json.loads(self.output))
        assert not outcome.left, f"{self.name} left {outcome.left}"
        return outcome

    def exit_status(self, within=WAIT_SECONDS):
        """Return the exit status of the process, negative for a signal."""
        self._job.wait_until(lambda: self.is_over, f"the end of {self.name}", within)
        return self.status

    @property
    def is_over(self):
        return self.ended_at is not None and not self.is_pipe_open

    @property
    def log(self):
        """What the node and its ranks have printed."""
        return self._job.read_log(self)

    def __repr__(self):
        return f"{self.name}: pid {self.pid}, " + ("running" if self.ended_at is None else f"ended with {self.status}")


class RankProcess:
    """A process of a rank that runs `tasks.follow_order`."""

    def __init__(self, connection, introduction):
        self.pid = introduction.pop("pid")
        self.node = introduction.pop("node")
        self.rank = introduction["rank"]
        self.worker = introduction
        self.started_at = introduction.pop("at")
        self.ended_at = None
        self._connection = connection

    @property
    def round(self):
        """What only the ranks that were started together have in common. Each attempt has a new port."""
        return self.worker["master_addr"], self.worker["master_port"], self.worker["world_size"]

    def order(self, *order):
        """Give the rank its order. Return the time. The order is lost if the rank has just been stopped."""
        at = time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(json.dumps(order).encode() + b"\n")
        return at

    def __repr__(self):
        state = "running" if self.ended_at is None else "ended"
        return f"rank {self.rank} of {self.worker['world_size']} on {self.node}, pid {self.pid}, {state}"


class World(tuple):
    """The processes of all ranks that were started together, by rank."""

    __slots__ = ()

    def order(self, *order):
        """Give all ranks this order. Return the time of the first."""
        return min([process.order(*order) for process in self])

    def of(self, node):
        """Return the ranks on this node."""
        return World(process for process in self if process.node == node.name)

    @property
    def ended_at(self):
        """When the last process ended. None if a process still runs."""
        times = [process.ended_at for process in self]
        return None if None in times else max(times)


class Job:
    """The nodes of one job. With a `network` each has a host of its own. Otherwise they share the loopback device."""

    def __init__(self, fork_server, *, network=None, hostnames=True):
        self.nodes = []
        self.processes = []
        self.network = network
        self.rendezvous = {"nnodes": 2, "node_timeout": NODE_TIMEOUT, "join_timeout": WAIT_SECONDS, "run_id": "job"}
        self.port = STORE_PORT if network else free_port()
        self._fork_server = fork_server
        self._hostnames = hostnames
        self._mark = uuid.uuid4().hex
        self._seen = set()
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._stack = ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="nodes-"))  # pytest's own names are too long for a socket
        self._stack.callback(shutil.rmtree, self._folder)
        (self._folder / "tmp").mkdir()
        self._rank_socket = self._stack.enter_context(
            socket.create_server(str(self._folder / "ranks"), family=socket.AF_UNIX)
        )
        self._stack.callback(self._selector.close)
        self._selector.register(self._rank_socket, selectors.EVENT_READ, self._accept_rank)

    # starting

    def start(
        self,
        function=tasks.follow_order,
        nprocs=1,
        *,
        rendezvous: Mapping | None = None,
        skew_seconds=0,
        host=None,
        beforehand=None,
        through="run",
        **options,
    ):
        """Start a node that calls `run` with these options. The first node serves the store by default.

        Args:
            function: what the ranks run.
            nprocs: how many ranks.
            rendezvous: options of its Rendezvous, in addition to `job.rendezvous`. False: the node runs alone, without one.
            skew_seconds: by how much its clock is wrong.
            host: number of its host. None: a host of its own.
            beforehand: a function of tasks.py, called in the node's process before `run`.
            through: "run" or "main".
            options: of `run`.
        """
        host = len(self.nodes) if host is None else host
        request = {
            "do": "call",
            "function": f"{function.__module__}:{function.__name__}",
            "nprocs": nprocs,
            "rendezvous": None if rendezvous is False else self._make_rendezvous(host, rendezvous or {}),
            "skew_seconds": skew_seconds,
            "through": through,
            "beforehand": beforehand.__name__ if beforehand else "",
            "options": {"grace_period": 5.0, **options},
        }
        return self._fork(request, host)

    def start_several(self, count, function=tasks.follow_order, nprocs=1, **options):
        return [self.start(function, nprocs, **options) for _ in range(count)]

    def start_store(self):
        """Start a process that only serves the store, for the nodes that are started later."""
        host = len(self.nodes)
        self.rendezvous |= {"endpoint": f"{self._address(host)}:{self.port}", "is_host": False}
        store = self._fork({"do": "serve_store", "endpoint": (self._address(host), self.port)}, host)
        self.wait_until(lambda: store.output or store.is_over, "the store")
        assert store.output == b"serving", store
        return store

    def _make_rendezvous(self, host, rendezvous):
        own = {"endpoint": f"{self._address(0)}:{self.port}", "local_addr": self._address(host), "is_host": host == 0}
        options = {"last_call_timeout": LAST_CALL, **rendezvous.get("options", {})}
        return {**own, **self.rendezvous, **rendezvous, "options": options}

    def _address(self, host):
        return self.network.address(host) if self.network else f"127.0.0.{1 + host}"

    def hostname(self, host):
        """Return the name of this host: its own, or that of the machine if the user may not give a process another one."""
        return f"host{host}" if self._hostnames else socket.gethostname()

    def _fork(self, request, host):
        name = f"node{len(self.nodes)}"
        hostname = self.hostname(host) if self._hostnames else ""
        read_end, write_end = os.pipe()
        with open(self._folder / f"{name}.log", "wb") as log, open(write_end, "wb") as pipe:
            fds = [pipe.fileno(), log.fileno(), *([self.network.namespace(host)] if self.network else ())]
            environment = {
                tasks.RANK_SOCKET: self._rank_socket.getsockname(),
                tasks.NODE: name,
                MARK: self._mark,
                "TMPDIR": str(self._folder / "tmp"),
            }
            pid = self._fork_server.fork({**request, "hostname": hostname, "environment": environment}, fds)
        node = Node(self, name, hostname or socket.gethostname(), pid)
        self.nodes.append(node)
        self._register(read_end, partial(self._read_output, node))
        self._register(os.pidfd_open(pid), partial(self._handle_node_exit, node))
        return node

    # waiting

    def await_world(self, size, within=WAIT_SECONDS):
        """Wait for all ranks of one attempt, so many of them, that this method has not returned before."""

        def complete():
            rounds = {}
            for process in self.processes:
                if process.ended_at is None and process not in self._seen:
                    rounds.setdefault(process.round, []).append(process)
            worlds = [World(sorted(processes, key=lambda process: process.rank)) for processes in rounds.values()]
            return next((world for world in worlds if [process.rank for process in world] == list(range(size))), None)

        self.wait_until(lambda: complete() or not self._is_any_node_running(), f"a world of {size}", within)
        world = complete()
        assert world, f"all nodes have ended\n{self._describe()}"
        assert {process.worker["world_size"] for process in world} == {size}
        self._seen.update(world)
        return world

    def await_end(self, world, within=WAIT_SECONDS):
        """Wait for the end of these processes. Return the time at which the last one ended."""
        self.wait_until(lambda: world.ended_at is not None, f"the end of {list(world)}", within)
        return world.ended_at

    def outcomes(self, nodes=None):
        """Return the outcomes of all nodes when they have ended, in the order in which they were started."""
        return [node.outcome() for node in (self.nodes if nodes is None else nodes)]

    def wait_until(self, condition, what, within=WAIT_SECONDS):
        """Handle events until the condition holds."""
        deadline = time.monotonic() + within
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"waited {within:g} s for {what}\n{self._describe()}"
            self._handle_events(left)

    @staticmethod
    def now():
        return time.monotonic()

    def watch_for(self, seconds):
        """Handle events for so many seconds, to see that something does not happen."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._handle_events(left)

    def _handle_events(self, seconds):
        for key, _ in self._selector.select(seconds):
            key.data(key.fileobj)

    def _is_any_node_running(self):
        return any(node.ended_at is None for node in self.nodes)

    def _describe(self):
        return "\n".join(map(repr, [*self.nodes, *self.processes]))

    # events

    def _register(self, fd, do):
        self._stack.callback(os.close, fd)
        self._selector.register(fd, selectors.EVENT_READ, do)

    def _read_output(self, node, fd):
        data = os.read(fd, CHUNK)
        node.output += data
        if not data:
            node.is_pipe_open = False
            self._selector.unregister(fd)

    def _handle_node_exit(self, node, fd):
        node.ended_at = time.monotonic()
        self._selector.unregister(fd)
        node.status = self._fork_server.reap(node.pid)

    def _accept_rank(self, server):
        connection = self._stack.enter_context(server.accept()[0])
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read_introduction, bytearray()))

    def _read_introduction(self, introduction, connection):
        data = connection.recv(CHUNK)
        introduction += data
        if data and not data.endswith(b"\n"):
            return
        self._selector.unregister(connection)
        if not data:  # the rank ended before it had introduced itself
            return
        process = RankProcess(connection, json.loads(introduction))
        self.processes.append(process)
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            process.ended_at = time.monotonic()
        else:
            self._register(pidfd, partial(self._handle_rank_exit, process))

    def _handle_rank_exit(self, process, pidfd):
        process.ended_at = time.monotonic()
        self._selector.unregister(pidfd)

    def read_log(self, node):
        return (self._folder / f"{node.name}.log").read_text(errors="replace")

    # the end

    def close(self):
        """Assert that all nodes have ended by themselves, and that nothing is left. Kill the rest."""
        if self._is_closed:
            return
        self._is_closed = True
        running = [repr(node) for node in self.nodes if node.ended_at is None]
        left = []
        try:
            for node in self.nodes:
                node.kill()
            self.wait_until(lambda: not self._is_any_node_running(), "the end of killed nodes")
            left = self._kill_leftovers()
        finally:
            for node in self.nodes:
                print(f"--- {node!r}\n{node.log}")
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
            kill(pid)
        return left

"""Jobs of several nodes, as a test sees them: it starts nodes, sees ranks appear, orders them about, and hears what came of it.

    test ---- requests ----> nursery ---- fork ----> node: mpwatch.run(...) ---- spawn ----> rank: tasks.obeys
      ^                                                |                                      |      ^
      +-------------------- pipe: outcome -------------+                                      |      |
      +------------------- board: "I am rank 3, ..." -----------------------------------------+      |
      +------------------------------ "raise", "return" ---------------------------------------------+

Everything is waited for in one place (`Job.wait_until`), by descriptors, with a deadline. Times are of CLOCK_MONOTONIC,
which all nodes here share. When a job is closed none of its processes may be alive, and none of its files be left.
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

from . import tasks
from .networks import free_port
from .processes import MARK, kill, processes_of

__all__ = ["Job", "Life", "Node", "Outcome", "World"]

PATIENCE = 30.0  # seconds for anything that should happen at once; for it to fail, not for it to be in time
GONE_WITHIN = 1.0  # seconds after the last node has ended, for what ends by itself then
CHUNK = 65536
NODE_TIMEOUT = 2  # seconds
LAST_CALL = 1  # seconds that torch waits for more nodes than it needs
STORE_PORT = 29400  # on a host of its own


@dataclass
class Outcome:
    """What came of a node's call of `run`: see node_program.py."""

    hostname: str
    clocks: list[float]  # seconds since 1970, as Python says there, and as the engine of the rendezvous sees it
    began: float
    ended: float
    left: dict[str, str]  # what there is in the process that was not there before, by kind
    modules: list[str]
    error: str = ""  # name of its type; empty if `run` returned
    text: str = ""
    exit_code: int | None = None  # of the error
    group: dict | None = None  # what an agent says of its ranks, in the end
    cause: dict | None = None
    state: str = ""
    values: dict[int, object] = field(default_factory=dict)
    failures: dict[int, dict] = field(default_factory=dict)
    root_cause: dict | None = None
    workers: list[dict] = field(default_factory=list)
    worker_states: dict[int, str] = field(default_factory=dict)
    attempts: list[dict] = field(default_factory=list)
    restarts: int = 0
    reason: str = ""
    not_restarted: str = ""
    events: list[str] = field(default_factory=list)
    blamed: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self):
        for name in ("values", "failures", "worker_states", "blamed"):
            setattr(self, name, {int(rank): what for rank, what in getattr(self, name).items()})


class Node:
    """One of a job's."""

    def __init__(self, job, name, hostname, pid):
        self.name = name
        self.hostname = hostname
        self.pid = pid
        self.ended_at = None
        self.status = None
        self.said = b""
        self.hears_from = True
        self._job = job

    def send(self, number):
        """A signal, to the process that watches. Returns when that was."""
        at = time.monotonic()
        if self.ended_at is None:
            os.kill(self.pid, number)
        return at

    def kill(self):
        return self.send(signal.SIGKILL)

    def outcome(self, within=PATIENCE):
        """Of its call, once its process has ended. It left nothing."""
        self._job.wait_until(lambda: self.is_over, f"the end of {self.name}", within)
        assert self.said, f"{self.name} ended with status {self.status} and said nothing"
        outcome = Outcome(**json.loads(self.said))
        assert not outcome.left, f"{self.name} left {outcome.left}"
        return outcome

    def exit_status(self, within=PATIENCE):
        """Of its process, negative for a signal."""
        self._job.wait_until(lambda: self.is_over, f"the end of {self.name}", within)
        return self.status

    @property
    def is_over(self):
        return self.ended_at is not None and not self.hears_from

    def __repr__(self):
        return f"{self.name}: pid {self.pid}, " + ("at work" if self.ended_at is None else f"ended with {self.status}")


class Life:
    """One process of a rank that obeys, from its first word to its end."""

    def __init__(self, connection, said):
        self.pid = said.pop("pid")
        self.node = said.pop("node")
        self.rank = said["rank"]
        self.who = said
        self.began_at = said.pop("at")
        self.ended_at = None
        self._connection = connection

    @property
    def round(self):
        """What the ranks that were started together have in common, and with no others: the port is new each time."""
        return self.who["master_addr"], self.who["master_port"], self.who["world_size"]

    def order(self, *order):
        """Returns when it was given. Nobody hears it if the rank has just been stopped."""
        at = time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(json.dumps(order).encode() + b"\n")
        return at

    def __repr__(self):
        fate = "at work" if self.ended_at is None else "ended"
        return f"rank {self.rank} of {self.who['world_size']} on {self.node}, pid {self.pid}, {fate}"


class World(tuple):
    """The lives of all ranks that were started together, by rank."""

    __slots__ = ()

    def order(self, *order):
        """All of them. Returns when the first was told."""
        return min([life.order(*order) for life in self])

    def of(self, node):
        """Those on this node."""
        return World(life for life in self if life.node == node.name)

    @property
    def ended_at(self):
        """When the last of them had; None if they have not all."""
        times = [life.ended_at for life in self]
        return None if None in times else max(times)


class Job:
    """Nodes that form one job, or should. `network`: hosts of their own for them; else they share the loopback device."""

    def __init__(self, nursery, *, network=None, hostnames=True):
        self.nodes = []
        self.lives = []
        self.network = network
        self.terms = {"nnodes": 2, "node_timeout": NODE_TIMEOUT, "join_timeout": PATIENCE, "run_id": "job"}
        self.port = STORE_PORT if network else free_port()
        self._nursery = nursery
        self._hostnames = hostnames
        self._mark = uuid.uuid4().hex
        self._seen = set()
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._stack = ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="nodes-"))  # pytest's own names are too long for a socket
        self._stack.callback(shutil.rmtree, self._folder)
        (self._folder / "tmp").mkdir()
        self._board = self._stack.enter_context(socket.create_server(str(self._folder / "board"), family=socket.AF_UNIX))
        self._stack.callback(self._selector.close)
        self._selector.register(self._board, selectors.EVENT_READ, self._greet)

    # starting

    def start(
        self,
        function=tasks.obeys,
        nprocs=1,
        *,
        terms: Mapping | None = None,
        skew_seconds=0,
        host=None,
        beforehand=None,
        through="run",
        **options,
    ):
        """A node that calls `run` with these options. The first one serves the store, unless `terms` say otherwise.

        `terms` are those of its Rendezvous, on top of `job.terms`; False: it has none, and is alone. `host`: on which it is,
        one for each if nothing is said. `beforehand` is called in its process before `run`. `through`: instead of "run", "main";
        "agent"; or "handler": an agent with a rendezvous handler of torch's own.
        """
        host = len(self.nodes) if host is None else host
        request = {
            "do": "call",
            "function": f"{function.__module__}:{function.__name__}",
            "nprocs": nprocs,
            "rendezvous": None if terms is False else self._terms(host, terms or {}),
            "skew_seconds": skew_seconds,
            "through": through,
            "beforehand": beforehand.__name__ if beforehand else "",
            "options": {"grace_period": 5.0, **options},
        }
        return self._fork(request, host)

    def start_several(self, count, function=tasks.obeys, nprocs=1, **options):
        return [self.start(function, nprocs, **options) for _ in range(count)]

    def start_store(self):
        """A process that serves the store and is no node: those started from now on are told so."""
        host = len(self.nodes)
        self.terms |= {"endpoint": f"{self._address(host)}:{self.port}", "is_host": False}
        store = self._fork({"do": "serve_store", "endpoint": (self._address(host), self.port)}, host)
        self.wait_until(lambda: store.said or store.is_over, "the store")
        assert store.said == b"serving", store
        return store

    def _terms(self, host, terms):
        own = {"endpoint": f"{self._address(0)}:{self.port}", "local_addr": self._address(host), "is_host": host == 0}
        options = {"last_call_timeout": LAST_CALL, **terms.get("options", {})}
        return {**own, **self.terms, **terms, "options": options}

    def _address(self, host):
        return self.network.address(host) if self.network else f"127.0.0.{1 + host}"

    def _fork(self, request, host):
        name = f"node{len(self.nodes)}"
        hostname = f"host{host}" if self._hostnames else ""
        hears, tell = os.pipe()
        with open(self._folder / f"{name}.log", "wb") as log, open(tell, "wb") as tells:
            fds = [tells.fileno(), log.fileno(), *([self.network.namespace(host)] if self.network else ())]
            environment = {
                tasks.BOARD: self._board.getsockname(),
                tasks.NODE: name,
                MARK: self._mark,
                "TMPDIR": str(self._folder / "tmp"),
            }
            pid = self._nursery.fork({**request, "hostname": hostname, "environment": environment}, fds)
        node = Node(self, name, hostname or socket.gethostname(), pid)
        self.nodes.append(node)
        self._register(hears, partial(self._hear, node))
        self._register(os.pidfd_open(pid), partial(self._bury, node))
        return node

    # waiting

    def await_world(self, size, within=PATIENCE):
        """Ranks that obey, all those of one start, so many of them; not such as this has returned before."""

        def complete():
            rounds = {}
            for life in self.lives:
                if life.ended_at is None and life not in self._seen:
                    rounds.setdefault(life.round, []).append(life)
            worlds = [World(sorted(lives, key=lambda life: life.rank)) for lives in rounds.values()]
            return next((world for world in worlds if [life.rank for life in world] == list(range(size))), None)

        self.wait_until(lambda: complete() or not self._has_hope(), f"a world of {size}", within)
        world = complete()
        assert world, f"all nodes have ended\n{self._describe()}"
        assert {life.who["world_size"] for life in world} == {size}
        self._seen.update(world)
        return world

    def await_end(self, world, within=PATIENCE):
        """Of these ranks' processes. Returns when the last of them had ended."""
        self.wait_until(lambda: world.ended_at is not None, f"the end of {list(world)}", within)
        return world.ended_at

    def outcomes(self, nodes=None):
        """Of all nodes, in the order in which they were started, once they have ended."""
        return [node.outcome() for node in (self.nodes if nodes is None else nodes)]

    def wait_until(self, condition, what, within=PATIENCE):
        """Only what comes in by descriptors can make it come true."""
        deadline = time.monotonic() + within
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"waited {within:g} s for {what}\n{self._describe()}"
            self._take_in(left)

    @staticmethod
    def now():
        return time.monotonic()

    def watch_for(self, seconds):
        """See what happens in so many seconds: for what must not."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._take_in(left)

    def _take_in(self, seconds):
        for key, _ in self._selector.select(seconds):
            key.data(key.fileobj)

    def _has_hope(self):
        return any(node.ended_at is None for node in self.nodes)

    def _describe(self):
        return "\n".join(map(repr, [*self.nodes, *self.lives]))

    # what comes in

    def _register(self, fd, do):
        self._stack.callback(os.close, fd)
        self._selector.register(fd, selectors.EVENT_READ, do)

    def _hear(self, node, fd):
        data = os.read(fd, CHUNK)
        node.said += data
        if not data:
            node.hears_from = False
            self._selector.unregister(fd)

    def _bury(self, node, fd):
        node.ended_at = time.monotonic()
        self._selector.unregister(fd)
        node.status = self._nursery.reap(node.pid)

    def _greet(self, board):
        connection = self._stack.enter_context(board.accept()[0])
        self._selector.register(connection, selectors.EVENT_READ, partial(self._meet, bytearray()))

    def _meet(self, said, connection):
        data = connection.recv(CHUNK)
        said += data
        if data and not data.endswith(b"\n"):
            return
        self._selector.unregister(connection)
        if not data:  # it ended before it had said who it is
            return
        life = Life(connection, json.loads(said))
        self.lives.append(life)
        try:
            pidfd = os.pidfd_open(life.pid)
        except ProcessLookupError:
            life.ended_at = time.monotonic()
        else:
            self._register(pidfd, partial(self._lament, life))

    def _lament(self, life, pidfd):
        life.ended_at = time.monotonic()
        self._selector.unregister(pidfd)

    # the end

    def close(self):
        """Asserts that all has ended by itself, and that nothing is left; ends what has not. Once."""
        if self._is_closed:
            return
        self._is_closed = True
        at_work = [repr(node) for node in self.nodes if node.ended_at is None]
        left = []
        try:
            for node in self.nodes:
                node.kill()
            self.wait_until(lambda: not self._has_hope(), "the end of killed nodes")
            left = self._what_is_left()
        finally:
            for node in self.nodes:
                print(f"--- {node!r}\n{(self._folder / f'{node.name}.log').read_text(errors='replace')}")
            files = os.listdir(self._folder / "tmp")
            self._stack.close()
        assert not at_work, "nodes that the test had not seen end"
        assert not left, "processes that were left"
        assert not files, f"files that were left: {files}"

    def _what_is_left(self):
        deadline = time.monotonic() + GONE_WITHIN
        while (left := processes_of(self._mark)) and time.monotonic() < deadline:
            os.sched_yield()
        for pid in left:
            kill(pid)
        return left

"""Run one job on several nodes of a cluster, from one call: what the engines for Ray, Dask and SLURM have in common.

    driver, which calls `run`                                  node: a process of the engine, one for each node of the job
    -------------------------                                  -----------------------------------------------------------
    engine.start(call) ------------- the engine ------------>  run_node --> mpwatch.submit(fn, ..., rendezvous=...) --> ranks
    store of the rendezvous <------- TCP -------------------   the nodes meet there
    link <-------------------------- TCP: output, events ---
         --------------------------- TCP: stop ------------->
    future <------------------------ the engine -------------  NodeOutcome: the node's RunResult, or an error

An engine starts functions on nodes. It has three methods: see `Engine`. `ThreadEngine` is an example of it.

Guarantees:

- When `run` returns or raises, the engine has ended everything that it has started.
- If the driver is killed, each node loses its link, and stops its ranks.
- A node that the engine loses is a lost node of the job. The driver has the engine start another one in its place.

The driver serves the store, so no node is needed more than another. The nodes must be able to connect to the driver.
"""

import os
import pickle
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol, TypeVar

import mpwatch
from mpwatch.wire.pickling.pickler import pack_by_value

__all__ = ["Engine", "NodeOutcome", "ThreadEngine", "run"]

T = TypeVar("T")
STREAMS = ("stdout", "stderr")
REFUSED = {
    "rendezvous": "the engine makes it",
    "progress": "the driver has no live view of all nodes",
    "post_mortem": "the nodes have no terminal; use capture_locals=True",
    "stop_signals": "call mpwatch.request_stop() in a rank, or use stop_after",
    "forward_signals": "the nodes get no signals of the driver",
}
MAX_EARLY_LOSSES = 3  # of nodes that the engine has lost before they have connected to the driver
STOP_SECONDS = 10.0  # beyond the grace period, for all nodes to end after an interrupt or an error
CANCEL_SECONDS = 5.0  # for the engine to end what it has started


class Engine(Protocol):
    """Starts functions on nodes. The driver's thread calls the methods.

    Attributes:
        address: the driver's own address, to which the nodes connect.
    """

    address: str

    def start(self, call: "Callable[[], NodeOutcome]", number: int) -> "Future[NodeOutcome]":
        """Have `call()` executed once, in a process on a node of its own. Return at once.

        If there is no node for it now, it waits for one. If the engine loses the node or the process, the future gets an
        exception. The call can be pickled by cloudpickle.

        Args:
            call: what the node does.
            number: the number of the node, from 0. A node that takes the place of a lost one has the next number.
        """

    def cancel(self, number: int) -> None:
        """End the call of this node at once, or do not begin it. Do nothing if it has ended."""

    def close(self) -> None:
        """End all that is left, and release what the engine holds of the cluster."""


@dataclass(frozen=True)
class NodeOutcome:
    """What became of a node: its result, or the error that `mpwatch.run` has raised there. Pickled by cloudpickle.

    Classes of the driver's program come back as the same classes, since the same cloudpickle has sent them. Large arrays are
    beside the pickle, so that an engine need not copy them.
    """

    data: bytes
    buffers: list[pickle.PickleBuffer]

    @classmethod
    def pack(cls, result: "mpwatch.RunResult[Any] | Exception") -> "NodeOutcome":
        """Pickle a result or an error."""
        buffers: list[pickle.PickleBuffer] = []
        data = pack_by_value(result, buffers.append)
        return cls(data, buffers)

    def unpack(self) -> "mpwatch.RunResult[Any] | Exception":
        """Return the result or the error."""
        outcome: mpwatch.RunResult[Any] | Exception = pickle.loads(self.data, buffers=self.buffers)
        return outcome


@dataclass(frozen=True)
class NodeSpec:
    """What a node needs to know."""

    number: int
    driver: tuple[str, int]
    """The address of the driver's listener."""
    key: bytes
    """The secret of the link."""
    nprocs: Any
    call: bytes
    """The function and the options of `mpwatch.submit`, pickled by cloudpickle."""
    rendezvous: Mapping[str, Any]
    find_address: Callable[[], str] | None
    """Returns the address of the node. None: mpwatch finds it out."""
    log_options: Mapping[str, Any]


def run(
    engine: Engine,
    fn: Callable[..., T],
    nprocs: Any = "auto",
    *,
    nodes: int | tuple[int, int],
    on_event: Callable[[mpwatch.Event], object] | None = None,
    logs: mpwatch.LogSpec | None = None,
    find_address: Callable[[], str] | None = None,
    join_timeout: float = 600.0,
    node_timeout: float = 15.0,
    check: bool = True,
    **options: Any,
) -> mpwatch.RunResult[T]:
    """Run a function on the ranks of several nodes, and return the results of all ranks.

    Args:
        engine: starts the nodes. `run` closes it.
        fn: see `mpwatch.run`.
        nprocs: number of ranks of each node.
        nodes: the number of nodes, or the least and the greatest number.
        on_event: called with each event of each node, in this thread.
        logs: what ranks print, see `mpwatch.LogSpec`. Shown lines are written here. Their default prefix is the number of
            the node and the rank. `dir` is a folder on each node. None: all lines are shown.
        find_address: returns the address of a node, when it is called there. None: mpwatch finds it out.
        join_timeout: seconds that nodes wait for each other.
        node_timeout: seconds without a sign of life after which a node is lost.
        check: False: return the result of a failed job instead of raising.
        options: the other options of `mpwatch.run`, except `rendezvous`, `progress`, `post_mortem`, `stop_signals` and
            `forward_signals`.

    Raises:
        RunFailedError: a rank failed. `__cause__` is the rank's own exception, of whichever node.
        LaunchError: the nodes could not be started, or have not met in time.
        TypeError, ValueError: an option is not valid.
        KeyboardInterrupt: Ctrl-C. All ranks were stopped as by `mpwatch.run`.
    """
    with ExitStack() as stack:
        stack.enter_context(closing(engine))
        _check_options(fn, nprocs, nodes, logs=logs, on_event=on_event, **options)
        store = _serve_store(engine.address)
        key = secrets.token_bytes(16)
        driver = stack.enter_context(closing(_Driver(engine, on_event, key)))
        rendezvous = {
            "endpoint": f"{engine.address}:{store.port}",
            "run_id": f"mpwatch-{secrets.token_hex(4)}",
            "nnodes": nodes,
            "secret": key.hex(),
            "is_host": False,
            "join_timeout": join_timeout,
            "node_timeout": node_timeout,
        }
        shown = logs or mpwatch.LogSpec()
        log_options = {name: getattr(shown, name) for name in ("dir", "show", "files", "prefix")}
        call = pack_by_value((fn, options))
        spec = NodeSpec(0, driver.address, key, nprocs, call, rendezvous, find_address, log_options)
        result = driver.run(spec, nodes if isinstance(nodes, int) else nodes[1], float(options.get("grace_period", 10.0)))
    if check and result.state is not mpwatch.WorkerState.SUCCEEDED:
        timed_out = any(failure.kind is mpwatch.FailureKind.TIMEOUT for failure in result.failures.values())
        raise (mpwatch.RunTimeoutError if timed_out else mpwatch.RunFailedError)(result)
    return result


def _check_options(fn: Callable[..., Any], nprocs: Any, nodes: Any, **options: Any) -> None:
    """Check everything that can be checked without a node. Raises TypeError or ValueError."""
    for name in REFUSED.keys() & options.keys():
        raise TypeError(f"a job on a cluster has no option {name!r}: {REFUSED[name]}")
    if isinstance(nprocs, str):
        nprocs = 1  # the GPUs and CPUs of a node are counted there
    rendezvous = mpwatch.Rendezvous("driver:1", run_id="job", nnodes=nodes)
    mpwatch.WorkerSpec(fn=fn, nprocs=nprocs, rendezvous=rendezvous, **options)


def _serve_store(address: str) -> Any:
    """Return the store of the rendezvous. It lives as long as it is referenced."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs do not export it

    return TCPStore(address, 0, is_master=True, wait_for_workers=False)


# --- On a node


def run_node(spec: NodeSpec) -> NodeOutcome:
    """Run the ranks of this node, and return their results. The engine calls it on each node."""
    with Client(spec.driver, authkey=spec.key) as connection:
        link = _Link(connection)
        link.send("hello", spec.number)
        try:
            with _submit(spec, link) as handle:
                follower = threading.Thread(target=_follow_driver, args=(connection, handle), name="mpwatch link")
                follower.start()
                try:
                    return NodeOutcome.pack(handle.result())
                finally:
                    link.send("end", spec.number)
                    _shut_down(connection)
                    follower.join()
        except Exception as error:  # noqa: BLE001  the driver raises it
            link.send("end", spec.number)
            return NodeOutcome.pack(error)


def _submit(spec: NodeSpec, link: "_Link") -> "mpwatch.RunHandle[Any]":
    local_addr = None if spec.find_address is None else spec.find_address()
    rendezvous = mpwatch.Rendezvous(**spec.rendezvous, local_addr=local_addr)
    prefix = spec.log_options["prefix"] or f"[{spec.number}:{{rank}}] "
    streams: dict[str, Any] = {stream: _LinkStream(link, stream) for stream in STREAMS}
    logs = mpwatch.LogSpec(**{**spec.log_options, **streams, "prefix": prefix})
    fn, options = pickle.loads(spec.call)
    return mpwatch.submit(
        fn,
        spec.nprocs,
        rendezvous=rendezvous,
        logs=logs,
        on_event=partial(link.send, "event"),
        progress=False,
        check=False,
        **options,
    )


def _follow_driver(connection: Connection, handle: "mpwatch.RunHandle[Any]") -> None:
    """Stop the ranks when the driver wants that, or is gone."""
    with suppress(EOFError, OSError):
        while connection.recv() != "stop":
            handle.request_stop()
    handle.interrupt()


def _shut_down(connection: Connection) -> None:
    """End a connection, also for a thread that waits for it."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


class _Link:
    """The connection of a node to the driver. Any thread may send. After the loss of the driver nothing is sent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, content: object) -> None:
        with self._lock, suppress(OSError):
            self._connection.send((kind, content))


class _LinkStream:
    """A stream of a node, whose text the driver writes to its own one."""

    def __init__(self, link: _Link, stream: str) -> None:
        self._link = link
        self._stream = stream

    def write(self, text: str) -> None:
        self._link.send("output", (self._stream, text))


# --- In the driver


@dataclass
class _Node:
    """A node, as the driver sees it."""

    number: int
    future: "Future[NodeOutcome]"
    connection: Connection | None = None
    """None until the node has connected."""
    has_ended: bool = False
    """Whether it has said that its outcome follows."""
    is_link_closed: bool = False
    """Whether all that it has sent was received."""
    outcome: "mpwatch.RunResult[Any] | Exception | None" = None
    """None until it has ended."""
    is_lost: bool = False
    """Whether the engine has lost or cancelled it."""

    @property
    def has_begun(self) -> bool:
        """Whether the node has connected."""
        return self.connection is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come from this node."""
        return self.is_lost or (self.outcome is not None and (self.is_link_closed or not self.has_begun))


class _Driver:
    """The driver's part of a job.

    Args:
        engine: starts the nodes.
        on_event: called with each event of each node.
        key: the secret of the links.

    Attributes:
        address: where it listens for the nodes.
    """

    def __init__(self, engine: Engine, on_event: Callable[[mpwatch.Event], object] | None, key: bytes) -> None:
        self._engine = engine
        self._on_event = on_event
        self._messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._nodes: dict[int, _Node] = {}
        self._lost: list[BaseException] = []  # why nodes were lost before they had connected
        self._is_closed = False
        self._is_stopping = False
        self._threads: list[threading.Thread] = []
        self._connections: list[Connection] = []
        self._key = key
        self._listener = Listener((engine.address, 0), backlog=128, authkey=key)
        self.address: tuple[str, int] = self._listener.address
        self._start_thread(self._accept)

    def run(self, spec: NodeSpec, nodes: int, grace_period: float) -> mpwatch.RunResult[Any]:
        """Start so many nodes, and wait until the job is over."""
        for _ in range(nodes):
            self._start_node(spec)
        interrupt = None
        deadline = None
        while not self._is_over():
            try:
                seconds: float | None = None if deadline is None else max(0.0, deadline - time.monotonic())
                self._handle(spec, *self._messages.get(timeout=seconds))
            except queue.Empty:
                break
            except KeyboardInterrupt as error:
                if interrupt is not None:
                    raise
                interrupt, self._is_stopping = error, True
            if deadline is None and self._is_stopping:
                self._stop_nodes()
                deadline = time.monotonic() + grace_period + STOP_SECONDS
        outcomes = [node.outcome for node in self._nodes.values() if node.outcome is not None]
        if interrupt is not None:
            raise interrupt
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        results = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
        if not results:
            raise mpwatch.LaunchError("all nodes were lost before the job had ended; see the log of the cluster")
        return merge_results(results)

    def close(self) -> None:
        """End the links, and wait for the threads."""
        self._is_closed = True
        with suppress(OSError, AuthenticationError), Client(self._listener.address, authkey=self._key):
            pass  # this wakes the thread that accepts
        self._listener.close()
        for connection in self._connections:
            _shut_down(connection)
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.close()

    def _start_node(self, spec: NodeSpec) -> None:
        number = len(self._nodes)
        future = self._engine.start(partial(run_node, replace(spec, number=number)), number)
        self._nodes[number] = _Node(number, future)
        future.add_done_callback(lambda done: self._messages.put(("done", (number, done))))

    def _is_over(self) -> bool:
        """Return whether each node that has begun has ended, and at least one has."""
        nodes = [node for node in self._nodes.values() if node.has_begun or node.outcome is not None or node.is_lost]
        has_result = any(node.outcome is not None for node in nodes)
        return (has_result or self._is_stopping) and all(node.is_over for node in nodes)

    def _handle(self, spec: NodeSpec, kind: str, content: Any) -> None:
        if kind == "hello":
            number, connection = content
            self._nodes[number].connection = connection
            self._nodes[number].is_link_closed = self._nodes[number].has_ended = False
        elif kind == "end":
            self._nodes[content].has_ended = True
        elif kind == "closed":
            number, connection = content
            node = self._nodes[number]
            node.is_link_closed |= node.connection is connection
            if node.is_link_closed and not node.has_ended and not node.is_over:
                self._engine.cancel(number)  # the node is dead or cut off, and the engine may not know
        elif kind == "output":
            stream, text = content
            getattr(sys, stream).write(text)
        elif kind == "event" and self._on_event is not None:
            self._on_event(content)
        elif kind == "done":
            self._handle_end(spec, *content)

    def _handle_end(self, spec: NodeSpec, number: int, future: "Future[NodeOutcome]") -> None:
        node = self._nodes[number]
        error = None if future.cancelled() else future.exception()
        if error is None and not future.cancelled():
            node.outcome = future.result().unpack()
            self._is_stopping |= isinstance(node.outcome, Exception)
            return
        node.is_lost = True
        if not node.has_begun and error is not None:
            self._lost.append(error)
            if len(self._lost) >= MAX_EARLY_LOSSES:
                raise mpwatch.LaunchError(f"the engine could not start node {number}: {error}") from error
        if not self._is_stopping:
            self._start_node(spec)

    def _stop_nodes(self) -> None:
        for node in self._nodes.values():
            if node.connection is not None and not node.is_over:
                with suppress(OSError):
                    node.connection.send("stop")
            elif node.outcome is None:
                self._engine.cancel(node.number)
                node.is_lost = True

    def _accept(self) -> None:
        while not self._is_closed:
            with suppress(EOFError, OSError, AuthenticationError):  # somebody else has connected
                connection = self._listener.accept()
                self._connections.append(connection)
                self._start_thread(partial(self._receive, connection))

    def _receive(self, connection: Connection) -> None:
        number = None
        with suppress(EOFError, OSError):
            _, number = connection.recv()
            self._messages.put(("hello", (number, connection)))
            while True:
                self._messages.put(connection.recv())
        if number is not None:
            self._messages.put(("closed", (number, connection)))

    def _start_thread(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="mpwatch driver", daemon=True)
        thread.start()
        self._threads.append(thread)


def merge_results(results: Sequence[mpwatch.RunResult[Any]]) -> mpwatch.RunResult[Any]:
    """Return the result of all nodes together."""
    failures: dict[int, mpwatch.ProcessFailure] = {}
    for result in results:
        own = {worker.rank for worker in result.workers}
        # a failure that another node has reported has no exception
        failures |= {rank: failure for rank, failure in result.failures.items() if rank in own or rank not in failures}
    first = results[0]
    cause = next((result.root_cause for result in results if result.root_cause is not None), None)
    states = [result.state for result in results]
    order = (mpwatch.WorkerState.FAILED, mpwatch.WorkerState.STOPPED, mpwatch.WorkerState.SUCCEEDED)
    return replace(
        first,
        state=next(state for state in order if state in states),
        return_values=_merge(result.return_values for result in results),
        failures=dict(sorted(failures.items())),
        root_cause=None if cause is None else failures.get(cause.rank, cause),
        workers=tuple(sorted((worker for result in results for worker in result.workers), key=lambda worker: worker.rank)),
        worker_states=_merge(
            {w.rank: r.worker_states[w.rank] for w in r.workers if w.rank in r.worker_states} for r in results
        ),
        progress=_merge(result.progress for result in results),
        stacks=_merge(result.stacks for result in results),
        collectives=_merge(result.collectives for result in results),
        reason=next((result.reason for result in results if result.reason), ""),
        stopped_at=max((result.stopped_at for result in results if result.stopped_at is not None), default=None),
        stop_cause=next((result.stop_cause for result in results if result.stop_cause), ""),
        not_restarted=next((result.not_restarted for result in results if result.not_restarted), ""),
        attempts=max((result.attempts for result in results), key=len),
        events=tuple(sorted((event for result in results for event in result.events), key=lambda event: event.time)),
    )


def _merge(parts: Any) -> dict[int, Any]:
    return dict(sorted((item for part in parts for item in part.items()), key=lambda item: item[0]))


# --- An example of an engine


class ThreadEngine:
    """Nodes that are threads of this process: an example of an engine, for tests and for trying things out."""

    def __init__(self) -> None:
        self.address = "127.0.0.1"
        self._executor = ThreadPoolExecutor(64, thread_name_prefix="mpwatch node")
        self._futures: dict[int, Future[NodeOutcome]] = {}

    def start(self, call: Callable[[], NodeOutcome], number: int) -> Future[NodeOutcome]:
        """Call it in a thread of its own."""
        self._futures[number] = self._executor.submit(call)
        return self._futures[number]

    def cancel(self, number: int) -> None:
        """A thread cannot be ended from outside: it ends when the driver closes its link."""
        self._futures[number].cancel()

    def close(self) -> None:
        """Wait for all threads."""
        self._executor.shutdown(cancel_futures=True)

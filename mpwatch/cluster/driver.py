"""`Driver` starts the nodes of a job, replaces lost nodes, and waits until the job is over. Runs in the calling program.

    thread "mpwatch driver"    accepts the connections of nodes
    one more for each node     puts what the node sends into the queue of messages
    thread of the engine       puts the end of a node into the queue
    caller's thread            `Driver.run` handles the messages; here observers are called, and output is written

A node that has **joined** was in a round of the rendezvous, so it has started its ranks. A node that comes too late for the
job does not join. It would wait for others until `join_timeout`, so the driver stops it when the first other node has ended.

Guarantees:

- The driver waits without a deadline only in three cases: ranks of a node run, nodes wait for other nodes (`join_timeout`
  limits this), or the engine is sending the outcome of a node that has ended. A large outcome takes time.
- The job has not succeeded if the outcome of a node with ranks is missing.
"""

import logging
import math
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

import mpwatch
from mpwatch.cluster.engine import Engine, NodeOutcome
from mpwatch.cluster.node import NodeSpec, run_node, shut_down
from mpwatch.cluster.results import add_losses, make_lost_result, merge_results
from mpwatch.cluster.view import JobView
from mpwatch.events.types import CallStarted, Event, RendezvousCompleted
from mpwatch.options.spec import Observer
from mpwatch.results.failure import summarize_exception
from mpwatch.watcher.observers.deferred_log import log_now
from mpwatch.wire.exceptions.decoder import ENDS_RUN

MAX_EARLY_LOSSES = 3  # of nodes one after the other that the engine has lost before their ranks have begun
END_SECONDS = 10.0  # beyond the grace period: for all nodes to end after the first one, and after they were stopped
CLOSE_SECONDS = 5.0  # for a thread to end, which takes milliseconds
MAX_WAITING_OUTPUTS = 1000  # messages of each node that wait until this thread has written them; then the node waits


@dataclass
class _Node:
    """A node, as the driver sees it."""

    number: int
    hostname: str = ""
    connection: Connection | None = None
    """None until the node has connected."""
    has_ended: bool = False
    """Whether it has said that its outcome follows."""
    is_link_closed: bool = False
    """Whether all that it has sent was received."""
    group_rank: int | None = None
    """Its number in the latest round of the rendezvous. None: it has not joined."""
    ranks: tuple[int, ...] = ()
    """Its ranks in that round."""
    is_stopped: bool = False
    """Whether the driver has stopped it."""
    outcome: "mpwatch.RunResult[Any] | Exception | None" = None
    """None until it has ended."""
    is_lost: bool = False
    """Whether the engine has lost or cancelled it, or it has left the job."""

    @property
    def has_begun(self) -> bool:
        """Whether the node has connected."""
        return self.connection is not None

    @property
    def has_joined(self) -> bool:
        """Whether it was in a round of the rendezvous."""
        return self.group_rank is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come from this node."""
        return self.is_lost or (self.outcome is not None and (self.is_link_closed or not self.has_begun))

    @property
    def may_hang(self) -> bool:
        """Whether the node has begun, and has not ended."""
        return self.has_begun and not self.has_ended and not self.is_over

    def make_failures(self, reason: str) -> list[mpwatch.ProcessFailure]:
        """Return a failure for each rank, since this node is lost."""
        return [
            mpwatch.ProcessFailure(
                rank=rank,
                local_rank=local_rank,
                pid=None,
                hostname=self.hostname,
                group_rank=self.group_rank,
                node_ranks=tuple(self.ranks),
                kind=mpwatch.FailureKind.LOST,
                exit_code=1,
                evidence=reason,
            )
            for local_rank, rank in enumerate(self.ranks)
        ]


class Driver:
    """Starts the nodes of a job and waits for the job. `run` is called once.

    Args:
        engine: starts the nodes.
        key: the secret of the links.
        view: the live view.
        logs: where shown lines are written.
        observers: called with each event of each node.

    Raises LaunchError if it cannot listen at the engine's address.

    Attributes:
        address: where it listens for the nodes.
        interrupt: the KeyboardInterrupt that has stopped the job.
    """

    def __init__(
        self, engine: Engine, key: bytes, view: JobView, logs: mpwatch.LogSpec, observers: Sequence[Observer]
    ) -> None:
        self.interrupt: KeyboardInterrupt | None = None
        self._engine = engine
        self._key = key
        self._view = view
        self._streams: dict[str, Any] = {"stdout": logs.stdout, "stderr": logs.stderr}
        self._observers = list(observers)
        self._messages: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._nodes: dict[int, _Node] = {}
        self._early_losses = 0
        self._losses: list[mpwatch.ProcessFailure] = []  # since the nodes have met last, the first one first
        self._is_stopping = False
        self._deadline = math.inf  # when nodes that have not ended are stopped, or if they were, given up
        self._is_given_up = False
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._connections: list[Connection] = []
        self._output_slots: dict[int, threading.Semaphore] = {}
        try:
            self._listener = Listener((engine.address, 0), backlog=128)
        except OSError as error:
            text = f"the driver cannot listen at {engine.address}, which must be an address of this machine: {error}"
            raise mpwatch.LaunchError(text) from error
        self.address: tuple[str, int] = self._listener.address
        self._start_thread(self._accept)

    def run(self, spec: NodeSpec, rendezvous: mpwatch.Rendezvous, grace_period: float) -> mpwatch.RunResult[Any] | None:
        """Start the nodes, wait until the job is over, and return its result.

        After Ctrl-C it returns what is known, and `interrupt` is set. Raises the error of a node, or LaunchError.
        """
        self._spec, self._rendezvous, self._end_seconds = spec, rendezvous, grace_period + END_SECONDS
        for _ in range(rendezvous.max_nodes):
            self._start_node()
        self._deadline = time.monotonic() + rendezvous.join_timeout  # for the first node to begin
        while not self._is_over():
            try:
                self._wait()
            except KeyboardInterrupt as error:
                if self.interrupt is not None:
                    raise
                self.interrupt = error
                self._stop_nodes()
        return self._make_result()

    def close(self) -> None:
        """End the links, and wait for the threads."""
        self._closed.set()
        with suppress(OSError):
            Client(self.address).close()  # this wakes the thread that accepts
        self._threads[0].join(CLOSE_SECONDS)  # it accepts; after that there are no further connections
        self._listener.close()
        for connection in self._connections:
            shut_down(connection)
        for slots in self._output_slots.values():
            slots.release()
        for thread in self._threads[1:]:
            thread.join(CLOSE_SECONDS)
        for connection in self._connections:
            connection.close()

    def _wait(self) -> None:
        """Wait for a message or a deadline, and handle it."""
        seconds = min(self._deadline - time.monotonic(), self._view.seconds_to_next_update())
        try:
            message = self._messages.get(timeout=None if seconds == math.inf else max(0.0, seconds))
        except queue.Empty:
            if time.monotonic() >= self._deadline:
                self._handle_deadline()
        else:
            try:
                self._handle(*message)
            except KeyboardInterrupt:
                if message[0] not in ("event", "output"):
                    self._messages.put(message)  # else `run` would wait until its deadline for the end of this node
                raise
        self._view.update()

    def _is_over(self) -> bool:
        """Return whether all nodes that have begun have ended, and at least one node has begun."""
        nodes = [node for node in self._nodes.values() if node.has_begun or node.outcome is not None or node.is_lost]
        is_ending = self._is_stopping or self._has_outcome()
        return self._is_given_up or (is_ending and all(node.is_over for node in nodes))

    def _handle_deadline(self) -> None:
        if self._is_stopping:
            self._give_up()
        elif self._has_outcome() and not any(node.may_hang for node in self._nodes.values()):
            self._deadline = math.inf  # the engine brings their outcomes
        elif any(node.has_begun for node in self._nodes.values()):
            self._stop_nodes()
        else:
            limit = self._rendezvous.join_timeout
            raise mpwatch.LaunchError(f"the cluster has begun no node of the job within {limit:g} s (join_timeout)")

    def _handle(self, kind: str, number: int, content: Any) -> None:
        node = self._nodes[number]
        if kind == "hello":
            node.hostname, node.connection = content
            if self._has_outcome():
                self._stop_node(node)  # it is too late for the job
            elif not self._is_stopping:
                self._deadline = math.inf
        elif kind == "closed":
            node.is_link_closed |= node.connection is content
            if node.is_link_closed and not node.has_ended and not node.is_over:
                self._engine.cancel(number)  # the node is dead or cut off, and the engine may not know; "done" follows
        elif kind == "end":
            node.has_ended = True
        elif kind == "output":
            self._output_slots[number].release()
            self._write(*content)
        elif kind == "event":
            self._handle_event(node, content)
        elif kind == "done":
            self._handle_end(node, content)

    # --- Nodes

    def _start_node(self) -> None:
        number = len(self._nodes)
        self._output_slots[number] = threading.Semaphore(MAX_WAITING_OUTPUTS)
        future = self._engine.start(partial(run_node, replace(self._spec, number=number)), number)
        self._nodes[number] = _Node(number)
        future.add_done_callback(lambda done: self._messages.put(("done", number, done)))

    def _handle_end(self, node: _Node, future: "Future[NodeOutcome]") -> None:
        if node.is_lost:
            return
        if future.cancelled():
            why = "its connection to the driver has broken" if node.is_link_closed else "the engine has cancelled it"
            self._handle_loss(node, ConnectionError(why))
            return
        error = future.exception()
        if error is not None:
            self._handle_loss(node, error)
            return
        outcome = _unpack(future.result(), node.number)
        if isinstance(outcome, Exception):
            if isinstance(outcome, mpwatch.LaunchError) and not node.has_joined and self._count_running():
                node.outcome = outcome
                self._handle_loss(node, outcome)  # the other nodes do not need it
                return
            node.outcome = outcome
            self._stop_nodes()
            return
        if outcome.state is mpwatch.WorkerState.STOPPED and not node.is_stopped:
            self._handle_loss(node, ConnectionError(f"it has lost the driver, and left the job: {outcome.reason}"))
            return
        node.outcome = outcome
        self._expect_end()

    def _handle_loss(self, node: _Node, error: BaseException) -> None:
        """If the job goes on, make the engine start another node in the place of this node."""
        node.is_lost = True
        self._view.drop(node.number)
        self._losses += node.make_failures(_summarize(error))
        if self._is_stopping or self._has_outcome():
            return
        if node.has_joined:
            if not self._count_running():
                self._stop_nodes()  # no node is left that knows of the job
                return
        else:
            self._early_losses += 1
            if self._early_losses >= MAX_EARLY_LOSSES:
                if self._count_running() >= self._rendezvous.min_nodes:
                    return
                text = f"the engine could not start node {node.number}: {_summarize(error)}"
                raise mpwatch.LaunchError(text) from error
        self._start_node()

    def _has_outcome(self) -> bool:
        """Return whether the job is over: a node that has joined it has ended."""
        return any(node.outcome is not None and not node.is_lost for node in self._nodes.values())

    def _count_running(self) -> int:
        return sum(node.has_joined and not node.is_over for node in self._nodes.values())

    def _expect_end(self) -> None:
        """Limit how long the other nodes may take, since one has ended. Stop nodes that came too late for the job."""
        if self._is_stopping:
            return
        self._deadline = min(self._deadline, time.monotonic() + self._end_seconds)
        for node in self._nodes.values():
            if node.has_begun and not node.has_joined and not node.is_over:
                self._stop_node(node)

    def _stop_nodes(self) -> None:
        self._is_stopping = True
        self._deadline = time.monotonic() + self._end_seconds
        for node in self._nodes.values():
            self._stop_node(node)

    def _give_up(self) -> None:
        """Wait no longer for the nodes that have been stopped."""
        self._is_given_up = True
        for node in self._nodes.values():
            if node.outcome is None and not node.is_lost:
                self._losses += node.make_failures(f"it has not ended within {self._end_seconds:g} s after it was stopped")

    def _stop_node(self, node: _Node) -> None:
        if node.is_over or node.outcome is not None:
            return
        node.is_stopped = True
        if node.connection is not None:
            with suppress(OSError):
                node.connection.send("stop")
        else:
            self._engine.cancel(node.number)
            node.is_lost = True

    def _make_result(self) -> mpwatch.RunResult[Any] | None:
        """Return the result of the job. None: Ctrl-C, and no node has returned anything."""
        results, errors, late_errors = [], [], []
        for node in self._nodes.values():
            if isinstance(node.outcome, mpwatch.RunResult):
                results.append(node.outcome)
            elif isinstance(node.outcome, mpwatch.LaunchError) and not node.has_joined:
                late_errors.append(node.outcome)
            elif node.outcome is not None:
                errors.append(node.outcome)
        has_ranks = any(result.workers for result in results)
        if self.interrupt is None and (errors or not has_ranks):
            if self._losses and not errors:
                return make_lost_result(self._losses)
            for error in (*errors, *late_errors):
                raise error
        if results:
            return add_losses(merge_results(results), self._losses)
        if self.interrupt is None:
            raise mpwatch.LaunchError("no node has returned a result; see the log of the cluster")
        return None

    # --- What the nodes send

    def _handle_event(self, node: _Node, data: bytes) -> None:
        try:
            event: Event = pickle.loads(data)
        except ENDS_RUN:
            raise
        except BaseException as error:  # noqa: BLE001  classes of users
            log_now(
                logging.WARNING, "an event of node %d is dropped, since it cannot be read here", node.number, error=error
            )
            return
        if isinstance(event, RendezvousCompleted):
            node.group_rank, node.ranks = event.group_rank, event.ranks
            self._losses.clear()
        elif isinstance(event, CallStarted):
            self._early_losses = 0
        for observer in tuple(self._observers):
            try:
                observer(event)
            except ENDS_RUN:
                raise
            except BaseException as error:  # noqa: BLE001  an observer must not end the job
                self._observers.remove(observer)
                text = "the observer %r failed at the event %r; it receives no more events"
                log_now(logging.ERROR, text, observer, event.name, error=error)

    def _write(self, stream: str, text: str) -> None:
        target = self._streams[stream] or getattr(sys, stream)
        try:
            target.write(text)
            if hasattr(target, "flush"):
                target.flush()
        except ENDS_RUN:
            raise
        except BaseException as error:  # noqa: BLE001  the reader of a pipe is gone, or the stream is closed
            self._streams[stream] = _NullStream()
            log_now(logging.WARNING, "%s of the ranks is not shown any more", stream, error=error)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection = self._listener.accept()
            except OSError:  # too many open files
                self._closed.wait(0.1)
                continue
            self._connections.append(connection)
            self._start_thread(partial(self._receive, connection))

    def _receive(self, connection: Connection) -> None:
        number = None
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            _, (number, hostname) = connection.recv()
            self._messages.put(("hello", number, (hostname, connection)))
            while not self._closed.is_set():
                kind, content = connection.recv()
                if kind == "statuses":
                    self._view.put(number, content)
                    continue
                if kind == "output":
                    self._output_slots[number].acquire()
                self._messages.put((kind, number, content))
        except (EOFError, OSError, AuthenticationError):
            pass  # a program that does not know the key is no node
        finally:
            shut_down(connection)  # after any other error, too: the node must not wait for this thread
            if number is not None:
                self._messages.put(("closed", number, connection))

    def _start_thread(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="mpwatch driver", daemon=True)
        thread.start()
        self._threads.append(thread)


class _NullStream:
    def write(self, text: str) -> None:
        """Drop the text."""


def _unpack(outcome: NodeOutcome, number: int) -> mpwatch.RunResult[Any] | Exception:
    try:
        return outcome.unpack()
    except Exception as error:  # noqa: BLE001  classes of users
        return mpwatch.LaunchError(f"what node {number} has returned cannot be read here: {type(error).__name__}: {error}")


def _summarize(error: BaseException) -> str:
    """Return an engine's error in one line. Ray's RayTaskError has the exception that the node has raised."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return summarize_exception(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

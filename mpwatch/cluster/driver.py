"""`Driver` starts the nodes of a job, replaces lost nodes, and waits until the job is over.

    thread of the JobServer    puts what nodes send, and what the coordinator decides, into the queue of messages
    thread of the engine       puts the end of a node into the queue
    caller's thread            `Driver.run` handles the messages; here observers are called, and output is written

A node has **begun** when it has connected to the driver, and **joined** when it has met the other nodes: only then it starts
its ranks. As soon as one node has ended, those that have not joined are stopped.

Guarantees: without `queue_timeout` the driver waits without limit for the first node, and while no node has ended. When one
has, the others have `grace_period` + END_SECONDS to announce their outcomes; then all are stopped, and have this time once
more. An outcome that was announced is awaited without limit, as it may be large. The job succeeds only if the driver has the
outcome of every node with ranks.
"""

import logging
import math
import pickle
import queue
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mpwatch
from mpwatch.cluster.engine import Engine, NodeOutcome
from mpwatch.cluster.job_server import JobServer
from mpwatch.cluster.node import NodeSpec, run_node
from mpwatch.cluster.results import add_losses, make_lost_result, merge_results
from mpwatch.cluster.view import JobView
from mpwatch.events.logging_observer import LogEvents
from mpwatch.events.types import CallStarted, Event, Progressed, RendezvousCompleted, Restarting
from mpwatch.nodes.failure_codec import make_lost_failures
from mpwatch.nodes.messages import AttemptDecision, LostNode
from mpwatch.nodes.server import Link
from mpwatch.os_support.clock import monotonic
from mpwatch.results.failure import summarize_exception
from mpwatch.results.report import make_restart_notes
from mpwatch.watcher.log import log_now
from mpwatch.watcher.observers.event_bus import call_observers
from mpwatch.wire.exceptions.decoder import USER_ERRORS

MAX_EARLY_LOSSES = 3  # of nodes one after the other that the engine has lost before their ranks have begun
FIRST_REPORT_SECONDS = 10.0  # of what the job waits for; then after 20, 40, 80, ... seconds
END_SECONDS = 10.0  # beyond the grace period: for all nodes to end after the first one, and after they were stopped
ROOM_PERIOD = 0.5  # seconds between two questions to the engine what it waits for
ERROR_LINES = 8  # of the end of the text of an engine's error


@dataclass
class _Node:
    number: int
    hostname: str = ""
    link: Link | None = None
    """None until the node has begun."""
    has_ended: bool = False
    """Whether the node has announced its outcome."""
    is_link_closed: bool = False
    """Whether the driver has received everything that the node has sent."""
    group_rank: int | None = None
    """In the latest round of the rendezvous. None if the node has not joined."""
    ranks: tuple[int, ...] = ()
    """In the latest round."""
    is_stopped: bool = False
    outcome: "mpwatch.RunResult[Any] | Exception | None" = None
    is_lost: bool = False
    """Whether the engine has lost or cancelled the node, the node has left the job, or the driver has given it up."""

    @property
    def has_begun(self) -> bool:
        return self.link is not None

    @property
    def has_joined(self) -> bool:
        return self.group_rank is not None

    @property
    def is_over(self) -> bool:
        """Whether the node is lost, or the driver has its outcome and all its messages."""
        return self.is_lost or (self.outcome is not None and (self.is_link_closed or not self.has_begun))

    def make_failures(self, reason: str) -> list[mpwatch.ProcessFailure]:
        if self.group_rank is None:
            return []
        return make_lost_failures(LostNode(self.group_rank, self.hostname, self.ranks[0], len(self.ranks), reason))


class Driver:
    """Lives as long as the call of `run`. `interrupt` is the KeyboardInterrupt that has stopped the job."""

    def __init__(
        self,
        engine: Engine,
        server: JobServer,
        view: JobView,
        logs: mpwatch.LogSpec,
        spec: mpwatch.WorkerSpec[Any],
        *,
        queue_timeout: float | None,
    ) -> None:
        assert spec.rendezvous is not None
        self.interrupt: KeyboardInterrupt | None = None
        self._engine, self._view = engine, view
        self._messages, self._rendezvous = server.messages, spec.rendezvous
        self._streams: dict[str, Any] = {"stdout": logs.stdout, "stderr": logs.stderr}
        self._observers: list[Any] = [*spec.observers]
        self._progress_observers: list[Any] = [*spec.progress_observers]
        self._end_seconds = spec.grace_period + END_SECONDS
        self._queue_timeout = queue_timeout
        self._queued_at = 0.0  # when the present wait for a first node has begun
        self._report_at = math.inf  # when a warning says what this wait is for
        self._nodes: dict[int, _Node] = {}
        self._may_restart = spec.policy.max_restarts > 0
        self._round: RendezvousCompleted | None = None  # in which nodes have met last
        self._attempts: dict[int, mpwatch.Attempt] = {}  # that have ended; nodes that have come later do not know them
        self._counted: set[int] = set()  # the attempts that are restarts which the policy allows
        self._early_losses = 0
        self._losses: list[mpwatch.ProcessFailure] = []  # since the nodes have met last, the first one first
        self._decision: AttemptDecision | None = None  # that has ended the job, or after the loss of all nodes
        self._not_restarted = ""  # why the loss of all nodes has ended the job
        self._is_stopping = False
        self._deadline = math.inf  # when nodes that have not ended are stopped, or if they were, given up

    def run(self, node_spec: NodeSpec) -> mpwatch.RunResult[Any] | None:
        """Start the nodes, wait until the job is over, and return its result, or None after Ctrl-C if there is none.

        Raises LaunchError, and an error that a node has returned, unless Ctrl-C has stopped the job.
        """
        self._spec = node_spec
        self._begin_queue_wait()
        self._wait_for_room()
        for _ in range(self._rendezvous.max_nodes):
            self._start_node()
        while not self._is_over():
            try:
                self._wait()
            except KeyboardInterrupt as error:
                if self.interrupt is not None:
                    raise
                self.interrupt = error
                self._stop_nodes()
        return self._make_result()

    def _begin_queue_wait(self) -> None:
        """Begin to wait until the cluster starts a node, which can take days in its queue."""
        self._queued_at = monotonic()
        self._report_at = self._queued_at + FIRST_REPORT_SECONDS
        self._deadline = math.inf if self._queue_timeout is None else self._queued_at + self._queue_timeout

    def _wait_for_room(self) -> None:
        while what := self._describe_wait():
            if (left := self._deadline - monotonic()) <= 0.0:
                raise self._make_queue_error(what)
            if monotonic() >= self._report_at:
                self._report_queue(what)
            time.sleep(min(ROOM_PERIOD, left))

    def _report_queue(self, what: str) -> None:
        """Log a warning. `what` is such as "the cluster has 1 free node, but the job needs 2"."""
        waited = monotonic() - self._queued_at
        self._report_at = self._queued_at + 2 * waited
        limit = "without limit" if self._queue_timeout is None else f"for up to {self._queue_timeout:g} s"
        text = "%s. The job has waited for %.0f s, and waits %s (queue_timeout)"
        log_now(logging.WARNING, text, what, waited, limit)

    def _make_queue_error(self, what: str) -> mpwatch.LaunchError:
        return mpwatch.LaunchError(f"{what}. The job has waited for {self._queue_timeout:g} s (queue_timeout)")

    def _describe_wait(self) -> str:
        describe = getattr(self._engine, "describe_wait", None)
        return "" if describe is None else str(describe())

    def _describe_queue(self) -> str:
        new = "new " if any(node.has_begun for node in self._nodes.values()) else ""
        return self._describe_wait() or f"no {new}node of the job has connected to this program"

    def _wait(self) -> None:
        seconds = min(self._deadline, self._report_at, self._view.next_update_at) - monotonic()
        try:
            message = self._messages.get(timeout=None if seconds == math.inf else max(0.0, seconds))
        except queue.Empty:
            if monotonic() >= self._deadline:
                self._handle_deadline()
            elif monotonic() >= self._report_at:
                self._report_queue(self._describe_queue())
        else:
            self._handle(*message)
        self._view.update()

    def _is_over(self) -> bool:
        """A node that has not begun does not delay the end of the job."""
        nodes = [node for node in self._nodes.values() if node.has_begun or node.outcome is not None or node.is_lost]
        return self._is_ending() and all(node.is_over for node in nodes)

    def _handle_deadline(self) -> None:
        if self._is_stopping:
            self._give_up()
        elif self._has_outcome():
            self._deadline = math.inf
            if any(node.has_begun and not node.has_ended and not node.is_over for node in self._nodes.values()):
                self._stop_nodes()  # else the engine brings their outcomes
        elif self._losses:
            self._not_restarted = f"no new node has begun within {self._queue_timeout:g} s (queue_timeout)"
            self._stop_nodes()
        else:
            raise self._make_queue_error(self._describe_queue())

    def _handle(self, kind: str, number: int, content: Any) -> None:
        if kind == "decided":
            self._decision = content
            self._handle_lost_job()
            return
        node = self._nodes[number]
        if kind == "sent":  # a pickle, which was signed with the secret of the job
            kind, content = pickle.loads(content)
        if kind == "hello":
            node.hostname, node.link = content
            if node.is_lost:
                node.link.close()  # the engine has lost or cancelled the node, although it is alive
            elif self._has_outcome():
                self._stop_node(node)  # it is too late for the job
            elif not self._is_stopping:
                self._deadline = self._report_at = math.inf
        elif kind == "closed":
            node.is_link_closed |= node.link is content
            if node.is_link_closed and not node.has_ended and not node.is_over:
                self._engine.cancel(number)  # the node is dead or cut off, and the engine may not know; "done" follows
        elif kind == "end":
            node.has_ended = True
        elif kind == "statuses":
            if not node.is_lost:
                self._view.put(number, content)
        elif kind == "output":
            self._write(*content)
        elif kind == "event":
            self._handle_event(node, content)
        elif kind == "done":
            self._handle_end(node, content)

    # --- Nodes

    def _start_node(self) -> None:
        number = len(self._nodes)
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
                self._handle_loss(node, outcome)  # the other nodes do not need it
                return
            node.outcome = outcome
            self._stop_nodes()
            return
        if outcome.state is mpwatch.WorkerState.STOPPED and not node.is_stopped and not outcome.stop_cause:
            self._handle_loss(node, ConnectionError(f"it has lost the driver, and left the job: {outcome.reason}"))
            return
        node.outcome = outcome
        if self._is_stopping:
            return
        self._deadline = min(self._deadline, monotonic() + self._end_seconds)  # for the other nodes
        for other in self._nodes.values():
            if other.has_begun and not other.has_joined:
                self._stop_node(other)

    def _handle_loss(self, node: _Node, error: BaseException) -> None:
        """If the job goes on, make the engine start a new node in the place of the lost one."""
        node.is_lost = True
        if node.link is not None:
            node.link.close()  # this ends a node that the engine has lost although it is alive
        self._view.drop(node.number)
        self._losses += node.make_failures(_summarize(error))
        if self._is_ending():
            return
        if node.has_joined:
            self._early_losses = 0
            self._handle_lost_job()
        else:
            self._early_losses += 1
            if self._early_losses >= MAX_EARLY_LOSSES:
                if self._count_running() >= self._rendezvous.min_nodes:
                    return
                text = f"the engine could not start node {node.number}: {_summarize(error, ERROR_LINES)}"
                node.outcome = mpwatch.LaunchError(text)
                if self._losses and not self._count_running():
                    self._stop_nodes()
                    return
                raise node.outcome from error
        if self._is_ending():
            return
        self._start_node()
        if self._report_at == math.inf and not any(other.has_begun and not other.is_over for other in self._nodes.values()):
            self._begin_queue_wait()

    def _handle_lost_job(self) -> None:
        """When all nodes are lost and the coordinator has decided, end the job or go on with others."""
        decision = self._decision
        if decision is None or not self._losses or self._count_running() or self._is_ending():
            return
        assert self._round is not None
        event = Restarting(
            time=time.time(),
            monotonic=monotonic(),
            run_id=self._rendezvous.run_id,
            ranks=tuple(range(self._round.world_size)),
            attempt=decision.attempt,
            cause=self._losses[0],
            delay=0.0,
            restarts_left=decision.restarts_left,
            is_counted=decision.is_restart_counted,
        )
        self._end_attempt(event, self._losses)
        if decision.ends_job:
            reason = decision.no_restart_reason or "the ranks had ended before that"
            self._not_restarted = reason if self._may_restart else ""
            self._stop_nodes()
            return
        self._decision = None
        call_observers([LogEvents()], event)
        call_observers(self._observers, event)

    def _end_attempt(self, end: Restarting, failures: Iterable[mpwatch.ProcessFailure]) -> None:
        """Every node publishes its end. A node that was dismissed may do so late."""
        if end.is_counted:
            self._counted.add(end.attempt + 1)
        start = self._round
        if start is not None and start.attempt == end.attempt:
            self._attempts[start.attempt] = mpwatch.Attempt(
                number=start.attempt,
                ranks=tuple(range(start.world_size)),
                started_at=start.time,
                elapsed=max(0.0, end.time - start.time),
                state=mpwatch.WorkerState.STOPPED if end.cause is None else mpwatch.WorkerState.FAILED,
                failures={failure.rank: failure for failure in failures},
                root_cause=end.cause,
                reason=end.reason,
                is_counted=start.attempt in self._counted,
            )

    def _is_ending(self) -> bool:
        return self._is_stopping or self._has_outcome()

    def _has_outcome(self) -> bool:
        return any(node.outcome is not None and not node.is_lost for node in self._nodes.values())

    def _count_running(self) -> int:
        return sum(node.has_joined and not node.is_over for node in self._nodes.values())

    def _stop_nodes(self) -> None:
        self._is_stopping = True
        self._deadline, self._report_at = monotonic() + self._end_seconds, math.inf
        for node in self._nodes.values():
            self._stop_node(node)

    def _give_up(self) -> None:
        for node in self._nodes.values():
            if node.outcome is None and not node.is_lost:
                self._losses += node.make_failures(f"it has not ended within {self._end_seconds:g} s after it was stopped")
            node.is_lost = True

    def _stop_node(self, node: _Node) -> None:
        if node.is_over or node.outcome is not None:
            return
        node.is_stopped = True
        if node.link is not None:
            node.link.send(b"stop")
        else:
            self._engine.cancel(node.number)
            node.is_lost = True

    def _make_result(self) -> mpwatch.RunResult[Any] | None:
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
                reason = f"the new nodes could not begin: {late_errors[0]}" if late_errors else self._not_restarted
                attempts = tuple(self._attempts.values())
                return replace(make_lost_result(self._losses), attempts=attempts, notes=make_restart_notes(reason, attempts))
            for error in (*errors, *late_errors):
                raise error
        if results:
            result = merge_results(results)
            known = {**self._attempts, **{attempt.number: attempt for attempt in result.attempts}}
            result = replace(result, attempts=tuple(known[number] for number in sorted(known)))
            return add_losses(result, self._losses)
        if self.interrupt is None:
            raise mpwatch.LaunchError("no node has returned a result; see the log of the cluster")
        return None

    # --- What the nodes send

    def _handle_event(self, node: _Node, data: bytes) -> None:
        try:
            event: Event = pickle.loads(data)
        except USER_ERRORS as error:  # classes of users
            log_now(
                logging.WARNING, "an event of node %d is dropped, since it cannot be read here", node.number, error=error
            )
            return
        if isinstance(event, RendezvousCompleted):
            node.group_rank, node.ranks, self._round = event.group_rank, event.ranks, event
            self._losses.clear()
            if self._decision is not None and self._decision.attempt < event.attempt:
                self._decision = None
        elif isinstance(event, CallStarted):
            self._early_losses = 0
        elif isinstance(event, Restarting):
            self._end_attempt(event, [] if event.cause is None else [event.cause])
        call_observers(self._progress_observers if isinstance(event, Progressed) else self._observers, event)

    def _write(self, stream: str, text: str) -> None:
        if stream not in self._streams:
            return
        target = self._streams[stream] or getattr(sys, stream)
        try:
            target.write(text)
            if hasattr(target, "flush"):
                target.flush()
        except USER_ERRORS as error:  # the reader of a pipe is gone, or the stream is closed
            del self._streams[stream]
            log_now(logging.WARNING, "%s of the ranks is not shown any more", stream, error=error)


def _unpack(outcome: NodeOutcome, number: int) -> mpwatch.RunResult[Any] | Exception:
    try:
        return outcome.unpack()
    except Exception as error:  # noqa: BLE001  classes of users
        return mpwatch.LaunchError(f"what node {number} has returned cannot be read here: {type(error).__name__}: {error}")


def _summarize(error: BaseException, more_lines: int = 0) -> str:
    """Return the first line of an engine's error, and some of the last ones. Ray reports an exception of a task as another
    one with the attribute `cause`; other errors of Ray end with the reason.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return summarize_exception(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return "\n".join(lines[:1] + lines[max(1, len(lines) - more_lines) :])

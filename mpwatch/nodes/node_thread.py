"""The node thread: it connects to the coordinator, and exchanges messages with it until the job is over.

    caller's thread  --- start_ranks, report_attempt, finish_within, ... ------------> |          |
                     <-- take_updates: StartAttempt, StopAttempt, AttemptDecision ---- |NodeThread| <--- TCP ---> Server
    watcher thread   --- on_outcome_change: a failure, a signal, no rank is left ----> |          |      (on one node,
                     <-- start, stop, hold, renew the lease -------------------------- |          |      or in the driver)

On the node of the endpoint it also runs the server, and then waits until the other nodes know the end of the job.

Guarantee: when `close` has returned, the threads have ended, and the sockets and the port are released.
"""

import asyncio
import math
import platform
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from mpwatch.errors import LaunchError
from mpwatch.nodes.address import is_loopback
from mpwatch.nodes.coordinator import Coordinator
from mpwatch.nodes.frames import Loop, close_all
from mpwatch.nodes.job_verdict import make_records
from mpwatch.nodes.joining import Joining, NodeConnection
from mpwatch.nodes.messages import (
    NO_ATTEMPT,
    AttemptDecision,
    AttemptReport,
    Beat,
    HoldSteps,
    Joined,
    MessageToCoordinator,
    MessageToNode,
    NextStep,
    NodeInfo,
    RanksStalled,
    RanksStopped,
    Refused,
    StartAttempt,
    StepsHeld,
    StopAtStep,
    StopAttempt,
    encode_message,
)
from mpwatch.nodes.node_machine import NodeAction, NodeMachine, NodeStage, Rejoin, StartRanks
from mpwatch.nodes.server import Server
from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.processes import wait_for_thread_exit
from mpwatch.os_support.signals import name_signal
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.version import __version__
from mpwatch.watcher.machine.call_machine import CallMachine
from mpwatch.watcher.machine.transitions import (
    NO_LEASE,
    CallStage,
    InterruptCause,
    Lease,
    StopReason,
    StopRequested,
)
from mpwatch.watcher.processes.rank_environment import RankSetup
from mpwatch.watcher.watcher import Watcher
from mpwatch.wire.resource_errors import with_remedy

NodeUpdate = StartAttempt | StopAttempt | AttemptDecision | BaseException
INTERRUPT_REASONS = {
    InterruptCause.STOP: "its program called terminate()",
    InterruptCause.PROGRAM_END: "its program ended",
    InterruptCause.STOP_REQUEST: "a stop was requested there before its ranks were started",
}
BEATS_PER_TIMEOUT = 8
# If a node is cut off, its ranks get SIGTERM and then SIGKILL after these fractions of node_timeout.
STOP_SHARE, KILL_SHARE = 0.65, 0.85
# When the ranks of this node have ended, the other nodes can see for the grace period and this time that this node leaves.
LEAVE_SECONDS = 2.0


def make_coordinator(spec: WorkerSpec[Any], *, has_own_node: bool) -> Coordinator:
    """Make the coordinator of a job. The node in whose program it runs decides what the others must have."""
    assert spec.rendezvous is not None
    required = (platform.node(), list_job_options(spec)) if has_own_node else None
    return Coordinator(spec.rendezvous, spec.policy, stall_after=spec.torch_backend.stall_after, required=required)


def list_job_options(spec: WorkerSpec[Any]) -> dict[str, str]:
    """Return those that must be the same on all nodes of a job."""
    rendezvous = spec.rendezvous
    assert rendezvous is not None
    least, most = rendezvous.min_nodes, rendezvous.max_nodes
    options = {
        "the function": spec.fn_name,
        "nnodes": f"{least} to {most}" if least < most else least,
        "max_restarts": spec.policy.max_restarts,
        "backend": spec.torch_backend.name,
        "timeout": spec.timeout,
        "stall_after": spec.torch_backend.stall_after,
        "node_timeout": f"{rendezvous.node_timeout:g}",
        "the version of mpwatch": __version__,
        "the version of torch": version("torch"),
    }
    return {name: str(value) for name, value in options.items()}


class NodeThread:
    """The thread of one run. `run_deadline` is when the run's `timeout` is over, by CLOCK_MONOTONIC."""

    def __init__(self, spec: WorkerSpec[Any], run_deadline: float = math.inf) -> None:
        assert spec.rendezvous is not None
        self._spec, self._rendezvous, self._run_deadline = spec, spec.rendezvous, run_deadline
        self._watcher: Watcher
        self._start_ranks: Callable[[list[RankSetup]], object]
        self._loop = Loop()
        self._loop.set_exception_handler(self._handle_bug)
        self._joining = Joining(spec.rendezvous, self._make_connection, self._make_server)
        self._machine = NodeMachine()
        self._connection: NodeConnection | None = None
        self._updates: deque[NodeUpdate] = deque()
        self._beat_seconds = self._rendezvous.node_timeout / BEATS_PER_TIMEOUT
        self._heard_at = self._beat_at = 0.0
        # Whether this node joins again, when it is known, or what has failed.
        self._turn: asyncio.Future[bool | Exception] = self._loop.create_future()
        self._is_connecting = self._is_leaving = self._is_acknowledged = False
        self._thread = threading.Thread(target=self._run, name="mpwatch-node")

    # ---- called in the caller's thread

    def start(self, watcher: Watcher, start_ranks: Callable[[list[RankSetup]], object]) -> None:
        """Start the thread. `start_ranks` makes the watcher start ranks and call them. Raises LaunchError."""
        self._watcher, self._start_ranks = watcher, start_ranks
        try:
            self._thread.start()
        except RuntimeError as error:  # Python is shutting down, or the limit of threads is reached
            raise LaunchError(with_remedy("the thread that joins the other nodes cannot be started", error)) from error

    def take_updates(self) -> list[NodeUpdate]:
        return [self._updates.popleft() for _ in range(len(self._updates))]

    def start_ranks(self, attempt: int, setups: list[RankSetup]) -> None:
        """Start the ranks, unless the attempt was stopped meanwhile."""
        self._post(lambda: self._machine.start_ranks(attempt, setups))

    def report_attempt(self, report: AttemptReport) -> None:
        self._post(lambda: self._machine.report_attempt(report))

    def acknowledge_shutdown(self) -> None:
        """The caller knows the result of the job, so the other nodes need not wait for this node."""
        self._is_acknowledged = True
        self._post(self._machine.acknowledge_shutdown)

    def abort(self, report: AttemptReport) -> None:
        self._post(lambda: self._machine.abort(report))

    def finish_within(self, seconds: float) -> None:
        """End as soon as no other node needs this one, at the latest after `seconds`."""
        self._call(lambda: self._leave(seconds))

    def close(self) -> None:
        """Leave the job, and wait for the end of the thread. If an exception comes meanwhile, leave at once."""
        if not self._is_acknowledged:
            self.finish_within(self._spec.grace_period + LEAVE_SECONDS)
        try:
            self._join_thread()
        except BaseException:
            self.finish_within(0.0)
            self._join_thread()
            raise

    def release(self) -> None:
        """Release what the constructor has opened, after `close` and when the watcher has ended."""
        if self._thread.native_id is None:  # else the thread itself closes it, maybe later after several Ctrl-C
            self._loop.close()

    def _join_thread(self) -> None:
        if self._thread.native_id is not None:
            self._thread.join()
            wait_for_thread_exit(self._thread.native_id)

    # ---- called in the watcher thread

    def on_outcome_change(self, machine: CallMachine) -> None:
        """A signal came, the attempt failed or timed out, or all ranks have exited. `machine` is that of the call."""
        if machine.signum is not None:
            reason = INTERRUPT_REASONS.get(machine.interrupt_cause) or f"it received {name_signal(machine.signum)}"
            self._post(lambda: self._machine.report_signal(reason))
        elif machine.stop_reason in (StopReason.FAILED, StopReason.TIMED_OUT):
            self._post(self._machine.report_failing)
        if machine.stage is CallStage.FINISHED and machine.signum is None:
            self._post(lambda: [RanksStopped(self._machine.attempt)])

    def on_stall(self, answers: Mapping[int, RankCollectives], returned: Sequence[int]) -> None:
        """See CollectiveMonitor."""
        records = make_records(answers, returned, {})
        self._post(lambda: [RanksStalled(self._machine.attempt, records)])

    def on_stop(self, cause: str) -> bool:
        """A stop was requested on this node. Return False if it takes part in no attempt; then it joins no further one."""
        is_in_attempt = not self._machine.is_joining
        self._post(lambda: self._machine.request_stop(cause))
        return is_in_attempt

    def on_steps_held(self, step: int | None) -> None:
        """All ranks of this node wait before their next step. This is the highest one that has passed."""
        self._post(lambda: [StepsHeld(self._machine.attempt, step)])

    def _post(self, request: Callable[[], list[NodeAction]]) -> None:
        self._call(lambda: self._execute(request()))

    def _call(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed, if a second exception has interrupted the end of the run
            self._loop.call_soon_threadsafe(function)

    # ---- the thread

    def _run(self) -> None:
        with closing(self._loop):
            self._task = self._loop.create_task(self._take_part())
            try:
                self._run_task()
            finally:
                self._loop.run_until_complete(self._close_sockets())

    def _run_task(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass  # `finish_within` was called
        except LaunchError as error:
            reason = str(error)
            if monotonic() >= self._run_deadline:
                reason = f"`timeout` ({self._spec.timeout:g} s) ran out before the nodes had joined: {error}"
            self._notify_caller(AttemptDecision(NO_ATTEMPT, NextStep.FAILED, reason=reason))
        except BaseException as error:  # noqa: BLE001  a bug in mpwatch: the caller's thread raises it
            self._notify_caller(error)

    def _notify_caller(self, update: NodeUpdate) -> None:
        self._updates.append(update)
        self._watcher.outbox.wake()

    async def _take_part(self) -> None:
        is_joining = True
        while is_joining:
            until = min(monotonic() + self._rendezvous.join_timeout, self._run_deadline)
            self._is_connecting = True
            await self._joining.run(until)
            self._is_connecting = False
            outcome = await self._turn
            if isinstance(outcome, Exception):
                raise outcome
            is_joining = outcome
            self._turn = self._loop.create_future()
        self._watcher.post(self._watcher.loop.renew_lease, NO_LEASE)  # the ranks have their whole grace period
        if self._connection is not None:
            self._connection.transport.write_eof()
        if self._joining.server is not None and not self._may_leave():
            await self._joining.server.finished

    async def _close_sockets(self) -> None:
        connection, self._connection = self._connection, None
        await close_all([] if connection is None else [connection])
        if self._joining.server is not None:
            await self._joining.server.close()

    def _end_turn(self, outcome: bool | Exception) -> None:
        if not self._turn.done():
            self._turn.set_result(outcome)

    def _leave(self, seconds: float) -> None:
        self._is_leaving = True
        self._loop.call_later(seconds, self._task.cancel)
        if self._is_connecting:
            self._task.cancel()
        self._execute([])

    def _may_leave(self) -> bool:
        return self._is_leaving and (self._joining.server is None or self._machine.is_joining)

    def _handle_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback of the event loop has raised. An OSError is that of an accept: there is no descriptor left."""
        error = context.get("exception")
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self._end_turn(error)
        loop.default_exception_handler(context)

    # ---- the connection

    def _make_connection(self) -> NodeConnection:
        return NodeConnection(self._rendezvous.key, self._make_info, self._handle, self._lose)

    def _make_info(self, own_address: str) -> NodeInfo:
        assert isinstance(self._spec.nprocs, int)
        is_host = self._joining.server is not None
        left = self._run_deadline - monotonic()
        return NodeInfo(
            run_id=self._rendezvous.run_id,
            hostname=platform.node(),
            address=self._rendezvous.local_addr or (self._joining.endpoint.host if is_host else own_address),
            port=self._watcher.reserve_port(),
            nprocs=self._spec.nprocs,
            role=self._spec.role,
            rank=self._rendezvous.rank,
            is_host=is_host,
            grace_period=float(self._spec.grace_period),
            join_timeout=float(self._rendezvous.join_timeout),
            seconds_left=None if left == math.inf else max(0.0, left),
            options=list_job_options(self._spec),
        )

    def _accept(self, connection: NodeConnection) -> None:
        self._connection = connection
        self._heard_at = self._beat_at = monotonic()
        self._send_beat(connection)

    def _lose(self, connection: NodeConnection) -> None:
        if connection is self._connection:
            self._connection = None
            reason = (
                f"the coordinator at {self._joining.endpoint} cannot be reached any more ({connection.end}): the node that"
                " runs it has ended, or the network to it is cut"
            )
            self._execute(self._machine.lose_coordinator(reason))

    def _handle(self, connection: NodeConnection, message: MessageToNode) -> None:
        if connection is not self._connection:
            if isinstance(message, Joined):
                self._accept(connection)
            return
        self._heard_at = monotonic()
        if isinstance(message, Beat):
            self._renew_lease(message.sent_at)
        elif isinstance(message, Joined):
            self._log_wait(message)
        elif isinstance(message, Refused):
            self._drop_connection()
            self._end_turn(LaunchError(self._joining.describe(message.reason)))
        else:
            self._execute(self._machine.handle(message))

    def _log_wait(self, joined: Joined) -> None:
        seconds = min(self._rendezvous.join_timeout, self._run_deadline - monotonic())
        text = "%d of %d nodes have joined at %s; waiting up to %.0f s for more"
        self._watcher.outbox.warn(text, joined.present, joined.needed, self._joining.endpoint, seconds)

    def _send_beat(self, connection: NodeConnection) -> None:
        if connection is not self._connection:
            return
        now = monotonic()
        if now > self._beat_at + 2 * self._beat_seconds + 1.0:  # this program was suspended
            self._heard_at = now
        self._beat_at = now
        if now > self._heard_at + self._rendezvous.node_timeout:
            connection.abort("it sends no sign of life")
            return
        connection.send(encode_message(Beat(now)))
        self._loop.call_later(self._beat_seconds, self._send_beat, connection)

    def _renew_lease(self, sent_at: float) -> None:
        """Let the ranks run for a while, since the coordinator has answered a Beat of this node."""
        timeout = self._rendezvous.node_timeout
        lease = Lease(sent_at + STOP_SHARE * timeout, sent_at + KILL_SHARE * timeout)
        self._watcher.post(self._watcher.loop.renew_lease, lease)

    def _execute(self, actions: list[NodeAction]) -> None:
        post, loop = self._watcher.post, self._watcher.loop
        for action in actions:
            if isinstance(action, MessageToCoordinator):
                self._send(action)
            elif isinstance(action, StartRanks):
                self._start_ranks(action.setups)
            elif isinstance(action, HoldSteps):  # the watcher thread calls `on_steps_held` when they hold
                post(loop.request_stop, StopRequested(action.cause, is_from_job=True))
            elif isinstance(action, StopAtStep):
                post(loop.agree_on_step, action.after_step, action.cause)
            elif isinstance(action, Rejoin):
                self._drop_connection()
                self._end_turn(True)
            else:
                if isinstance(action, StopAttempt):
                    post(loop.end_calls, StopReason.CANCELLED_BY_JOB)  # the caller's thread logs why
                self._notify_caller(action)
        if self._machine.stage is NodeStage.FINISHED or self._may_leave():
            self._end_turn(False)

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.close()

    def _send(self, message: MessageToCoordinator) -> None:
        if isinstance(message, AttemptReport):
            message = replace(message, port=self._watcher.reserve_port())
        if self._connection is not None:
            self._connection.send(encode_message(message))

    def _make_server(self, listener: socket.socket) -> Server:
        host, port = listener.getsockname()[:2]
        if not is_loopback(host) and not self._rendezvous.key:
            self._watcher.outbox.warn(
                "rendezvous at %s: there is no secret, so whoever can reach port %d can take part in the job, and lead its"
                " ranks anywhere; set MPWATCH_SECRET to the same text on all nodes",
                self._joining.endpoint,
                port,
            )
        coordinator = make_coordinator(self._spec, has_own_node=True)
        return Server(coordinator, self._rendezvous, partial(self._watcher.outbox.warn, "%s"))

"""The node thread joins the other nodes for each round of the job, and exchanges messages with them during the round.

    caller's thread  --- set_rank_setups, report_attempt, finish_within, ... --------> |          | ---> rendezvous/: join
                     <-- updates: PrepareRanks, StopRanks, ReportAttempt, ReportJob -- |NodeThread| ---> RoundRunner:
    watcher thread   --- on_outcome_change: a failure, a signal, no rank is left ----> |          |      NodeMachine, and
                     <-- commands: start, stop, renew the lease ---------------------- |          |      Leader on one node

Other threads put requests for the node thread into a queue. If a request comes during a rendezvous, the node thread executes
the request when the round begins.

A call that cannot be interrupted, such as name resolution, runs on another thread. If the call takes too long, the
node thread stops waiting for the call (rendezvous/cancellable_wait.py).

Guarantee: when `NodeThread.close` has returned, the node thread has ended, and its sockets and its port are released.
"""

import math
import platform
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from mpwatch.errors import LaunchError
from mpwatch.multinode.job_config_check import JobConfigCheck
from mpwatch.multinode.job_decision import describe_stop
from mpwatch.multinode.job_verdict import make_records
from mpwatch.multinode.leader import Leader
from mpwatch.multinode.local_ranks import LocalRanks, NodeUpdate
from mpwatch.multinode.node_machine import NodeAction, NodeMachine, Rejoin, ReportJob
from mpwatch.multinode.protocol.job_config import make_job_config
from mpwatch.multinode.protocol.json_codec import MAX_INTEGER
from mpwatch.multinode.protocol.messages import (
    NO_ATTEMPT,
    AttemptDecision,
    AttemptReport,
    NextStep,
    NodeInfo,
    RestartHistory,
    StartAttempt,
)
from mpwatch.multinode.protocol.signed_json import SignedJson
from mpwatch.multinode.protocol.store_channel import StoreChannel
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.errors import CancelledError, JobClosedError, StoreLostError
from mpwatch.multinode.rendezvous.rounds import Round, WaitReport
from mpwatch.multinode.round_runner import RoundRunner
from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.processes import wait_for_thread_exit
from mpwatch.os_support.signals import name_signal
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.machine.call_machine import CallMachine
from mpwatch.watcher.machine.transitions import CallStage, InterruptCause, StopReason
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.processes.rank_environment import RankSetup
from mpwatch.watcher.watcher import Watcher
from mpwatch.wire.resource_errors import with_remedy

INTERRUPT_REASONS = {
    InterruptCause.STOP: "its program called terminate()",
    InterruptCause.PROGRAM_END: "its program ended",
    InterruptCause.STOP_REQUEST: "a stop was requested there before its ranks were started",
}
# When the ranks of this node have ended, the other nodes can see for the grace period and this time that this node leaves.
LEAVE_SECONDS = 2.0
# An earlier job with the same name may just be ending. So a new node tries again to connect, for this time with these
# pauses.
RECONNECT_SECONDS, RECONNECT_PAUSE = 10.0, 0.2
FIRST_WAIT_SECONDS, REJOIN_WAIT_SECONDS = 10.0, 3.0  # after which a node logs that it waits for others
REJOIN_LAST_CALL_SECONDS = 2.0  # how long remaining nodes wait for more nodes, if not all expected nodes join at once


class NodeThread:
    """The thread that exchanges messages with the other nodes during one run.

    Args:
        spec: the options of the run.
        run_deadline: the time at which the run's `timeout` is over, in seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, spec: WorkerSpec[Any], run_deadline: float = math.inf) -> None:
        assert spec.rendezvous is not None
        self._spec, self._rendezvous, self._run_deadline = spec, spec.rendezvous, run_deadline
        self._client = RendezvousClient(spec.rendezvous)
        self._local_ranks: LocalRanks
        self._deferred_log: DeferredLog
        self._signed_json = SignedJson(spec.rendezvous.key, spec.rendezvous.run_id)
        self._requests: deque[Callable[[RoundRunner], None]] = deque()
        self._wakeup = threading.Event()
        self._is_acknowledged = False
        self._stop_cause = ""  # the cause of the last request to stop on this node. It is empty if there was none
        self._is_in_round = False
        self._is_leaving = threading.Event()
        self._job_config = make_job_config(spec)
        self._job_config_check = JobConfigCheck(spec.rendezvous, self._job_config, self._signed_json, self._is_leaving)
        self._thread = threading.Thread(target=self._run, name="mpwatch-node")

    # The methods from here to `close` are called in the caller's thread.

    def start(self, watcher: Watcher, start_ranks: Callable[[list[RankSetup]], object]) -> None:
        """Start the node thread, which joins the other nodes. Raises LaunchError.

        `start_ranks` makes the watcher start ranks and call them.
        """
        self._local_ranks = LocalRanks(watcher, start_ranks, self._rendezvous.node_timeout)
        self._deferred_log = watcher.deferred_log
        try:
            self._thread.start()
        except RuntimeError as error:  # Python is shutting down, or the limit of threads is reached
            raise LaunchError(with_remedy("the thread that joins the other nodes cannot be started", error)) from error

    def take_updates(self) -> list[NodeUpdate]:
        """Return the updates of the node thread, such as a ReportJob, that the caller's thread has not received yet."""
        return self._local_ranks.take_updates()

    def set_rank_setups(self, start: StartAttempt, setups: list[RankSetup]) -> None:
        """Give the node thread the RankSetups of this attempt, which contain the environment variables of the ranks."""
        self._post(lambda _: self._local_ranks.set_rank_setups(start, setups))

    def report_attempt(self, report: AttemptReport) -> None:
        """Report to the leader how the attempt has ended on this node.

        Call this method when all ranks of this node have exited.
        """
        self._post_to_machine(lambda machine: machine.report_attempt(report))

    def acknowledge_shutdown(self) -> None:
        """Report to the leader that this node knows the result of the job.

        After a call of `acknowledge_shutdown`, the other nodes do not wait for this node.
        """
        self._is_acknowledged = True
        self._post_to_machine(lambda machine: machine.acknowledge_shutdown())

    def abort(self, report: AttemptReport) -> None:
        """Report to the leader that the run on this node has ended because of an error in the watcher."""
        self._post_to_machine(lambda machine: machine.abort(report))

    def finish_within(self, seconds: float) -> None:
        """End the node thread as soon as no other node needs this node, but at the latest after `seconds`.

        Cancel a rendezvous that is in progress.
        """
        self._is_leaving.set()
        self._client.cancel()
        self._post(lambda round_runner: round_runner.stop_waiting_after(seconds))

    def close(self) -> None:
        """Leave the job, and wait until the node thread has ended.

        If an exception such as KeyboardInterrupt interrupts `close`, leave the job at once and raise the exception.
        """
        if not self._is_acknowledged:
            self.finish_within(self._spec.grace_period + LEAVE_SECONDS)
        try:
            self._join_thread()
        except BaseException:
            self.finish_within(0.0)
            self._join_thread()
            raise

    def _join_thread(self) -> None:
        if self._thread.native_id is not None:
            self._thread.join()
            wait_for_thread_exit(self._thread.native_id)

    # The next four methods are called in the watcher thread.

    def on_outcome_change(self, machine: CallMachine) -> None:
        """Report to the leader that a signal came, that the attempt failed or timed out, or that all ranks have exited.

        `machine` belongs to the present call of this node's ranks. It is not the NodeMachine.
        """
        if machine.signum is not None:
            reason = INTERRUPT_REASONS.get(machine.interrupt_cause) or f"it received {name_signal(machine.signum)}"
            self._post_to_machine(lambda node_machine: node_machine.report_signal(reason))
        elif machine.stop_reason in (StopReason.FAILED, StopReason.TIMED_OUT):
            self._post_to_machine(lambda node_machine: node_machine.report_failing())
        if machine.stage is CallStage.FINISHED and machine.signum is None:
            self._post_to_machine(lambda node_machine: node_machine.report_ranks_stopped())

    def on_stall(self, answers: Mapping[int, RankCollectives], returned: Sequence[int]) -> None:
        """Report stalled ranks to the leader, with the latest collectives of all ranks of this node.

        If no rank is stalled any more, `answers` is empty. See CollectiveMonitor.
        """
        records = make_records(answers, returned, {})
        self._post_to_machine(lambda node_machine: node_machine.report_stall(records))

    def on_stop(self, cause: str) -> bool:
        """Report to the leader that a stop was requested on this node.

        During a rendezvous there is no leader, so `on_stop` reports nothing and returns False. After a stop was requested,
        this node joins no further round. If the leader is lost before it has read the request to stop, the other nodes
        continue the job without this node.
        """
        self._stop_cause = cause
        if self._is_in_round:
            self._post_to_machine(lambda node_machine: node_machine.request_stop(cause))
        return self._is_in_round

    def on_steps_held(self, step: int | None) -> None:
        """Report to the leader the highest step that a rank of this node has passed.

        Call this method when all ranks of this node wait before their next step.
        """
        step = None if step is None else max(-MAX_INTEGER, min(step, MAX_INTEGER))
        self._post_to_machine(lambda node_machine: node_machine.report_steps_held(step))

    # The next two methods are called in any thread.

    def _post_to_machine(self, event: Callable[[NodeMachine], list[NodeAction]]) -> None:
        """Make the node thread call `event(node_machine)` and execute the returned actions."""
        self._post(lambda round_runner: round_runner.add_actions(event(round_runner.node_machine)))

    def _post(self, request: Callable[[RoundRunner], None]) -> None:
        self._requests.append(request)
        self._wakeup.set()

    # All other methods are called in the node thread.

    def _run(self) -> None:
        try:
            with closing(self._local_ranks):
                try:
                    self._run_rounds()
                finally:
                    self._client.close()
        except CancelledError:
            pass  # `finish_within` was called
        except (LaunchError, JobClosedError, StoreLostError) as error:
            self._report_launch_failure(error)
        except BaseException as error:  # noqa: BLE001  a bug in mpwatch: the caller's thread raises it
            self._local_ranks.notify_caller(error)

    def _report_launch_failure(self, error: Exception) -> None:
        """Report an error to the caller's thread: a rendezvous or the start of an attempt has failed."""
        if isinstance(error, LaunchError) and monotonic() >= self._run_deadline:
            error = LaunchError(f"`timeout` ({self._spec.timeout:g} s) ran out before the nodes had joined: {error}")
        if self._local_ranks.has_started:
            decision = AttemptDecision(NO_ATTEMPT, NextStep.FAILED, RestartHistory(), reason=str(error))
            self._local_ranks.notify_caller(ReportJob(decision))
        else:
            self._local_ranks.notify_caller(error if isinstance(error, LaunchError) else LaunchError(str(error)))

    def _run_rounds(self) -> None:
        round_ = self._join_first_round(self._make_join_deadline())
        rejoin = self._run_round(round_, self._job_config_check.read_history(self._client.get_job_store()))
        while rejoin is not None:
            if self._stop_cause:
                reason = describe_stop(self._stop_cause)
                decision = AttemptDecision(NO_ATTEMPT, NextStep.FAILED, rejoin.history, reason=reason)
                self._local_ranks.notify_caller(ReportJob(decision))
                break
            round_ = self._join(
                self._make_join_deadline(), last_call=REJOIN_LAST_CALL_SECONDS, expected_nodes=rejoin.expected_nodes
            )
            rejoin = self._run_round(round_, rejoin.history)
        self._local_ranks.end_lease()

    def _make_join_deadline(self) -> float:
        return min(monotonic() + self._rendezvous.join_timeout, self._run_deadline)

    def _join_first_round(self, join_deadline: float) -> Round:
        """Connect to the store, check the JobConfig of this node, and join the first round.

        When this node starts, an earlier job with the same name may still be ending. If the store belongs to an earlier job,
        close the connection, and try to connect again for at most RECONNECT_SECONDS.
        """
        reconnect_deadline = min(monotonic() + RECONNECT_SECONDS, join_deadline)
        earlier_error = ""
        while True:
            try:
                self._client.connect(join_deadline)
                self._job_config_check.check(self._client.get_job_store(), is_host=self._client.is_host)
                return self._join(join_deadline)
            except LaunchError as error:
                cause = error.__cause__  # not the context, which has errors of single tries that the text already has
                if earlier_error:
                    raise LaunchError(f"{error}. Before that: {earlier_error}") from cause
                raise error from cause
            except (JobClosedError, StoreLostError) as error:
                earlier_error = str(error)
                cannot_reconnect = self._client.is_host or self._rendezvous.backend != "c10d"
                if cannot_reconnect or monotonic() > reconnect_deadline:
                    raise
            self._client.close()
            self._client = RendezvousClient(self._rendezvous)
            if self._is_leaving.wait(RECONNECT_PAUSE):
                raise CancelledError

    def _join(self, deadline: float, *, last_call: float | None = None, expected_nodes: float = math.inf) -> Round:
        """Join the next round.

        Raises LaunchError. If a node was refused because of its JobConfig, the text of the LaunchError mentions the refused
        node.
        """
        try:
            return self._client.join(
                deadline, last_call=last_call, expected_nodes=expected_nodes, wait_report=self._make_wait_report(deadline)
            )
        except LaunchError as error:
            if refusal := self._job_config_check.describe_refusal(self._client.get_job_store()):
                raise LaunchError(f"{error}. {refusal}") from error
            raise

    def _make_wait_report(self, deadline: float) -> WaitReport:
        """Return a WaitReport. If the other nodes do not join soon, the WaitReport logs one warning.

        FIRST_WAIT_SECONDS is longer than REJOIN_WAIT_SECONDS, because the nodes of a job start at different times.
        """
        now, needed = monotonic(), self._rendezvous.min_nodes

        def log(present: int) -> None:
            what = "another node" if needed - present == 1 else f"{needed - present} more nodes"
            text = "waiting up to %.0f s for %s (present: %d of %d)"
            self._deferred_log.warning(text, deadline - now, what, present, needed)

        return WaitReport(now + (REJOIN_WAIT_SECONDS if self._local_ranks.has_started else FIRST_WAIT_SECONDS), log)

    def _run_round(self, round_: Round, history: RestartHistory) -> Rejoin | None:
        """Run one round. Return a Rejoin for the next round, or None if this node joins no further round."""
        options = self._rendezvous
        channel = StoreChannel(
            round_.store,
            self._signed_json,
            group_rank=round_.group_rank,
            write_timeout=options.node_timeout,
            log_warning=self._deferred_log.warning,
        )
        node_machine = NodeMachine(
            self._make_node_info(round_.group_rank, history),
            size=round_.group_world_size,
            min_nodes=options.min_nodes,
            max_restarts=self._spec.policy.max_restarts,
            node_timeout=options.node_timeout,
            now=monotonic(),
        )
        leader = self._make_leader(round_.group_world_size) if round_.group_rank == 0 else None
        round_runner = RoundRunner(
            channel,
            node_machine,
            leader,
            self._client,
            self._local_ranks,
            size=round_.group_world_size,
            node_timeout=options.node_timeout,
            log_warning=partial(self._deferred_log.warning, "%s"),
        )
        self._is_in_round = True
        try:
            round_runner.run(self._requests, self._wakeup)
        finally:
            self._is_in_round = False
        return round_runner.rejoin

    def _make_node_info(self, group_rank: int, history: RestartHistory) -> NodeInfo:
        assert isinstance(self._spec.nprocs, int)
        return NodeInfo(
            group_rank=group_rank,
            hostname=platform.node(),
            address=self._client.address,
            nprocs=self._spec.nprocs,
            role=self._spec.role,
            serves_store=self._client.is_host,
            grace_period=float(self._spec.grace_period),
            job_config=self._job_config,
            history=history,
        )

    def _make_leader(self, size: int) -> Leader:
        options = self._rendezvous
        return Leader(
            size=size,
            nnodes=(options.min_nodes, options.max_nodes),
            policy=self._spec.policy,
            node_timeout=options.node_timeout,
            exit_barrier_timeout=options.exit_barrier_timeout,
            stall_after=self._spec.torch_backend.stall_after,
            now=monotonic(),
        )

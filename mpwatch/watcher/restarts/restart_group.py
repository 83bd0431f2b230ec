"""The ranks of one RestartGroup are started, called, stopped and restarted together.

With scope="worker", each rank is a separate RestartGroup. In a WorkerGroup, the ranks of each call are one RestartGroup, and
the idle ranks are in one or more other RestartGroups.

This module runs in the watcher thread. A RestartGroup contains the state machine of its ranks, and publishes their events.
The event loop executes the actions of the state machine, such as the start of a process.
"""

import math
from collections.abc import Collection
from typing import Any

from mpwatch.events.types import CallStarted, Event, HeartbeatLate, WorkerExited, WorkerReady, WorkerSucceeded
from mpwatch.options.spec import GroupSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.clock import monotonic
from mpwatch.results.failure import format_exit
from mpwatch.results.model import WorkerState
from mpwatch.watcher.diagnosis.collective_verdict import CollectiveVerdict
from mpwatch.watcher.diagnosis.observations import AttemptObservations, RankObservations
from mpwatch.watcher.machine import transitions as m
from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.pending_call import PendingCall
from mpwatch.watcher.processes.rank_environment import RankSetup

# The stop reasons after which the caller's thread decides about a restart. On several nodes all nodes decide together, and
# local ranks that have returned may be restarted since a rank of another node has failed.
DECIDE_AFTER = (m.StopReason.FAILED,)
DECIDE_AFTER_ON_NODES = (
    m.StopReason.FAILED,
    m.StopReason.SUCCEEDED,
    m.StopReason.TIMED_OUT,
    m.StopReason.CANCELLED_BY_JOB,
)

SLOW_EXIT = "a slow exit: an exit hook, a finaliser or destroy_process_group() that does not end, or a busy machine"


class RestartGroup:
    """The ranks of one restart group, from their first start to the end of the run.

    Args:
        spec: options of the run or the WorkerGroup.
        setups: the ranks. The list is empty if they are not known before the first restart.
        event_bus: receives the events of the ranks.
        keep_ranks: whether the ranks stay after a call, for the next call.
    """

    def __init__(self, spec: GroupSpec, setups: list[RankSetup], event_bus: EventBus, *, keep_ranks: bool) -> None:
        self._spec = spec
        self._event_bus = event_bus
        self._keeps_ranks = keep_ranks
        self.call: PendingCall | None = None  # that the ranks are executing
        self.next_setups = setups  # of the next start of the machine's ranks
        self.observed: dict[int, RankObservations] = {}
        self.exit_blockers: dict[int, str] = {}  # by rank: what keeps a rank that has returned from exiting
        self._run_started_at = math.inf
        self._timeout: float | None = None
        self._has_published_call = False
        self.machine = StateMachine(
            [setup.worker.rank for setup in setups],
            now=monotonic(),
            grace_period=spec.grace_period,
            start_timeout=spec.start_timeout,
            heartbeat_timeout=spec.heartbeat_timeout,
            stop_timeout=spec.stop_policy.timeout,
            keep_ranks=keep_ranks,
            decide_after=DECIDE_AFTER_ON_NODES if spec.is_multi_node else DECIDE_AFTER if spec.has_decisions else (),
        )
        self._begin_generation()

    def _begin_generation(self) -> None:
        self.setups = {setup.worker.rank: setup for setup in self.next_setups}
        self.observed.clear()
        self.exit_blockers.clear()
        self._attempt_started_at = monotonic()
        self._all_ready_at: float | None = None
        self._publish_call_started()
        self.read_machine()

    @property
    def workers(self) -> list[Worker]:
        """The `Worker` object that each rank got at its latest start."""
        return [setup.worker for setup in self.setups.values()]

    def read_machine(self) -> None:
        """Copy the present state of the state machine to attributes of this object.

        The event loop compares the attributes before and after a call of `read_machine` to find out what has changed.
        """
        self.known_stage = self.machine.stage
        self.known_stop_reason = self.machine.stop_reason
        self.known_signum = self.machine.signum
        self.known_state = self.machine.state
        self.known_stop_request = self.machine.stop_request
        deadline = self.machine.deadline
        self.due_at = math.inf if deadline is None else deadline

    def handle(self, event: m.Event, now: float) -> list[m.Action]:
        """Pass an event to the state machine, publish it for observers, and return the actions of the state machine."""
        was_late = isinstance(event, m.HeartbeatRead) and event.rank in self.machine.heartbeats.late_ranks
        was_running, generation = self.machine.is_call_running(), self.machine.generation
        actions = self.machine.handle(event, now)
        if self.machine.generation > generation:
            self._begin_generation()
        if isinstance(event, m.StartCall):
            self._run_started_at, self._timeout, self._has_published_call = event.started_at, event.timeout, False
            self._publish_call_started()
        elif isinstance(event, m.Ready):
            self._publish(WorkerReady, event.rank)
            if not self.machine.phase_table.counts[m.RankPhase.STARTING] and self._all_ready_at is None:
                self._all_ready_at = now
        elif isinstance(event, m.Returned) and was_running:
            self._publish(WorkerSucceeded, event.rank, at=self._get_answer_time(event.rank))
        elif isinstance(event, m.Exited):
            self._publish_exited(event.rank)
        elif isinstance(event, m.HeartbeatRead) and event.rank in self.machine.heartbeats.late_ranks and not was_late:
            self._publish_late(event, now)
        return actions

    def handle_deadline(self, now: float) -> list[m.Action]:
        """Pass the present time to the state machine, and return the actions of the state machine."""
        return self.machine.handle_deadline(now)

    def observations(
        self, *, hostname: str, helpers_oom: str, collective_verdict: CollectiveVerdict | None
    ) -> AttemptObservations:
        """Return what the watcher has observed of the ranks since their last start.

        In a WorkerGroup, return what the watcher has observed since the ranks got their last call.
        """
        machine, spec, now = self.machine, self._spec, monotonic()
        return AttemptObservations(
            ranks=dict(self.observed),
            hostname=hostname,
            run_started_at=self._run_started_at,
            stopped_at=machine.stopped_at,
            stop_reason=machine.stop_reason,
            never_ready=machine.never_ready,
            silent_ranks=machine.heartbeats.silent_ranks,
            heartbeat_timeout=spec.heartbeat_timeout,
            timeout=self._timeout,
            start_timeout=spec.start_timeout,
            signum=machine.signum,
            interrupt_cause=machine.interrupt_cause,
            stop_cause="" if self.call is None or self.call.stop_request is None else self.call.stop_request.cause,
            stop_timeout=spec.stop_policy.timeout if machine.is_stop_overdue else None,
            helpers_oom=helpers_oom,
            collective_verdict=collective_verdict,
            log_dir=spec.logs.folder_of_run(self._event_bus.run_id) if spec.logs is not None else "",
            attempt_started_at=self._attempt_started_at,
            all_ready_at=self._all_ready_at,
            ended_at=max((observed.died_at or now for observed in self.observed.values()), default=now),
        )

    def split(self, ranks: Collection[int]) -> "RestartGroup":
        """Move these idle ranks of a WorkerGroup into a new RestartGroup, and return the new RestartGroup."""
        group = RestartGroup(self._spec, [], self._event_bus, keep_ranks=self._keeps_ranks)
        self._move_to(group, ranks)
        group.machine.stage = m.RunStage.IDLE
        group.read_machine()
        return group

    def absorb(self, other: "RestartGroup") -> None:
        """Move all ranks of another RestartGroup into this one. The ranks of both groups must be idle."""
        other._move_to(self, list(other.setups))

    def _move_to(self, other: "RestartGroup", ranks: Collection[int]) -> None:
        self.machine.move_idle_ranks(ranks, other.machine)
        for rank in ranks:
            other.setups[rank] = self.setups.pop(rank)
            if rank in self.observed:
                other.observed[rank] = self.observed.pop(rank)
        other.setups = dict(sorted(other.setups.items()))
        other.observed = dict(sorted(other.observed.items()))
        self.read_machine()
        other.read_machine()

    def log_exit_problems(self, deferred_log: DeferredLog, *, of_run: bool) -> None:
        """Log a warning for each rank that succeeded, but exited too late or with an error.

        Args:
            deferred_log: receives the warnings.
            of_run: whether the ranks exit after a call. It is False if idle ranks of a WorkerGroup exit.
        """
        what_was, value_kept = ("had returned", ". Its value is kept") if of_run else ("was asked to exit", "")
        for rank in self.machine.overdue_exits:
            deferred_log.warning(
                f"rank %d {what_was} but was still running %g s later (%s); mpwatch stopped it{value_kept}",
                rank,
                max(self._spec.grace_period, m.EXIT_SECONDS),
                self.exit_blockers.get(rank) or SLOW_EXIT,
            )
        for rank, observed in self.observed.items():
            was_signalled = -(observed.exit_code or 0) in observed.signals_sent
            if self.machine.stop_reason is m.StopReason.SUCCEEDED and observed.exit_code and not was_signalled:
                deferred_log.warning(f"rank %d {what_was}, and then %s{value_kept}", rank, format_exit(observed.exit_code))

    def _publish(self, kind: type[Event], *ranks: int, at: float | None = None, **details: Any) -> None:
        attempt = self.observed[ranks[0]].worker.restart_count
        self._event_bus.publish(kind, ranks, at=at, attempt=attempt, **details)

    def _publish_call_started(self) -> None:
        """Publish the event CallStarted once for each call.

        In a run of several nodes, a node does not know its ranks when the call begins. So the node publishes CallStarted
        when it starts its ranks for the first time.
        """
        if self.setups and self._run_started_at < math.inf and not self._has_published_call:
            self._has_published_call = True
            attempt = next(iter(self.workers)).restart_count
            self._event_bus.publish(CallStarted, self.setups, attempt=attempt)

    def _publish_late(self, event: m.HeartbeatRead, now: float) -> None:
        assert event.beat_at is not None
        silence = now - event.beat_at
        self._publish(HeartbeatLate, event.rank, silent_seconds=silence, heartbeat_timeout=self._spec.heartbeat_timeout)

    def _publish_exited(self, rank: int) -> None:
        observed = self.observed[rank]
        heartbeat = observed.heartbeat
        self._publish(
            WorkerExited,
            rank,
            at=observed.died_at,
            pid=observed.pid,
            exit_code=observed.exit_code,
            heartbeat_at=heartbeat.beat_at if heartbeat.beat_at != math.inf else None,
            progress=observed.get_progress(self._run_started_at),
            reported_at=heartbeat.report[0] if heartbeat.report is not None else None,
            was_stopped=-(observed.exit_code or 0) in observed.signals_sent,
        )

    def _get_answer_time(self, rank: int) -> float | None:
        answer = self.observed[rank].answer
        return None if answer is None else answer.stamp


def state_of_all(groups: Collection[RestartGroup]) -> WorkerState:
    """Return one state that describes all ranks of this node.

    The state is UNHEALTHY while a rank is being restarted and other ranks go on (scope="worker"). The state is INIT while
    all ranks are being started or restarted together.
    """
    states = {group.known_state for group in groups}
    is_rank_restarting = len(groups) > 1 and any(
        group.known_state is WorkerState.INIT and group.machine.generation for group in groups
    )
    if WorkerState.UNHEALTHY in states or is_rank_restarting:
        return WorkerState.UNHEALTHY
    return next((state for state in (WorkerState.UNKNOWN, WorkerState.INIT) if state in states), WorkerState.HEALTHY)

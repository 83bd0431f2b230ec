"""Ranks that are in the same boat: started, called, stopped and started again together. All ranks, or each for itself.

A unit has the machine that decides about its ranks, knows how each is started, what was seen of it, and notes in the journal
what happens to it. It does nothing to them: that is the loop's.
"""

import math
import time
from collections.abc import Collection
from typing import Any

from mpwatch.events.types import CallStarted, Event, HeartbeatLate, WorkerExited, WorkerReady, WorkerSucceeded
from mpwatch.options.spec import GroupSpec
from mpwatch.options.worker_info import Worker
from mpwatch.results.model import WorkerState
from mpwatch.results.report import exit_text
from mpwatch.watcher.diagnosis.observations import AttemptObservations, RankObservations
from mpwatch.watcher.machine import transitions as m
from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.observers.event_bus import EventBus

JUDGED = (m.StopReason.FAILED,)
JUDGED_BY_NODES = (m.StopReason.FAILED, m.StopReason.SUCCEEDED, m.StopReason.TIMED_OUT, m.StopReason.CANCELLED_BY_JOB)
RankSetup = tuple[Worker, dict[str, str]]  # who a rank is, and its whole environment


class RestartGroup:
    """Its ranks are about to be started for the first time."""

    def __init__(self, spec: GroupSpec, setups: list[RankSetup], event_bus: EventBus, *, keep: bool) -> None:
        self._spec = spec
        self._event_bus = event_bus
        self.setups = {worker.rank: (worker, env) for worker, env in setups}
        self.observed: dict[int, RankObservations] = {}
        self.lingers: dict[int, str] = {}  # what keeps a rank that has returned
        self._run_started_at = math.inf
        self._timeout: float | None = None
        self._has_noted_call = False
        self.machine = StateMachine(
            self.setups,
            now=time.monotonic(),
            grace_period=spec.grace_period,
            start_timeout=spec.start_timeout,
            heartbeat_timeout=spec.heartbeat_timeout,
            keep=keep,
            judged=JUDGED_BY_NODES if spec.is_on_nodes else JUDGED if spec.policy.max_restarts else (),
        )
        self.begin()

    def begin(self) -> None:
        """Another life of its ranks; or of others."""
        self.observed.clear()
        self.lingers.clear()
        self._began_at = time.monotonic()
        self._all_ready_at: float | None = None
        self._note_call()
        self.look_at_machine()

    @property
    def workers(self) -> list[Worker]:
        """Who its ranks are; the next ones, if it has been decided that they are started again."""
        return [worker for worker, _ in self.setups.values()]

    def look_at_machine(self) -> None:
        """What has become of it, in the words of others."""
        self.stage = self.machine.stage
        self.verdict = self.machine.verdict
        self.state = self.machine.state
        deadline = self.machine.deadline
        self.due_at = math.inf if deadline is None else deadline

    def handle(self, event: m.Event, now: float) -> list[m.Action]:
        """What is to be done about an event."""
        was_late = isinstance(event, m.HeartbeatRead) and event.rank in self.machine.heartbeats.late
        may_go_well, generation = self.machine.is_undecided(), self.machine.generation
        actions = self.machine.handle(event, now)
        if self.machine.generation > generation:
            self.begin()
        if isinstance(event, m.StartCall):
            self._run_started_at, self._timeout, self._has_noted_call = event.started_at, event.timeout, False
            self._note_call()
        elif isinstance(event, m.Ready):
            self._note_ready(event.rank, now)
        elif isinstance(event, m.Returned) and may_go_well:
            self._note(WorkerSucceeded, event.rank, at=self._reported_at(event.rank))
        elif isinstance(event, m.Exited):
            self._note_death(event.rank)
        elif isinstance(event, m.HeartbeatRead) and event.rank in self.machine.heartbeats.late and not was_late:
            self._note_late(event, now)
        return actions

    def expire(self, now: float) -> list[m.Action]:
        """What is to be done if a deadline has come."""
        generation = self.machine.generation
        actions = self.machine.expire(now)
        if self.machine.generation > generation:
            self.begin()
        return actions

    def observations(self, *, hostname: str, helpers_oom: str) -> AttemptObservations:
        """All that is known of its ranks' last life, or last call."""
        machine, spec, now = self.machine, self._spec, time.monotonic()
        return AttemptObservations(
            ranks=dict(self.observed),
            hostname=hostname,
            started_at=self._run_started_at,
            stopped_at=machine.stopped_at,
            verdict=machine.verdict,
            never_ready=machine.never_ready,
            silent=machine.heartbeats.silent,
            heartbeat_timeout=spec.heartbeat_timeout,
            timeout=self._timeout,
            start_timeout=spec.start_timeout,
            signum=machine.signum,
            helpers_oom=helpers_oom,
            log_dir=spec.logs.folder_of(self._event_bus.run_id) if spec.logs is not None else "",
            began_at=self._began_at,
            all_ready_at=self._all_ready_at,
            ended_at=max((observed.died_at or now for observed in self.observed.values()), default=now),
        )

    def warn(self, deferred_log: DeferredLog, *, of_run: bool) -> None:
        """About ranks that succeeded and yet did not end as they should."""
        so_far, kept = ("had returned", ". Its value is kept") if of_run else ("was told to end", "")
        for rank in self.machine.lingering:
            deferred_log.warning(
                f"rank %d {so_far} but was still there %g s later (%s); stopped{kept}",
                rank,
                self._spec.grace_period,
                self.lingers.get(rank) or "an exit hook or a finaliser that does not end",
            )
        for rank, observations in self.observed.items():
            by_us = -(observations.exit_code or 0) in observations.signals_sent
            if self.machine.verdict is m.StopReason.SUCCEEDED and observations.exit_code and not by_us:
                deferred_log.warning(f"rank %d {so_far}, and then %s{kept}", rank, exit_text(observations.exit_code))

    def _note(self, kind: type[Event], *ranks: int, at: float | None = None, **details: Any) -> None:
        attempt = self.observed[ranks[0]].worker.restart_count
        self._event_bus.publish(kind, ranks, at=at, attempt=attempt, **details)

    def _note_call(self) -> None:
        """Once; if it was there before it was known who the ranks are, then when they are about to be started."""
        if self.setups and self._run_started_at < math.inf and not self._has_noted_call:
            self._has_noted_call = True
            attempt = next(iter(self.workers)).restart_count
            self._event_bus.publish(CallStarted, self.setups, attempt=attempt)

    def _note_ready(self, rank: int, now: float) -> None:
        self._note(WorkerReady, rank)
        if not self.machine.phase_table.count[m.RankPhase.STARTING] and self._all_ready_at is None:
            self._all_ready_at = now

    def _note_late(self, event: m.HeartbeatRead, now: float) -> None:
        assert event.beat_at is not None
        silence = now - event.beat_at
        self._note(HeartbeatLate, event.rank, silent_seconds=silence, heartbeat_timeout=self._spec.heartbeat_timeout)

    def _note_death(self, rank: int) -> None:
        observations = self.observed[rank]
        heartbeat = observations.heartbeat
        self._note(
            WorkerExited,
            rank,
            at=observations.died_at,
            pid=observations.pid,
            exit_code=observations.exit_code,
            heartbeat_at=heartbeat.beat_at if heartbeat.beat_at != math.inf else None,
            progress=observations.progress(self._run_started_at),
            reported_at=heartbeat.report[0] if heartbeat.report is not None else None,
            was_stopped=-(observations.exit_code or 0) in observations.signals_sent,
        )

    def _reported_at(self, rank: int) -> float | None:
        report = self.observed[rank].report
        return None if report is None else report.stamp


def state_of_all(groups: Collection[RestartGroup]) -> WorkerState:
    """A rank that is replaced while others go on makes the group unhealthy; a group that is started anew begins again."""
    states = {group.state for group in groups}
    is_replaced = len(groups) > 1 and any(group.state is WorkerState.INIT and group.machine.generation for group in groups)
    if WorkerState.UNHEALTHY in states or is_replaced:
        return WorkerState.UNHEALTHY
    return next((state for state in (WorkerState.UNKNOWN, WorkerState.INIT) if state in states), WorkerState.HEALTHY)

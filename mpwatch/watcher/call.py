"""One attempt of one function on fixed ranks. A restart is a new Call, on new ranks.

    thread of the program: make a Call --- EventLoop.start or EventLoop.begin ---> watcher thread: its machine decides
                           wait until `is_over`, read `evidence` <-----------------'

Idle ranks belong to no Call. With scope="worker" or `keep_going` each rank has a Call of its own.
"""

import math
from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import Any

from mpwatch.events.types import (
    CallStarted,
    Event,
    HeartbeatLate,
    Progressed,
    Stopping,
    WorkerExited,
    WorkerReady,
    WorkerSucceeded,
)
from mpwatch.options.spec import GroupSpec
from mpwatch.os_support.clock import monotonic
from mpwatch.results.failure import format_exit
from mpwatch.results.places import format_location
from mpwatch.results.report import format_overdue_ranks
from mpwatch.results.texts import format_ranks
from mpwatch.watcher.diagnosis.observations import AttemptObservations, RankObservations
from mpwatch.watcher.diagnosis.stragglers import get_stacks_or_state
from mpwatch.watcher.inbox import Outbox
from mpwatch.watcher.machine import transitions as m
from mpwatch.watcher.machine.call_machine import CallMachine
from mpwatch.watcher.observers.collective_monitor import CollectiveMonitor
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.processes.rank import Rank
from mpwatch.wire.pickling.call_payload import Payload

SLOW_EXIT = "a slow exit: an exit hook, a finaliser or destroy_process_group() that does not end, or a busy machine"
_numbers = count(1)


class Call:
    """Made by a thread of the program. From EventLoop.start or EventLoop.begin on, only the watcher thread writes to it.

    `payload` is None if no function is called, but idle ranks are ended. `timeout` and `stop_after` count from `started_at`;
    `suspended_before` is how long Ctrl-Z had suspended the ranks by then. `number` is unique in this program. A call is
    refused if it could not begin, because `lost_ranks` were lost (then `refused_at_start` is the value of `EventLoop.starts`
    that the refusal followed) or because the run was interrupted. In a WorkerGroup, `ended_ranks` are those that have ended
    with the call, and `lost_elsewhere` those whose loss outside of the call has ended it.
    """

    def __init__(
        self,
        payload: Payload | None,
        ranks: Iterable[int],
        *,
        started_at: float,
        timeout: float | None = None,
        stop_after: float | None = None,
        suspended_before: float = 0.0,
        is_restart: bool = False,
    ) -> None:
        self.payload, self.ranks = payload, tuple(ranks)
        self.started_at, self.timeout, self.stop_after = started_at, timeout, stop_after
        self.suspended_before, self.is_restart = suspended_before, is_restart
        self.number = next(_numbers)
        self.is_posted = self.is_over = self.is_refused = False
        self.evidence: AttemptObservations | None = None
        self.lost_ranks: tuple[int, ...] = ()
        self.refused_at_start = 0
        self.ended_ranks: tuple[int, ...] = ()
        self.lost_elsewhere: tuple[int, ...] = ()
        self.values: deque[bytes | memoryview | OSError] = deque()  # of the items of `mpwatch.map`, which takes them out
        self.machine: CallMachine
        self.monitor: CollectiveMonitor
        self.members: dict[int, Rank] = {}
        self.exit_blockers: dict[int, str] = {}  # by rank: what keeps a rank that has returned from exiting
        self.before_begin: list[m.Event] = []  # came before it could begin
        self.due_at = math.inf  # of the machine
        self.known_stage: m.CallStage | None = None  # what the event loop has acted upon
        self.known_outcome: tuple[m.StopReason | None, int | None] = (None, None)
        self.known_stop_request: m.StopRequested | None = None
        self._reported_at: dict[int, float] = {}  # by rank: the time of the last report that was published

    def begin(
        self, members: Iterable[Rank], machine: CallMachine, monitor: CollectiveMonitor, spec: GroupSpec, events: EventBus
    ) -> None:
        self.members = {rank.number: rank for rank in members}
        self.machine, self.monitor = machine, monitor
        self._spec, self._events = spec, events
        self._begun_at = min(rank.started_at for rank in self.members.values()) if not machine.keeps_ranks else monotonic()
        self._all_ready_at = monotonic() if all(rank.is_ready for rank in self.members.values()) else None
        for rank in self.members.values():
            rank.call, rank.run_started_at = self, self.started_at

    def has_ended(self) -> bool:
        """Return whether nothing more will come of it."""
        return self.is_over or self.is_refused

    @property
    def observed(self) -> dict[int, RankObservations]:
        return {number: rank.observations for number, rank in self.members.items()}

    @property
    def attempt(self) -> int:
        return next(iter(self.members.values())).setup.worker.restart_count

    def handle(self, event: m.Event, now: float) -> list[m.Action]:
        """Pass an event to the machine, publish what observers see of it, and return the machine's actions."""
        machine = self.machine
        late_before = set(machine.heartbeats.late_ranks)
        was_running = machine.is_running()
        actions = machine.handle(event, now)
        if isinstance(event, m.Ready):
            self._publish(WorkerReady, event.rank)
            if not machine.phase_table.counts[m.RankPhase.STARTING] and self._all_ready_at is None:
                self._all_ready_at = now
        elif isinstance(event, m.Returned) and was_running:
            answer = self.members[event.rank].observations.answer
            self._publish(WorkerSucceeded, event.rank, at=None if answer is None else answer.stamp)
        elif isinstance(event, m.Exited):
            publish_exited(self._events, self.members[event.rank])
        elif isinstance(event, m.HeartbeatsRead):
            limit, late = self._spec.heartbeat_timeout, machine.heartbeats.late_ranks
            for rank in late.keys() - late_before:
                self._publish(HeartbeatLate, rank, silent_seconds=now - late[rank], heartbeat_timeout=limit)
        return actions

    def publish_started(self) -> None:
        if not self.is_restart:
            self._publish(CallStarted, *self.members)

    def publish_reports(self) -> None:
        """Publish the last report of each rank, unless it was published before."""
        for number, observed in self.observed.items():
            report = observed.heartbeat.report
            if report is not None and report.at != self._reported_at.get(number):
                self._reported_at[number] = report.at
                facts = {"step": report.step, "total": report.total, "metrics": report.metrics}
                self._publish(Progressed, number, at=report.at, **facts)

    def _publish(self, kind: type[Event], *ranks: int, at: float | None = None, **details: Any) -> None:
        self._events.publish(kind, ranks, at=at, attempt=self.attempt, **details)

    def make_evidence(self, hostname: str, helpers_oom: str) -> AttemptObservations:
        machine, spec, now, ranks = self.machine, self._spec, monotonic(), self.observed
        return AttemptObservations(
            ranks=ranks,
            hostname=hostname,
            run_started_at=self.started_at,
            stopped_at=machine.stopped_at,
            stop_reason=machine.stop_reason,
            never_ready=machine.never_ready,
            silent_ranks=machine.heartbeats.silent_ranks,
            heartbeat_timeout=spec.heartbeat_timeout,
            passed_limit=f"timeout={self.timeout:g} s" if machine.is_overdue else "",
            start_timeout=spec.start_timeout,
            signum=machine.signum,
            interrupt_cause=machine.interrupt_cause,
            stop_cause="" if machine.stop_request is None else machine.stop_request.cause,
            stop_timeout=spec.stop_policy.timeout if machine.is_stop_overdue else None,
            helpers_oom=helpers_oom,
            collective_verdict=self.monitor.final_verdict,
            slow_rank=self.monitor.lateness,
            log_dir=spec.logs.folder_of_run(self._events.run_id) if spec.logs is not None else "",
            attempt_started_at=self._begun_at,
            all_ready_at=self._all_ready_at,
            ended_at=max(now if observed.died_at is None else observed.died_at for observed in ranks.values()),
        )

    def stop_after_step(self, step: int | None, cause: str, outbox: Outbox) -> None:
        """Make each rank stop after this step, or at its next call of `should_stop` if that is None. See stop_step.py."""
        for rank in self.members.values():
            rank.slot.agree_on_step(step)
        self._publish(Stopping, *self.ranks, stop_cause=cause, after_step=step)
        ranks = format_ranks(self.ranks)
        if step is None:
            text = "a stop was requested (%s); should_stop() has not been called by %s yet, and its first call returns True"
            outbox.warn(text, cause, ranks)
        else:
            outbox.warn("a stop was requested (%s); the last step of %s is step %d", cause, ranks, step)

    def log_overdue_ranks(self, outbox: Outbox) -> None:
        """Warn of each rank that has not returned within `stop_timeout`: its step, and where it is."""
        places = {}
        for number, rank in self.members.items():
            if rank.observations.answer is None and not rank.observations.has_exited:
                step = rank.slot.read_passed_step()
                at_step = "" if step is None else f", at step {step}"
                places[number] = at_step + format_location(get_stacks_or_state(rank.observations))
        if places:  # otherwise the last one has just returned
            outbox.warn("%s", format_overdue_ranks(self._spec.stop_policy.timeout or 0.0, places))

    def log_exit_problems(self, outbox: Outbox) -> None:
        """Log a warning for each rank that succeeded or was idle, but exited too late or with an error."""
        what_was, value_kept = ("was asked to exit", "") if self.payload is None else ("had returned", ". Its value is kept")
        limit = max(self._spec.grace_period, m.EXIT_SECONDS)
        for rank in self.machine.overdue_exits:
            blocker = self.exit_blockers.get(rank) or SLOW_EXIT
            text = f"rank %d {what_was} but was still running %g s later (%s); mpwatch stopped it{value_kept}"
            outbox.warn(text, rank, limit, blocker)
        for rank, observed in self.observed.items():
            was_signalled = -(observed.exit_code or 0) in observed.signals_sent
            if self.machine.stop_reason is m.StopReason.SUCCEEDED and observed.exit_code and not was_signalled:
                outbox.warn(f"rank %d {what_was}, and then %s{value_kept}", rank, format_exit(observed.exit_code))


def publish_exited(events: EventBus, rank: Rank) -> None:
    observed = rank.observations
    heartbeat = observed.heartbeat
    events.publish(
        WorkerExited,
        [rank.number],
        at=observed.died_at,
        attempt=rank.setup.worker.restart_count,
        pid=observed.pid,
        exit_code=observed.exit_code,
        heartbeat_at=heartbeat.beat_at if heartbeat.beat_at != math.inf else None,
        progress=observed.get_progress(rank.run_started_at),
        reported_at=heartbeat.report.at if heartbeat.report is not None else None,
        was_stopped=-(observed.exit_code or 0) in observed.signals_sent,
    )

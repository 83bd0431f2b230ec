"""How the ranks fare at this moment: what is known of them, their pulses, and what the kernel says of their processes.

Taken by the thread of the life, which owns all that, when it is asked; a look costs some tens of microseconds a rank and
changes nothing. When all is over, who has asked takes the last one himself, from what was seen.
"""

import math
import time
from collections.abc import Iterable

from mpwatch.os_support.processes import ProcessUsage, usage_of_process
from mpwatch.results.model import WorkerState
from mpwatch.results.rank_status import RankStatus, Report
from mpwatch.watcher.diagnosis.observations import AttemptObservations, RankObservations
from mpwatch.watcher.machine.transitions import RankPhase
from mpwatch.watcher.processes.process_pool import ProcessPool
from mpwatch.watcher.restarts.restart_group import RestartGroup
from mpwatch.wire.messages import MessageKind
from mpwatch.wire.shared_memory import HeartbeatSample

STATES = {
    RankPhase.STARTING: WorkerState.INIT,
    RankPhase.READY: WorkerState.INIT,
    RankPhase.RUNNING: WorkerState.HEALTHY,
    RankPhase.TERMINATING: WorkerState.STOPPED,
    RankPhase.KILLED: WorkerState.STOPPED,
    RankPhase.ABANDONED: WorkerState.STOPPED,
}  # of a rank that has not answered; of one that has gone its end tells


def statuses_of(units: Iterable[RestartGroup], crew: ProcessPool) -> list[RankStatus]:
    """Of all ranks, in order."""
    found = [_status_now(facts, unit, crew) for unit in units for facts in unit.seen.values()]
    return sorted(found, key=lambda status: status.rank)


def last_statuses(of_all: Iterable[AttemptObservations]) -> list[RankStatus]:
    """Of all ranks, in order, as the run or the call has left them."""
    found = [_status_then(seen, facts.stopped_at, facts.ended_at) for facts in of_all for seen in facts.ranks.values()]
    return sorted(found, key=lambda status: status.rank)


def _status_now(facts: RankObservations, unit: RestartGroup, crew: ProcessPool) -> RankStatus:
    rank = facts.worker.rank
    line = crew.lines.get(rank)
    if line is None or line.facts is not facts:  # it has gone
        return _status_then(facts, unit.machine.stopped_at, time.monotonic())
    phase = unit.machine.roster.phases[rank]
    state = STATES.get(phase) if facts.report is None else None
    if phase is RankPhase.RUNNING and rank in unit.machine.beats.late:
        state = WorkerState.UNHEALTHY
    state = state or _outcome(facts, unit.machine.stopped_at)
    usage = usage_of_process(facts.pid) if facts.pid is not None else None
    pulse = crew.pulse_of(line)
    return _status(facts, state, pulse, usage, time.monotonic())  # the time last: no beat is later than that


def _status_then(facts: RankObservations, stopped_at: float | None, now: float) -> RankStatus:
    return _status(facts, _outcome(facts, stopped_at), facts.pulse, None, now)


def _outcome(facts: RankObservations, stopped_at: float | None) -> WorkerState:
    """Of a rank that has answered, or has gone. What it does after all were told to stop is no failure of its own."""
    report = facts.report
    if report is not None and report.kind is MessageKind.RETURNED:
        return WorkerState.SUCCEEDED
    was_told = bool(facts.signals_sent) and (report is None or stopped_at is None or report.stamp >= stopped_at)
    has_ended = report is not None or facts.died_at is not None
    return WorkerState.FAILED if has_ended and not was_told else WorkerState.STOPPED


def _status(
    facts: RankObservations, state: WorkerState, pulse: HeartbeatSample, usage: ProcessUsage | None, now: float
) -> RankStatus:
    report = None
    if pulse.report is not None:
        at, step, total, metrics = pulse.report
        report = Report(at=at, step=step, total=total, metrics=metrics)
    return RankStatus(
        rank=facts.worker.rank,
        local_rank=facts.worker.local_rank,
        state=state,
        restart_count=facts.worker.restart_count,
        pid=facts.pid,
        report=report,
        heartbeat_at=pulse.beat_at if pulse.beat_at != math.inf else None,
        memory=usage.memory if usage is not None else None,
        cpu_seconds=usage.cpu_seconds if usage is not None else None,
        seen_at=now,
    )

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


def statuses_of(groups: Iterable[RestartGroup], pool: ProcessPool) -> list[RankStatus]:
    """Of all ranks, in order."""
    found = [_status_now(observations, group, pool) for group in groups for observations in group.observed.values()]
    return sorted(found, key=lambda status: status.rank)


def last_statuses(of_all: Iterable[AttemptObservations]) -> list[RankStatus]:
    """Of all ranks, in order, as the run or the call has left them."""
    found = [
        _status_then(observed, observations.stopped_at, observations.ended_at)
        for observations in of_all
        for observed in observations.ranks.values()
    ]
    return sorted(found, key=lambda status: status.rank)


def _status_now(observations: RankObservations, group: RestartGroup, pool: ProcessPool) -> RankStatus:
    rank = observations.worker.rank
    handle = pool.handles.get(rank)
    if handle is None or handle.observations is not observations:  # it has gone
        return _status_then(observations, group.machine.stopped_at, time.monotonic())
    phase = group.machine.phase_table.phases[rank]
    state = STATES.get(phase) if observations.report is None else None
    if phase is RankPhase.RUNNING and rank in group.machine.heartbeats.late:
        state = WorkerState.UNHEALTHY
    state = state or _outcome(observations, group.machine.stopped_at)
    usage = usage_of_process(observations.pid) if observations.pid is not None else None
    heartbeat = pool.pulse_of(handle)
    return _status(observations, state, heartbeat, usage, time.monotonic())  # the time last: no beat is later than that


def _status_then(observations: RankObservations, stopped_at: float | None, now: float) -> RankStatus:
    return _status(observations, _outcome(observations, stopped_at), observations.heartbeat, None, now)


def _outcome(observations: RankObservations, stopped_at: float | None) -> WorkerState:
    """Of a rank that has answered, or has gone. What it does after all were told to stop is no failure of its own."""
    report = observations.report
    if report is not None and report.kind is MessageKind.RETURNED:
        return WorkerState.SUCCEEDED
    was_told = bool(observations.signals_sent) and (report is None or stopped_at is None or report.stamp >= stopped_at)
    has_ended = report is not None or observations.died_at is not None
    return WorkerState.FAILED if has_ended and not was_told else WorkerState.STOPPED


def _status(
    observations: RankObservations, state: WorkerState, heartbeat: HeartbeatSample, usage: ProcessUsage | None, now: float
) -> RankStatus:
    report = None
    if heartbeat.report is not None:
        at, step, total, metrics = heartbeat.report
        report = Report(at=at, step=step, total=total, metrics=metrics)
    return RankStatus(
        rank=observations.worker.rank,
        local_rank=observations.worker.local_rank,
        state=state,
        restart_count=observations.worker.restart_count,
        pid=observations.pid,
        report=report,
        heartbeat_at=heartbeat.beat_at if heartbeat.beat_at != math.inf else None,
        memory=usage.memory if usage is not None else None,
        cpu_seconds=usage.cpu_seconds if usage is not None else None,
        seen_at=now,
    )

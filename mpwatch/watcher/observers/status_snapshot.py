"""The status of each rank at one moment: state, heartbeat, last report, and memory and CPU time from the kernel."""

import math
from collections.abc import Iterable
from dataclasses import replace

from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.processes import ProcessUsage, read_process_usage
from mpwatch.results.model import RankStatus, WorkerState
from mpwatch.watcher.diagnosis.observations import AttemptObservations, RankObservations
from mpwatch.watcher.machine.transitions import RankPhase
from mpwatch.watcher.processes.rank import Rank
from mpwatch.wire.messages import MessageKind
from mpwatch.wire.shared_memory import HeartbeatSample

# The states of ranks that have not answered. The state of every other rank follows from its answer or its exit.
STATES = {
    RankPhase.STARTING: WorkerState.INIT,
    RankPhase.READY: WorkerState.INIT,
    RankPhase.RUNNING: WorkerState.HEALTHY,
    RankPhase.TERMINATING: WorkerState.STOPPED,
    RankPhase.KILLED: WorkerState.STOPPED,
    RankPhase.ABANDONED: WorkerState.STOPPED,
}


def current_statuses(ranks: Iterable[Rank]) -> list[RankStatus]:
    return sorted(map(_current_status, ranks), key=lambda status: status.rank)


def final_statuses(attempts: Iterable[AttemptObservations]) -> list[RankStatus]:
    statuses = [
        _build_status(observed, _final_state(observed, attempt.stopped_at), observed.heartbeat, None, attempt.ended_at)
        for attempt in attempts
        for observed in attempt.ranks.values()
    ]
    return sorted(statuses, key=lambda status: status.rank)


def _current_status(rank: Rank) -> RankStatus:
    observed, machine = rank.observations, None if rank.call is None else rank.call.machine
    stopped_at = None if machine is None else machine.stopped_at
    if rank.is_reaped:
        return _build_status(observed, _final_state(observed, stopped_at), observed.heartbeat, None, monotonic())
    phase = rank.phase
    state = STATES.get(phase) if observed.answer is None else None
    if machine is not None and phase is RankPhase.RUNNING and rank.number in machine.heartbeats.late_ranks:
        state = WorkerState.UNHEALTHY
    state = state or _final_state(observed, stopped_at)
    usage = read_process_usage(observed.pid) if observed.pid is not None else None
    heartbeat = rank.slot.read_heartbeat()
    status = _build_status(observed, state, heartbeat, usage, monotonic())  # time last: no heartbeat is later than that
    late = None if rank.call is None else rank.call.monitor.lateness
    return replace(status, lateness=late) if late is not None and late.rank == rank.number else status


def _final_state(observed: RankObservations, stopped_at: float | None) -> WorkerState:
    """A rank that failed after the watcher had sent it a signal to stop is STOPPED, not FAILED."""
    answer = observed.answer
    if answer is not None and answer.kind is MessageKind.RETURNED:
        return WorkerState.SUCCEEDED
    was_stopped = bool(observed.signals_sent) and (answer is None or stopped_at is None or answer.stamp >= stopped_at)
    has_ended = answer is not None or observed.has_exited
    return WorkerState.FAILED if has_ended and not was_stopped else WorkerState.STOPPED


def _build_status(
    observed: RankObservations, state: WorkerState, heartbeat: HeartbeatSample, usage: ProcessUsage | None, now: float
) -> RankStatus:
    return RankStatus(
        rank=observed.worker.rank,
        local_rank=observed.worker.local_rank,
        state=state,
        restart_count=observed.worker.restart_count,
        pid=observed.pid,
        report=heartbeat.report,
        heartbeat_at=heartbeat.beat_at if heartbeat.beat_at != math.inf else None,
        memory=usage.memory if usage is not None else None,
        cpu_seconds=usage.cpu_seconds if usage is not None else None,
        seen_at=now,
    )

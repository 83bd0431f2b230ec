"""Decides which rank failed first and why. Makes a RunResult from what the watcher observed.

This module runs in the caller's thread. The following rules choose the root cause among several failures. A rule decides
only if the rules before it leave a tie:

1. A failure that happened before the watcher began to stop the ranks has priority over a later failure.
2. A rank's own failure has priority over a secondary failure. A secondary failure only reports that a peer was lost or late
   (peer_errors.py). Often a secondary failure happens before the failure that caused it. For example, rank 1 can close its
   connections before its function raises an exception. Then rank 0 can notice the closed connection and fail before rank 1
   fails.
3. An earlier failure has priority over a later failure. The time of an exception is the time at which mpwatch caught the
   exception in the rank. For the time of a death, see death_order.py.

If all failures only report that a peer was late, mpwatch blames the rank that was late (stragglers.py).

This module unpickles exceptions and return values, which runs user code. Slow user code delays no rank, because no rank
waits for the diagnosis.
"""

import signal
from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from mpwatch.results import report as texts
from mpwatch.results.collective import Collective, CollectiveState
from mpwatch.results.failure import FailureKind, ProcessFailure
from mpwatch.results.model import WorkerState
from mpwatch.results.places import format_raise_location
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.diagnosis.collective_verdict import (
    CollectiveVerdict,
    VerdictKind,
    find_verdict,
    get_current_collective,
)
from mpwatch.watcher.diagnosis.death_order import DEATH_LAG_SECONDS
from mpwatch.watcher.diagnosis.failures import (
    TimedFailure,
    build_hang,
    build_mismatch,
    build_unloadable_value,
    explain_unloadable_value,
    find_failure,
    get_death_kind,
    has_returned,
    is_before_stop,
)
from mpwatch.watcher.diagnosis.observations import AttemptObservations, RankObservations
from mpwatch.watcher.diagnosis.peer_errors import PeerErrorKind, classify_exception
from mpwatch.watcher.diagnosis.stragglers import (
    find_cause_of_silence,
    find_ranks_outside_collectives,
    find_stragglers,
    get_stacks_or_state,
    is_in_collective,
)
from mpwatch.watcher.machine.transitions import InterruptCause, StopReason
from mpwatch.wire.exceptions import decoder
from mpwatch.wire.messages import MessageKind
from mpwatch.wire.pickling.return_values import open_value, pack_none

Failures = dict[int, TimedFailure]  # by rank
STALL_SECONDS = 5.0  # a shorter wait in a collective is usual, so it is not reported when the user interrupts the run


def diagnose(attempt: AttemptObservations) -> RunResult[Any]:
    """Return the result of an attempt or a call. Call this function after the end of the attempt or the call."""
    _correct_collectives(attempt)
    failures: Failures = {}
    have_all_returned = attempt.stop_reason is StopReason.SUCCEEDED
    loaded_values = _load_values(attempt) if have_all_returned else {}
    for rank, observed in attempt.ranks.items():
        if rank not in loaded_values:
            failure = find_failure(attempt, observed)
        elif (error := loaded_values[rank].error) is not None:
            failure = build_unloadable_value(attempt, observed, error)
        else:
            failure = None
        if failure is not None:
            failures[rank] = failure
    failures |= _find_victims(attempt, failures)
    verdict = None if attempt.stop_reason is StopReason.SUCCEEDED else find_collective_verdict(attempt)
    is_explained = verdict is not None and _is_explained(attempt, failures, verdict)
    if verdict is not None and is_explained:
        failures = _blame_for_collective(attempt, failures, verdict)
    else:
        failures |= _find_hangs(attempt, failures, verdict)
    first = min(failures.values(), key=partial(_get_order_of_blame, attempt), default=(0.0, None))[1]
    is_blame_certain = attempt.stop_reason is not StopReason.TIMED_OUT and not (
        is_explained and verdict and not verdict.blamed
    )
    by_rank = {rank: failure for rank, (_, failure) in sorted(failures.items())}
    notes = []
    if not have_all_returned:  # an unloadable value is no failure now, as it has not ended the attempt
        loaded_values = _load_values(attempt, without=by_rank)
        notes += [f"rank {rank} has no value: {loaded.error}" for rank, loaded in loaded_values.items() if loaded.error]
    if by_rank and attempt.helpers_oom:
        notes.append(f"the kernel's out-of-memory killer killed a process that is no rank: {attempt.helpers_oom}")
    states = {rank: _get_state(attempt, observed, rank in by_rank) for rank, observed in attempt.ranks.items()}
    return RunResult(
        state=_get_overall_state(attempt.stop_reason, by_rank),
        return_values={rank: loaded.value for rank, loaded in loaded_values.items() if loaded.error is None},
        failures=by_rank,
        root_cause=first if is_blame_certain else None,
        workers=tuple(observed.worker for observed in attempt.ranks.values()),
        worker_states=states,
        progress={
            rank: progress
            for rank, observed in attempt.ranks.items()
            if (progress := observed.get_progress(attempt.run_started_at)) is not None
        },
        stacks={rank: text for rank, observed in attempt.ranks.items() if (text := get_stacks_or_state(observed))},
        collectives={} if attempt.stop_reason is StopReason.SUCCEEDED else _get_collectives(attempt),
        reason=verdict.sentence if verdict and is_explained else _get_reason(attempt, failures, states, verdict),
        log_dir=attempt.log_dir,
        stopped_at=max(
            (step for of_rank in attempt.ranks.values() if (step := of_rank.stopped_step) is not None), default=None
        ),
        stop_cause=attempt.stop_cause,
        notes=tuple(notes),
        elapsed=attempt.ended_at - attempt.run_started_at,
    )


def _load_values(attempt: AttemptObservations, without: Container[int] = ()) -> dict[int, "LoadedValue"]:
    loaded = {}
    for rank, observed in attempt.ranks.items():
        if rank not in without and has_returned(attempt, observed):
            answer = observed.answer
            assert answer is not None  # the rank has returned
            loaded[rank] = load_value(answer.body if answer.file is None else answer.file)
    return loaded


class LoadedValue(NamedTuple):
    """A return value, or the error that prevented mpwatch from rebuilding this value."""

    value: Any
    error: BaseException | None


def load_value(content: bytes | memoryview | OSError) -> LoadedValue:
    """Rebuild a return value. This function runs user code.

    Args:
        content: the body of the RETURNED message, or the content of its file, or an OSError if the file was unreadable.
    """
    kind = "unknown"
    try:
        if isinstance(content, OSError):
            raise content
        if content == pack_none():
            return LoadedValue(None, None)
        kind, unpickler = open_value(content)
        return LoadedValue(unpickler.load(), None)
    except decoder.ENDS_RUN:
        raise
    except BaseException as error:  # noqa: BLE001  from the code of the value's classes
        return LoadedValue(None, error if error is content else explain_unloadable_value(kind, error))


def find_collective_verdict(attempt: AttemptObservations) -> CollectiveVerdict | None:
    """Return the verdict on ranks whose collectives did not fit together, or None.

    If a verdict has ended the attempt, return this verdict, or a newer verdict that has the same `finding`. A newer verdict
    can name more ranks, because more ranks have reported their collectives since the older verdict.
    """
    returned = [rank for rank, observed in attempt.ranks.items() if has_returned(attempt, observed)]
    verdict, final = find_verdict(get_all_collectives(attempt), returned), attempt.collective_verdict
    return verdict if final is None or (verdict is not None and verdict.finding == final.finding) else final


def get_all_collectives(attempt: AttemptObservations) -> dict[int, RankCollectives]:
    """Return the collectives of each rank that has reported them, as a dict from ranks to RankCollectives."""
    return {rank: observed.collectives for rank, observed in attempt.ranks.items() if observed.collectives is not None}


def _correct_collectives(attempt: AttemptObservations) -> None:
    """If a rank lost a peer, or waited too long for a peer, mark the rank's last collective as WAITING.

    torch marks a collective as completed even if the collective has failed.
    """
    for rank, observed in attempt.ranks.items():
        answer = observed.collectives
        lost_peer = _get_peer_error(attempt, rank) in (PeerErrorKind.CONNECTION_LOST, PeerErrorKind.PEER_TIMEOUT)
        if answer is not None and answer.collectives and lost_peer and observed.answer is not None:
            *others, last = answer.collectives
            place = last.place or format_raise_location(decoder.decode_exception(observed.answer.body)).strip(" ()")
            failed = replace(last, state=CollectiveState.WAITING, place=place)
            observed.collectives = replace(answer, collectives=(*others, failed))


def find_waiting_ranks(attempt: AttemptObservations) -> set[int]:
    """Return the ranks that timed out while they waited for a peer, and the silent ranks that waited in a collective.

    Call this before `drop_payloads`.
    """
    silent = {rank for rank in attempt.silent_ranks if is_in_collective(attempt.ranks[rank])}
    return silent | {rank for rank in attempt.ranks if _get_peer_error(attempt, rank) is PeerErrorKind.PEER_TIMEOUT}


def find_possible_victims(attempt: AttemptObservations) -> set[int]:
    """Return the ranks whose failure has the PeerErrorKind POSSIBLY_PEER.

    POSSIBLY_PEER means that a connection broke, either to a peer or to another program. Call this before `drop_payloads`.
    """
    return {rank for rank in attempt.ranks if _get_peer_error(attempt, rank) is PeerErrorKind.POSSIBLY_PEER}


def find_missing_ranks(attempt: AttemptObservations, result: RunResult[Any]) -> list[ProcessFailure]:
    """Find the running ranks of this node that were certainly in no collective, and return a failure for each such rank.

    The failure says that the rank kept other nodes waiting.
    """
    at = attempt.stopped_at
    if at is None:
        return []
    running = {
        rank: observed
        for rank, observed in attempt.ranks.items()
        if rank not in result.failures and observed.was_ready and not has_returned(attempt, observed)
    }
    missing = sorted(find_ranks_outside_collectives(running))
    return [build_hang(attempt, running[rank], at, texts.KEPT_OTHER_NODES_WAITING)[1] for rank in missing]


def _find_victims(attempt: AttemptObservations, failures: Failures) -> Failures:
    """Return the failures that another failure explains, and mark the returned failures as secondary.

    Only failures with the PeerErrorKind POSSIBLY_PEER or HINT are returned.
    """
    peer_errors = {rank: _get_peer_error(attempt, rank) for rank in failures}
    deaths = [at for at, failure in failures.values() if not _was_reported(failure)]
    has_cause = any(kind in (None, PeerErrorKind.HINT) for kind in peer_errors.values())
    victims: Failures = {}
    for rank, (at, failure) in failures.items():
        if peer_errors[rank] is PeerErrorKind.POSSIBLY_PEER:
            is_victim = bool(deaths) or has_cause  # also a later one: a rank may close its connections before it raises
        else:
            is_victim = peer_errors[rank] is PeerErrorKind.HINT and any(death - DEATH_LAG_SECONDS <= at for death in deaths)
        if is_victim:
            victims[rank] = (at, replace(failure, is_secondary=True))
    return victims


def _get_peer_error(attempt: AttemptObservations, rank: int) -> PeerErrorKind | None:
    observed = attempt.ranks[rank]
    if observed.answer is None:
        return get_death_kind(observed)
    return classify_exception(observed.answer.body) if observed.answer.kind is not MessageKind.RETURNED else None


def _was_reported(failure: ProcessFailure) -> bool:
    """Return whether the time of the failure is exact.

    The time of a death is not exact, because the watcher notices a death late.
    """
    return failure.exception is not None or failure.kind in (FailureKind.EXCEPTION, FailureKind.TIMEOUT)


def _is_explained(attempt: AttemptObservations, failures: Failures, verdict: CollectiveVerdict) -> bool:
    """Return whether the verdict on the collectives explains all failures.

    ABSENT and CROSSED verdicts explain only secondary failures. A MISMATCH verdict also explains a death by SIGABRT, because
    gloo calls abort() in a rank that receives more bytes than expected. A late rank keeps its connections open. So a verdict
    on a late rank explains the failures only if one of the failures is a timeout.
    """
    if attempt.stop_reason is not StopReason.FAILED or (attempt.silent_ranks and verdict.kind is not VerdictKind.MISMATCH):
        return False
    has_timed_out = any(_get_peer_error(attempt, rank) is PeerErrorKind.PEER_TIMEOUT for rank in failures)
    if not (verdict.cannot_end_well or (verdict.is_complete and has_timed_out)):
        return False
    return all(
        failure.is_secondary or (verdict.kind is VerdictKind.MISMATCH and failure.signal == signal.SIGABRT)
        for _, failure in failures.values()
    )


def _blame_for_collective(attempt: AttemptObservations, failures: Failures, verdict: CollectiveVerdict) -> Failures:
    """Return the known failures, marked as secondary, and a new failure for each rank that the verdict blames."""
    blamed: Failures = {rank: (at, replace(failure, is_secondary=True)) for rank, (at, failure) in failures.items()}
    latest = max((at for at, _ in failures.values()), default=attempt.ended_at)
    at = latest if attempt.stopped_at is None else attempt.stopped_at
    for rank in attempt.ranks.keys() & verdict.blamed:  # other ranks have attempts of their own (scope="worker")
        observed, before = attempt.ranks[rank], failures.get(rank)
        if verdict.kind is VerdictKind.ABSENT and before is None and not has_returned(attempt, observed):
            blamed[rank] = build_hang(attempt, observed, at, verdict.evidence[rank])
        else:
            blamed[rank] = build_mismatch(attempt, observed, at, verdict.evidence[rank], before and before[1])
    return blamed


def _get_collectives(attempt: AttemptObservations) -> dict[int, Collective]:
    """Return a dict with the current or last collective of each rank. Leave out ranks that have reported no collective."""
    return {
        rank: collective
        for rank, observed in attempt.ranks.items()
        if observed.collectives is not None and (collective := get_current_collective(observed.collectives)) is not None
    }


def _find_hangs(attempt: AttemptObservations, failures: Failures, verdict: CollectiveVerdict | None) -> Failures:
    """Return the failures of ranks that were silent for too long, or that made their peers time out."""
    at = attempt.stopped_at
    if at is None:
        return {}
    running = _get_running(attempt, failures)
    if attempt.silent_ranks:
        return _find_silent_ranks(attempt, running, verdict)
    peer_errors = {_get_peer_error(attempt, rank) for rank in failures}
    if PeerErrorKind.PEER_TIMEOUT in peer_errors and all(failure.is_secondary for _, failure in failures.values()):
        return {
            rank: build_hang(attempt, running[rank], at, texts.KEPT_PEERS_UNTIL_TIMEOUT)
            for rank in find_ranks_outside_collectives(running)
        }
    return {}


def _find_silent_ranks(
    attempt: AttemptObservations, running: Mapping[int, RankObservations], verdict: CollectiveVerdict | None
) -> Failures:
    """Return HANG failures for the silent ranks, and for the ranks that caused the silence.

    The time of a silent rank's failure is the time of its last heartbeat. If a silent rank waits for another rank, the
    failure of the silent rank is secondary.
    """
    assert attempt.stopped_at is not None
    stopped_at, heartbeat_timeout = attempt.stopped_at, attempt.heartbeat_timeout
    silent = set(attempt.silent_ranks.keys() & running.keys())
    absent = running.keys() & verdict.blamed if verdict is not None else set()
    to_blame = absent or find_cause_of_silence(running, silent) or silent
    hangs: Failures = {}
    for rank in silent:
        assert heartbeat_timeout is not None
        last_beat, progress = attempt.silent_ranks[rank], attempt.ranks[rank].get_progress(attempt.run_started_at)
        is_victim = rank not in to_blame
        why = texts.format_silence(stopped_at - last_beat, None if is_victim else heartbeat_timeout, progress)
        if verdict is not None and rank in absent:
            why += f"; it {verdict.evidence[rank]}"
        hangs[rank] = build_hang(attempt, running[rank], last_beat, why, is_secondary=is_victim)
    for rank in to_blame - silent:
        why = verdict.evidence[rank] if verdict is not None and rank in absent else texts.KEPT_PEERS_WAITING
        hangs[rank] = build_hang(attempt, running[rank], stopped_at, why)
    return hangs


def _get_running(attempt: AttemptObservations, failures: Failures) -> dict[int, RankObservations]:
    """Return the ranks that were running when the watcher stopped them."""
    return {rank: observed for rank, observed in attempt.ranks.items() if _was_running(attempt, failures, rank)}


def _was_running(attempt: AttemptObservations, failures: Failures, rank: int) -> bool:
    """Return whether the rank was running when the watcher stopped the ranks.

    A rank in `attempt.silent_ranks` counts as running, even if the rank returned after its heartbeat timeout.
    """
    if rank in failures and failures[rank][1].kind is not FailureKind.TIMEOUT:
        return False
    observed = attempt.ranks[rank]
    return rank in attempt.silent_ranks or (observed.was_ready and not has_returned(attempt, observed))


def _get_order_of_blame(attempt: AttemptObservations, timed: TimedFailure) -> tuple[bool, bool, float]:
    """Return a sort key that is smallest for the root cause.

    The docstring of diagnose.py explains how the root cause is chosen.
    """
    at, failure = timed
    lag = 0.0 if _was_reported(failure) else DEATH_LAG_SECONDS
    return not is_before_stop(attempt, at - lag), failure.is_secondary, at


def _get_state(attempt: AttemptObservations, observed: RankObservations, has_failed: bool) -> WorkerState:
    if has_failed:
        return WorkerState.FAILED
    return WorkerState.SUCCEEDED if has_returned(attempt, observed) else WorkerState.STOPPED


def _get_overall_state(stop_reason: StopReason | None, failures: Mapping[int, ProcessFailure]) -> WorkerState:
    if stop_reason is StopReason.INTERRUPTED or (stop_reason is StopReason.CANCELLED_BY_JOB and not failures):
        return WorkerState.STOPPED
    return WorkerState.SUCCEEDED if stop_reason is StopReason.SUCCEEDED and not failures else WorkerState.FAILED


def format_interrupt(signum: int, cause: InterruptCause) -> str:
    """Return a sentence that says what stopped the run."""
    if cause is InterruptCause.STOP:
        return texts.format_stopped_by_caller()
    if cause is InterruptCause.STOP_REQUEST:
        return texts.format_stop_request()
    return texts.format_end_of_program() if cause is InterruptCause.PROGRAM_END else texts.format_signal(signum)


def _get_reason(
    attempt: AttemptObservations,
    failures: Failures,
    states: Mapping[int, WorkerState],
    verdict: CollectiveVerdict | None,
) -> str:
    """Return a sentence about the time limit or the interrupt that ended the attempt.

    If the attempt ended for another reason, return an empty text.
    """
    if attempt.stop_reason is StopReason.TIMED_OUT:
        unfinished = [rank for rank, state in states.items() if state is not WorkerState.SUCCEEDED]
        if attempt.stop_timeout is not None:
            return texts.format_stop_timeout(attempt.stop_timeout, attempt.stop_cause, unfinished)
        unused = attempt.unused_heartbeat_timeout
        note = "" if unused is None else f"; {texts.format_unused_heartbeat_timeout(unused)}"
        # A rank that is not in the collective is named, but not blamed: healthy ranks, too, reach it at different times.
        if verdict is not None:
            return f"{texts.format_timeout(attempt.timeout or 0.0, unfinished)}; {verdict.sentence}{note}"
        stragglers = find_stragglers(_get_running(attempt, failures))
        return texts.format_timeout(attempt.timeout or 0.0, unfinished, stragglers) + note
    # Other nodes may have stopped the ranks just before the signal came to this process.
    if attempt.stop_reason in (StopReason.INTERRUPTED, StopReason.CANCELLED_BY_JOB) and attempt.signum is not None:
        text = format_interrupt(attempt.signum, attempt.interrupt_cause)
        if attempt.stop_timeout is not None:
            unfinished = [rank for rank, state in states.items() if state is not WorkerState.SUCCEEDED]
            text = texts.format_stop_timeout(attempt.stop_timeout, attempt.stop_cause, unfinished)
        is_stalled = verdict is not None and (verdict.kind is VerdictKind.MISMATCH or verdict.seconds >= STALL_SECONDS)
        return f"{text}; {verdict.sentence}" if verdict is not None and is_stalled else text
    return ""

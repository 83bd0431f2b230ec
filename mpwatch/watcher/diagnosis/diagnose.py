"""Decides which rank failed first and why: evidence in, a RunResult out. Runs in the caller's thread.

The root cause is chosen by these rules; each decides only if those before it leave a tie:

1. A failure before the watcher began to stop the ranks comes before a later one.
2. A rank's own failure comes before a secondary one, which only reports that a peer was lost or late (peer_errors.py). It
   may come first: a rank that closes its connections before it raises lets its peers fail before it.
3. The earlier failure. Exceptions have the time at which the rank caught them; for deaths see death_order.py.

If all failures only report that a peer was late, the late rank is blamed (stragglers.py). The diagnosis unpickles exceptions
and return values, which runs user code. No rank waits for it.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from mpwatch.results import report as texts
from mpwatch.results.collective import CollectiveState
from mpwatch.results.failure import FailureKind, ProcessFailure
from mpwatch.results.model import WorkerState
from mpwatch.results.places import format_raise_location
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.diagnosis.collective_verdict import CollectiveVerdict, VerdictKind, find_verdict
from mpwatch.watcher.diagnosis.death_order import DEATH_LAG_SECONDS
from mpwatch.watcher.diagnosis.failures import (
    build_hang,
    build_mismatch,
    build_unloadable_value,
    explain_unloadable_value,
    find_failure,
    get_death_kind,
    has_returned,
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
from mpwatch.wire.pickling.packed import Unpacked

Failures = dict[int, ProcessFailure]  # by rank
STALL_SECONDS = 5.0  # a shorter wait in a collective is usual, so it is not reported when the user interrupts the run


def diagnose(attempt: AttemptObservations) -> RunResult[Any]:
    _correct_collectives(attempt)
    failures: Failures = {}
    have_all_returned = attempt.stop_reason is StopReason.SUCCEEDED
    loaded_values = _load_values(attempt) if have_all_returned else {}
    for rank, observed in attempt.ranks.items():
        if rank not in loaded_values:
            failure = find_failure(attempt, observed)
        else:
            error = loaded_values[rank].error
            failure = None if error is None else build_unloadable_value(attempt, observed, error)
        if failure is not None:
            failures[rank] = failure
    failures |= _find_victims(attempt, failures)
    verdict = None if have_all_returned else _find_collective_verdict(attempt)
    explanation = verdict if verdict is not None and _is_explained(attempt, failures, verdict) else None
    if explanation is not None:
        failures = _blame_for_collective(attempt, failures, explanation)
    else:
        failures |= _find_hangs(attempt, failures, verdict)
    first = min(failures.values(), key=partial(_get_order_of_blame, attempt), default=None)
    is_blame_certain = attempt.stop_reason is not StopReason.TIMED_OUT and (explanation is None or explanation.blamed)
    by_rank = dict(sorted(failures.items()))
    collectives = {rank: current for rank, observed in attempt.ranks.items() if (current := observed.collective) is not None}
    notes = []
    if not have_all_returned:  # an unloadable value is no failure now, as it has not ended the attempt
        loaded_values = _load_values(attempt, without=by_rank)
        notes += [f"rank {rank} has no value: {loaded.error}" for rank, loaded in loaded_values.items() if loaded.error]
    if by_rank and attempt.helpers_oom:
        notes.append(f"the kernel's out-of-memory killer killed a process that is no rank: {attempt.helpers_oom}")
    progress = {rank: observed.get_progress(attempt.run_started_at) for rank, observed in attempt.ranks.items()}
    states = {rank: _get_state(attempt, observed, rank in by_rank) for rank, observed in attempt.ranks.items()}
    return RunResult(
        state=_get_overall_state(attempt.stop_reason, by_rank),
        return_values={rank: loaded.value for rank, loaded in loaded_values.items() if loaded.error is None},
        failures=by_rank,
        root_cause=first if is_blame_certain else None,
        workers=tuple(observed.worker for observed in attempt.ranks.values()),
        worker_states=states,
        progress={rank: report for rank, report in progress.items() if report is not None},
        stacks={rank: text for rank, observed in attempt.ranks.items() if (text := get_stacks_or_state(observed))},
        collectives={} if have_all_returned else collectives,
        reason=explanation.sentence if explanation else _get_reason(attempt, failures, states, verdict),
        log_dir=attempt.log_dir,
        stopped_at=max((step for seen in attempt.ranks.values() if (step := seen.stopped_step) is not None), default=None),
        stop_cause=attempt.stop_cause,
        slow_rank=attempt.slow_rank,
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
    value: Any
    error: BaseException | None


def load_value(content: bytes | memoryview | OSError) -> LoadedValue:
    """Rebuild a return value, from a RETURNED message or its file. An OSError says that the file was unreadable."""
    kind = "unknown"
    try:
        if isinstance(content, OSError):
            raise content
        value = Unpacked(content)
        kind = value.about
        return LoadedValue(value.load(), None)
    except decoder.USER_ERRORS as error:  # from the code of the value's classes
        return LoadedValue(None, error if error is content else explain_unloadable_value(kind, error))


def _find_collective_verdict(attempt: AttemptObservations) -> CollectiveVerdict | None:
    """If a verdict has ended the attempt, a newer one counts only if it finds the same; it may name more ranks."""
    returned = [rank for rank, observed in attempt.ranks.items() if has_returned(attempt, observed)]
    verdict, final = find_verdict(get_all_collectives(attempt), returned), attempt.collective_verdict
    return verdict if final is None or (verdict is not None and verdict.finding == final.finding) else final


def get_all_collectives(attempt: AttemptObservations) -> dict[int, RankCollectives]:
    return {rank: observed.collectives for rank, observed in attempt.ranks.items() if observed.collectives is not None}


def _correct_collectives(attempt: AttemptObservations) -> None:
    """Mark the last collective of a rank that lost a peer as WAITING: for torch, it is completed even if it failed."""
    for observed in attempt.ranks.values():
        answer = observed.collectives
        lost_peer = _get_peer_error(observed) in (PeerErrorKind.CONNECTION_LOST, PeerErrorKind.PEER_TIMEOUT)
        if answer is not None and answer.collectives and lost_peer and observed.answer is not None:
            *others, last = answer.collectives
            place = last.place or format_raise_location(decoder.decode_exception(observed.answer.body)).strip(" ()")
            failed = replace(last, state=CollectiveState.WAITING, place=place)
            observed.collectives = replace(answer, collectives=(*others, failed))


def find_waiting_ranks(attempt: AttemptObservations) -> set[int]:
    """Return the ranks that timed out while they waited for a peer, and the silent ones that waited in a collective."""
    silent = {rank for rank in attempt.silent_ranks if is_in_collective(attempt.ranks[rank])}
    return silent | _find_ranks_with(attempt, PeerErrorKind.PEER_TIMEOUT)


def find_possible_victims(attempt: AttemptObservations) -> set[int]:
    """Return the ranks with a broken connection, to a peer or to another program. Call this before `drop_payloads`."""
    return _find_ranks_with(attempt, PeerErrorKind.POSSIBLY_PEER)


def _find_ranks_with(attempt: AttemptObservations, kind: PeerErrorKind) -> set[int]:
    return {rank for rank, observed in attempt.ranks.items() if _get_peer_error(observed) is kind}


def find_missing_ranks(attempt: AttemptObservations, result: RunResult[Any]) -> list[ProcessFailure]:
    """Return failures for the running ranks that were certainly in no collective, and so kept other nodes waiting."""
    at = attempt.stopped_at
    if at is None:
        return []
    running = _get_running(attempt, result.failures)
    missing = sorted(find_ranks_outside_collectives(running))
    return [build_hang(attempt, running[rank], at, "kept its peers on other nodes waiting") for rank in missing]


def _find_victims(attempt: AttemptObservations, failures: Failures) -> Failures:
    peer_errors = {rank: _get_peer_error(attempt.ranks[rank]) for rank in failures}
    deaths = [failure.elapsed for failure in failures.values() if not _has_exact_time(failure)]
    has_cause = bool(deaths) or any(kind in (None, PeerErrorKind.HINT) for kind in peer_errors.values())
    victims = {}
    for rank, failure in failures.items():
        kind = peer_errors[rank]
        is_hinted = kind is PeerErrorKind.HINT and any(death - DEATH_LAG_SECONDS <= failure.elapsed for death in deaths)
        # a later cause counts, too: a rank may close its connections before it raises
        if is_hinted or (kind is PeerErrorKind.POSSIBLY_PEER and has_cause):
            victims[rank] = replace(failure, is_secondary=True)
    return victims


def _get_peer_error(observed: RankObservations) -> PeerErrorKind | None:
    if observed.answer is None:
        return get_death_kind(observed)
    return classify_exception(observed.answer.body) if observed.answer.kind is not MessageKind.RETURNED else None


def _has_exact_time(failure: ProcessFailure) -> bool:
    """A death has none: the watcher notices it late."""
    return failure.exception is not None or failure.kind in (FailureKind.EXCEPTION, FailureKind.TIMEOUT)


def _is_explained(attempt: AttemptObservations, failures: Failures, verdict: CollectiveVerdict) -> bool:
    if attempt.stop_reason is not StopReason.FAILED or (attempt.silent_ranks and verdict.kind is not VerdictKind.MISMATCH):
        return False
    known = ((failure.is_secondary, failure.signal) for failure in failures.values())
    return verdict.explains(known, has_timed_out=_has_timed_out(attempt, failures))


def _has_timed_out(attempt: AttemptObservations, failures: Failures) -> bool:
    """Return whether a rank has failed because a peer was late."""
    return not failures.keys().isdisjoint(_find_ranks_with(attempt, PeerErrorKind.PEER_TIMEOUT))


def _blame_for_collective(attempt: AttemptObservations, failures: Failures, verdict: CollectiveVerdict) -> Failures:
    blamed = {rank: replace(failure, is_secondary=True) for rank, failure in failures.items()}
    at = attempt.ended_at if attempt.stopped_at is None else attempt.stopped_at
    for rank in attempt.ranks.keys() & verdict.blamed:  # other ranks have attempts of their own (scope="worker")
        observed, before = attempt.ranks[rank], failures.get(rank)
        if verdict.kind is VerdictKind.ABSENT and before is None and not has_returned(attempt, observed):
            blamed[rank] = build_hang(attempt, observed, at, verdict.evidence[rank])
        else:
            blamed[rank] = build_mismatch(attempt, observed, at, verdict.evidence[rank], before)
    return blamed


def _find_hangs(attempt: AttemptObservations, failures: Failures, verdict: CollectiveVerdict | None) -> Failures:
    """Return the failures of ranks that were silent for too long, or that made their peers time out."""
    at = attempt.stopped_at
    if at is None:
        return {}
    running = _get_running(attempt, failures)
    if attempt.silent_ranks:
        return _find_silent_ranks(attempt, at, running, verdict)
    if _has_timed_out(attempt, failures) and all(failure.is_secondary for failure in failures.values()):
        return {
            rank: build_hang(attempt, running[rank], at, "kept its peers waiting until they timed out")
            for rank in find_ranks_outside_collectives(running)
        }
    return {}


def _find_silent_ranks(
    attempt: AttemptObservations,
    stopped_at: float,
    running: Mapping[int, RankObservations],
    verdict: CollectiveVerdict | None,
) -> Failures:
    """Return HANG failures for the silent ranks, unless they wait for another one, and for those that caused the silence."""
    silent = set(attempt.silent_ranks.keys() & running.keys())
    evidence = {} if verdict is None else {rank: verdict.evidence[rank] for rank in running.keys() & verdict.blamed}
    to_blame = set(evidence) or find_cause_of_silence(running, silent) or silent
    hangs: Failures = {}
    for rank in silent:
        last_beat, progress = attempt.silent_ranks[rank], running[rank].get_progress(attempt.run_started_at)
        is_victim = rank not in to_blame
        why = texts.format_silence(stopped_at - last_beat, None if is_victim else attempt.heartbeat_timeout, progress)
        if rank in evidence:
            why += f"; it {evidence[rank]}"
        hangs[rank] = build_hang(attempt, running[rank], last_beat, why, is_secondary=is_victim)
    for rank in to_blame - silent:
        hangs[rank] = build_hang(attempt, running[rank], stopped_at, evidence.get(rank, "kept its peers waiting"))
    return hangs


def _get_running(attempt: AttemptObservations, failures: Mapping[int, ProcessFailure]) -> dict[int, RankObservations]:
    """Return the ranks that were running when they were stopped, and the silent ones, even if they returned after that."""
    return {
        rank: observed
        for rank, observed in attempt.ranks.items()
        if (rank not in failures or failures[rank].kind is FailureKind.TIMEOUT)
        and (rank in attempt.silent_ranks or (observed.was_ready and not has_returned(attempt, observed)))
    }


def _get_order_of_blame(attempt: AttemptObservations, failure: ProcessFailure) -> tuple[bool, bool, float]:
    stopped = math.inf if attempt.stopped_at is None else attempt.stopped_at - attempt.run_started_at
    if failure.kind is FailureKind.MISMATCH:  # blamed by the verdict, even if the rank has failed after the others
        return False, failure.is_secondary, stopped
    lag = 0.0 if _has_exact_time(failure) else DEATH_LAG_SECONDS
    return failure.elapsed - lag > stopped, failure.is_secondary, failure.elapsed


def _get_state(attempt: AttemptObservations, observed: RankObservations, has_failed: bool) -> WorkerState:
    if has_failed:
        return WorkerState.FAILED
    return WorkerState.SUCCEEDED if has_returned(attempt, observed) else WorkerState.STOPPED


def _get_overall_state(stop_reason: StopReason | None, failures: Mapping[int, ProcessFailure]) -> WorkerState:
    if stop_reason is StopReason.INTERRUPTED or (stop_reason is StopReason.CANCELLED_BY_JOB and not failures):
        return WorkerState.STOPPED
    return WorkerState.SUCCEEDED if stop_reason is StopReason.SUCCEEDED and not failures else WorkerState.FAILED


def format_interrupt(signum: int, cause: InterruptCause) -> str:
    if cause is InterruptCause.STOP:
        return "the run was stopped: terminate() was called"
    if cause is InterruptCause.STOP_REQUEST:  # while no rank was running
        return "the run was stopped: a stop was requested"
    return texts.STOPPED_AT_EXIT if cause is InterruptCause.PROGRAM_END else texts.format_signal(signum)


def _get_reason(
    attempt: AttemptObservations,
    failures: Failures,
    states: Mapping[int, WorkerState],
    verdict: CollectiveVerdict | None,
) -> str:
    """Return a sentence about the time limit or the interrupt that ended the attempt, else an empty text."""
    unfinished = [rank for rank, state in states.items() if state is not WorkerState.SUCCEEDED]
    if attempt.stop_reason is StopReason.TIMED_OUT:
        if attempt.stop_timeout is not None:
            return texts.format_stop_timeout(attempt.stop_timeout, attempt.stop_cause, unfinished)
        unused = attempt.unused_heartbeat_timeout
        note = "" if unused is None else f"; {texts.format_unused_heartbeat_timeout(unused)}"
        # A rank that is not in the collective is named, but not blamed: healthy ranks, too, reach it at different times.
        if verdict is not None:
            return f"{texts.format_timeout(attempt.passed_limit, unfinished)}; {verdict.sentence}{note}"
        stragglers = find_stragglers(_get_running(attempt, failures))
        return texts.format_timeout(attempt.passed_limit, unfinished, stragglers) + note
    # Other nodes may have stopped the ranks just before the signal came to this process.
    if attempt.stop_reason in (StopReason.INTERRUPTED, StopReason.CANCELLED_BY_JOB) and attempt.signum is not None:
        text = format_interrupt(attempt.signum, attempt.interrupt_cause)
        if attempt.stop_timeout is not None:
            text = texts.format_stop_timeout(attempt.stop_timeout, attempt.stop_cause, unfinished)
        is_stalled = verdict is not None and (verdict.kind is VerdictKind.MISMATCH or verdict.seconds >= STALL_SECONDS)
        return f"{text}; {verdict.sentence}" if verdict is not None and is_stalled else text
    return ""

"""Merges the results of several restart groups into the result of a run. The functions of this module are pure.

With scope="worker", each rank is a restart group of its own, and has its own result.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mpwatch.results.failure import ProcessFailure
from mpwatch.results.model import WorkerState
from mpwatch.results.report import format_stop_timeout, format_timeout, format_unused_heartbeat_timeout
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.machine.transitions import StopReason

T = TypeVar("T")
V = TypeVar("V")


def merge_results(
    parts: Sequence[tuple[AttemptObservations, RunResult[T]]], final: Iterable[RunResult[T]], *, keep_going: bool
) -> RunResult[T]:
    """Merge the results of the ranks that were restarted alone. `final` are those after which there can be no restart.

    The root cause is the earliest one of those, else the earliest of all. If one of several has timed out, there is none.
    """
    results = [result for _, result in parts]
    if len(parts) == 1:
        return replace(results[0], keep_going=keep_going)
    merged = merge_results_of_calls(results)
    late = [(observations, result) for observations, result in parts if observations.stop_reason is StopReason.TIMED_OUT]
    return replace(
        merged,
        root_cause=None if late else _find_earliest_cause(final) or merged.root_cause,
        keep_going=keep_going,
        reason=_describe_stop_timeout(parts) or _describe_timeout(late) or merged.reason,
    )


def merge_results_of_calls(results: Sequence[RunResult[T]]) -> RunResult[T]:
    """Merge the results of one or more calls into one result. Each rank belongs to only one of the calls."""
    return RunResult(
        state=_merge_states(results),
        return_values=_merge_dicts(result.return_values for result in results),
        failures=_merge_dicts(result.failures for result in results),
        root_cause=_find_earliest_cause(results),
        workers=tuple(sorted((worker for result in results for worker in result.workers), key=lambda worker: worker.rank)),
        worker_states=_merge_dicts(result.worker_states for result in results),
        progress=_merge_dicts(result.progress for result in results),
        stacks=_merge_dicts(result.stacks for result in results),
        collectives=_merge_dicts(result.collectives for result in results),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
        log_dir=results[0].log_dir,
        stopped_at=max((result.stopped_at for result in results if result.stopped_at is not None), default=None),
        stop_cause=next((result.stop_cause for result in results if result.stop_cause), ""),
        slow_rank=max(
            (result.slow_rank for result in results if result.slow_rank is not None),
            key=lambda lateness: lateness.share,
            default=None,
        ),
        reason=next((result.reason for result in results if result.reason), ""),
    )


def _merge_dicts(dicts: Iterable[Mapping[int, V]]) -> dict[int, V]:
    return dict(sorted((item for one in dicts for item in one.items()), key=lambda item: item[0]))


def _merge_states(results: Sequence[RunResult[T]]) -> WorkerState:
    states = {result.state for result in results}
    return next(state for state in (WorkerState.FAILED, WorkerState.STOPPED, WorkerState.SUCCEEDED) if state in states)


def _find_earliest_cause(results: Iterable[RunResult[Any]]) -> ProcessFailure | None:
    causes = (result.root_cause for result in results if result.root_cause is not None)
    return min(causes, key=lambda cause: cause.elapsed, default=None)


def _describe_timeout(late: Sequence[tuple[AttemptObservations, RunResult[T]]]) -> str:
    if not late:
        return ""
    text = format_timeout(late[0][0].passed_limit, _list_unfinished(late))
    unused = {observations.unused_heartbeat_timeout for observations, _ in late}
    notes = [format_unused_heartbeat_timeout(limit) for limit in unused if limit is not None] if len(unused) == 1 else []
    return "; ".join([text, *notes])


def _describe_stop_timeout(parts: Sequence[tuple[AttemptObservations, RunResult[T]]]) -> str:
    overdue = [part for part in parts if part[0].stop_timeout is not None]
    for observations, _ in overdue[:1]:
        return format_stop_timeout(observations.stop_timeout or 0.0, observations.stop_cause, _list_unfinished(overdue))
    return ""


def _list_unfinished(parts: Sequence[tuple[AttemptObservations, RunResult[T]]]) -> list[int]:
    states = _merge_dicts(result.worker_states for _, result in parts)
    return [rank for rank, state in states.items() if state is not WorkerState.SUCCEEDED]

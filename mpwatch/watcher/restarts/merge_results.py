"""One result of several: of ranks that were watched each for itself. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mpwatch.results.model import ProcessFailure, WorkerState
from mpwatch.results.report import timeout_text
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.machine.transitions import StopReason

T = TypeVar("T")
V = TypeVar("V")


def merged(parts: Sequence[tuple[AttemptObservations, RunResult[T]]], waiting: Collection[int] = ()) -> RunResult[T]:
    """All of these together: values all or nothing, and of several root causes the earliest. One that ended nothing, since
    its rank was `waiting` to be started again, is the cause only if there is no other.
    """
    results = [result for _, result in parts]
    if len(parts) == 1:
        return results[0]
    final = [result for observations, result in parts if min(observations.ranks) not in waiting]
    late = [(observations, result) for observations, result in parts if observations.verdict is StopReason.TIMED_OUT]
    failures = _together(result.failures for result in results)
    states = _together(result.worker_states for result in results)
    state = _state_of(results)
    return RunResult(
        state=state,
        return_values=_together(result.return_values for result in results) if state is WorkerState.SUCCEEDED else {},
        failures=failures,
        root_cause=None if late else _earliest(final) or _earliest(results),
        workers=tuple(sorted((worker for result in results for worker in result.workers), key=lambda worker: worker.rank)),
        worker_states=states,
        progress=_together(result.progress for result in results),
        stacks=_together(result.stacks for result in results),
        helpers_oom="; ".join(dict.fromkeys(result.helpers_oom for result in results if result.helpers_oom)),
        log_dir=results[0].log_dir,
        reason=_timeout(late) or next((result.reason for result in results if result.reason), ""),
    )


def _together(maps: Iterable[Mapping[int, V]]) -> dict[int, V]:
    return dict(sorted((item for one in maps for item in one.items()), key=lambda item: item[0]))


def _state_of(results: Sequence[RunResult[T]]) -> WorkerState:
    states = {result.state for result in results}
    return next(state for state in (WorkerState.FAILED, WorkerState.STOPPED, WorkerState.SUCCEEDED) if state in states)


def _earliest(results: Iterable[RunResult[Any]]) -> ProcessFailure | None:
    causes = (result.root_cause for result in results if result.root_cause is not None)
    return min(causes, key=lambda cause: cause.elapsed, default=None)


def _timeout(late: Sequence[tuple[AttemptObservations, RunResult[T]]]) -> str:
    if not late:
        return ""
    states = _together(result.worker_states for _, result in late)
    return timeout_text(late[0][0].timeout or 0.0, [rank for rank in states if states[rank] is not WorkerState.SUCCEEDED])

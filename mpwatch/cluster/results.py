"""Merge the results of all nodes into one result. All functions are pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import mpwatch
from mpwatch.results.report import make_restart_notes

V = TypeVar("V")
# If the nodes have ended in several states, the job has the first of these.
STATES = (mpwatch.WorkerState.FAILED, mpwatch.WorkerState.STOPPED, mpwatch.WorkerState.SUCCEEDED)
OTHERS_HAVE_ENDED = "the ranks of the other nodes had ended"


def merge_results(results: Sequence[mpwatch.RunResult[Any]]) -> mpwatch.RunResult[Any]:
    results = [result for result in results if result.workers] or results  # a node may have come too late for the job
    failures: dict[int, mpwatch.ProcessFailure] = {}
    for result in results:
        own = {worker.rank for worker in result.workers}
        # a failure that another node has reported has no exception
        failures |= {rank: failure for rank, failure in result.failures.items() if rank in own or rank not in failures}
    cause = next((result.root_cause for result in results if result.root_cause is not None), None)
    states = [result.state for result in results]
    return mpwatch.RunResult(
        state=next(state for state in STATES if state in states),
        return_values=_merge(result.return_values for result in results),
        failures=dict(sorted(failures.items())),
        root_cause=None if cause is None else failures.get(cause.rank, cause),
        workers=tuple(sorted((worker for result in results for worker in result.workers), key=lambda worker: worker.rank)),
        worker_states=_merge_states(results),
        progress=_merge(result.progress for result in results),
        stacks=_merge(result.stacks for result in results),
        collectives=_merge(result.collectives for result in results),
        reason=_first(result.reason for result in results),
        log_dir=_first(result.log_dir for result in results),
        attempts=max((result.attempts for result in results), key=len),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
        stopped_at=max((result.stopped_at for result in results if result.stopped_at is not None), default=None),
        stop_cause=_first(result.stop_cause for result in results),
        elapsed=max(result.elapsed for result in results),
        events=tuple(sorted((event for result in results for event in result.events), key=lambda event: event.time)),
    )


def add_losses(result: mpwatch.RunResult[Any], losses: Iterable[mpwatch.ProcessFailure]) -> mpwatch.RunResult[Any]:
    """Turn a success into a failure if the ranks of a lost node are not in it: it can be lost while it sends its outcome."""
    known = {worker.rank for worker in result.workers}
    missing = {failure.rank: failure for failure in losses if failure.rank not in known}
    if not missing or result.state is not mpwatch.WorkerState.SUCCEEDED:
        return result
    return replace(
        result,
        state=mpwatch.WorkerState.FAILED,
        failures=dict(sorted(missing.items())),
        root_cause=next(iter(missing.values())),
        worker_states={**result.worker_states, **dict.fromkeys(missing, mpwatch.WorkerState.FAILED)},
        notes=(*result.notes, *make_restart_notes(OTHERS_HAVE_ENDED, result.attempts)),
    )


def make_lost_result(losses: Sequence[mpwatch.ProcessFailure]) -> mpwatch.RunResult[Any]:
    """Return the result of a job whose nodes were all lost. The node that was lost first is the root cause."""
    failures = {loss.rank: loss for loss in sorted(losses, key=lambda loss: loss.rank)}
    return mpwatch.RunResult(
        state=mpwatch.WorkerState.FAILED,
        failures=failures,
        root_cause=losses[0],
        worker_states=dict.fromkeys(failures, mpwatch.WorkerState.FAILED),
    )


def _merge(parts: Iterable[Mapping[int, V]]) -> dict[int, V]:
    return dict(sorted((item for part in parts for item in part.items()), key=lambda item: item[0]))


def _merge_states(results: Sequence[mpwatch.RunResult[Any]]) -> dict[int, mpwatch.WorkerState]:
    """Return the state of each rank. If two nodes report different states for a rank, use the state from the rank's node."""
    states = _merge(result.worker_states for result in results)
    for result in results:
        own = {worker.rank for worker in result.workers}
        states |= {rank: state for rank, state in result.worker_states.items() if rank in own}
    return states


def _first(texts: Iterable[str]) -> str:
    return next(filter(None, texts), "")

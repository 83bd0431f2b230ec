"""Merge the results of all nodes into one result. All functions are pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import mpwatch
from mpwatch.results.report import make_restart_notes
from mpwatch.watcher.restarts.merge_results import merge_results_of_calls

OTHERS_HAVE_ENDED = "the ranks of the other nodes had ended"


def merge_results(results: Sequence[mpwatch.RunResult[Any]]) -> mpwatch.RunResult[Any]:
    results = [result for result in results if result.workers] or results  # a node may have come too late for the job
    merged = merge_results_of_calls(results)
    # Of the failure of another node's rank a node has no exception, and of its state it may know less.
    own = {worker.rank: result for result in results for worker in result.workers}
    failures = {**merged.failures, **{rank: own[rank].failures[rank] for rank in own if rank in own[rank].failures}}
    states = {rank: own[rank].worker_states[rank] for rank in own if rank in own[rank].worker_states}
    cause = next((result.root_cause for result in results if result.root_cause is not None), None)
    return replace(
        merged,
        failures=failures,
        root_cause=None if cause is None else failures.get(cause.rank, cause),
        worker_states={**merged.worker_states, **states},
        attempts=max((result.attempts for result in results), key=len),
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

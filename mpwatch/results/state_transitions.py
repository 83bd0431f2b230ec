"""The states of a group of ranks, and how one leads to another, as data: the table that the README's diagram is drawn from.

The group changes its state as a unit, and each change is a StateChanged event. The words are those of torch's elastic agent.
"""

from collections.abc import Mapping

from mpwatch.results.model import WorkerState

_S = WorkerState
ENDS = (_S.SUCCEEDED, _S.FAILED, _S.STOPPED)
TRANSITIONS: Mapping[WorkerState, Mapping[WorkerState, str]] = {
    _S.UNKNOWN: {
        _S.INIT: "there is a process for each rank",
        _S.FAILED: "one cannot be started",
        _S.STOPPED: "interrupted before that",
    },
    _S.INIT: {
        _S.HEALTHY: "all ranks are ready",
        _S.UNHEALTHY: "a rank fails, or all are stopped",
        _S.FAILED: "a rank cannot be started again",
        _S.STOPPED: "the watcher itself is struck",
    },
    _S.HEALTHY: {
        _S.INIT: "all have returned, but one of another node has failed",
        _S.UNHEALTHY: "a rank is late with its heartbeat, or fails, or all are stopped",
        _S.SUCCEEDED: "all have returned",
        _S.FAILED: "what one returned cannot be rebuilt",
        _S.STOPPED: "a WorkerGroup is closed",
    },
    _S.UNHEALTHY: {
        _S.HEALTHY: "the late rank is heard of, or the failed one was replaced",
        _S.INIT: "all have ended, and are started again",
        _S.SUCCEEDED: "all have returned after all",
        _S.FAILED: "a rank has failed, and is not started again",
        _S.STOPPED: "interrupted, or a WorkerGroup is closed",
    },
    _S.SUCCEEDED: {},
    _S.FAILED: {},
    _S.STOPPED: {},
}


def check_change(before: WorkerState, after: WorkerState) -> None:
    """Raises ValueError if the one never follows the other: an error in mpwatch."""
    if after not in TRANSITIONS[before]:
        raise ValueError(f"the state of a group does not change from {before.name} to {after.name}")


def diagram() -> str:
    """The table as a diagram in the language of Mermaid, which GitHub draws."""
    changes = [(before, after, why) for before, afters in TRANSITIONS.items() for after, why in afters.items()]
    arrows = [f"    {before.name} --> {after.name}: {why}" for before, after, why in changes]
    ends = [f"    {end.name} --> [*]" for end in ENDS]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {_S.UNKNOWN.name}", *arrows, *ends])

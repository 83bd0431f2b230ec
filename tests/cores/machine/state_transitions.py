"""The legal transitions of the state of a run, from which the diagram of states in ARCHITECTURE.md is made."""

from mpwatch import WorkerState

_S = WorkerState
ENDS = (_S.SUCCEEDED, _S.FAILED, _S.STOPPED)
TRANSITIONS = {
    _S.UNKNOWN: {
        _S.INIT: "there is a process for each rank",
        _S.UNHEALTHY: "all are stopped as soon as they start",
        _S.FAILED: "a rank cannot be started",
        _S.STOPPED: "stopped before that",
    },
    _S.INIT: {
        _S.HEALTHY: "all ranks are ready",
        _S.UNHEALTHY: "a rank fails, or all are stopped",
        _S.FAILED: "a rank cannot be restarted",
        _S.STOPPED: "the watcher itself fails",
    },
    _S.HEALTHY: {
        _S.INIT: "all have returned, but a rank on another node has failed",
        _S.UNHEALTHY: "a rank is late with its heartbeat, or fails, or all are stopped",
        _S.SUCCEEDED: "all have returned",
        _S.FAILED: "a return value cannot be rebuilt",
        _S.STOPPED: "a WorkerGroup is closed",
    },
    _S.UNHEALTHY: {
        _S.HEALTHY: "the late rank sends a heartbeat, or the failed rank was replaced",
        _S.INIT: "all have ended, and are restarted",
        _S.SUCCEEDED: "all have returned after all",
        _S.FAILED: "a rank has failed, and is not restarted",
        _S.STOPPED: "stopped, or a WorkerGroup is closed",
    },
    _S.SUCCEEDED: {},
    _S.FAILED: {},
    _S.STOPPED: {},
}


def draw_diagram():
    """Return the table of transitions as a Mermaid state diagram, which GitHub can show."""
    changes = [(before, after, why) for before, afters in TRANSITIONS.items() for after, why in afters.items()]
    arrows = [f"    {before.name} --> {after.name}: {why}" for before, after, why in changes]
    ends = [f"    {end.name} --> [*]" for end in ENDS]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {_S.UNKNOWN.name}", *arrows, *ends])

"""What happens in a run, as data, and observers of it: see `on_event` of `mpwatch.run`."""

from .kinds import (
    CallStarted,
    Event,
    HeartbeatLost,
    Restarting,
    RunEnded,
    RunStarted,
    StateChanged,
    WorkerEnded,
    WorkerFailed,
    WorkerReady,
    WorkerStarted,
    WorkerStopped,
    WorkerSucceeded,
)

__all__ = [
    "CallStarted",
    "Event",
    "HeartbeatLost",
    "Restarting",
    "RunEnded",
    "RunStarted",
    "StateChanged",
    "WorkerEnded",
    "WorkerFailed",
    "WorkerReady",
    "WorkerStarted",
    "WorkerStopped",
    "WorkerSucceeded",
]

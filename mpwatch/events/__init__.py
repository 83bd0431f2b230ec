"""Events of a run, and observers of events. See `on_event` of `mpwatch.run`."""

from mpwatch.events.chrome_trace import write_chrome_trace
from mpwatch.events.jsonl import JsonLines
from mpwatch.events.types import (
    CallStarted,
    CollectivesRecorded,
    Event,
    HeartbeatLate,
    Progressed,
    RendezvousCompleted,
    Restarting,
    RunEnded,
    RunStarted,
    SlowRank,
    StateChanged,
    Stopping,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarted,
    WorkerStopped,
    WorkerSucceeded,
)

__all__ = [
    "CallStarted",
    "CollectivesRecorded",
    "Event",
    "HeartbeatLate",
    "JsonLines",
    "Progressed",
    "RendezvousCompleted",
    "Restarting",
    "RunEnded",
    "RunStarted",
    "SlowRank",
    "StateChanged",
    "Stopping",
    "WorkerExited",
    "WorkerFailed",
    "WorkerReady",
    "WorkerStarted",
    "WorkerStopped",
    "WorkerSucceeded",
    "write_chrome_trace",
]

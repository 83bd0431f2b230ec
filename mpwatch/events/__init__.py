"""Events of a run, and observers of events. See `on_event` of `mpwatch.run`.

`import mpwatch.events` imports the classes of events. The module of an observer is imported when a program first uses the
observer.
"""

from importlib import import_module

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
    StateChanged,
    Stopping,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarted,
    WorkerStopped,
    WorkerSucceeded,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpwatch.events.chrome_trace import write_chrome_trace
    from mpwatch.events.jsonl import JsonLines

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

_HOME = {"JsonLines": ".jsonl", "write_chrome_trace": ".chrome_trace"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Makes the lanes of a timeline from events: when each rank started, ran a function, was restarted and exited. Pure.

The events are taken in the order of their times, so spans of a lane do not overlap, except those inside a process.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mpwatch.events.types import (
    CallStarted,
    CollectivesRecorded,
    Event,
    HeartbeatLate,
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
from mpwatch.results.failure import FailureKind

UNFINISHED = "unfinished"
OUTCOMES: dict[type[Event], str] = {WorkerSucceeded: "succeeded", WorkerFailed: "failed", WorkerStopped: "stopped"}


@dataclass
class Span:
    """What a timeline draws as a bar. All times here are seconds of CLOCK_MONOTONIC."""

    kind: str
    """ "process", and inside it "start-up" and "call"; "restart" is the wait between two processes."""
    name: str
    start: float
    end: float = math.inf
    outcome: str = ""
    """Of a call or a process: one of OUTCOMES, or UNFINISHED."""
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Lane:
    spans: list[Span] = field(default_factory=list)
    marks: list[Event] = field(default_factory=list)
    latest: dict[str, Span] = field(default_factory=dict)
    """The latest span of each kind."""
    call: str = ""
    """Of a rank: the name of the call that begins when the rank is ready."""

    def begin(self, kind: str, name: str, at: float, outcome: str = "", **args: Any) -> None:
        self.latest[kind] = Span(kind, name, at, outcome=outcome, args=args)
        self.spans.append(self.latest[kind])

    def is_open(self, kind: str) -> bool:
        return kind in self.latest and self.latest[kind].end == math.inf

    def end(self, at: float, *kinds: str) -> None:
        """End the open spans of these kinds, or of all kinds."""
        for kind in kinds or self.latest:
            if self.is_open(kind):
                self.latest[kind].end = at

    def add(self, event: Event, call_name: str) -> None:
        """Add an event of this rank. `call_name`: of the run's latest call, which restarted ranks make again."""
        at = event.monotonic
        match event:
            case WorkerStarted():
                self.end(at)
                self.begin("process", f"attempt {event.attempt}", at, UNFINISHED, pid=event.pid, attempt=event.attempt)
                self.begin("start-up", "start-up", at)
            case WorkerReady():
                self.end(at, "start-up")
                self._begin_call(at)
            case CallStarted():
                self.call = call_name
                if not self.is_open("start-up"):
                    self._begin_call(at)
            case RendezvousCompleted():
                self.call = call_name  # the ranks may have changed
            case WorkerSucceeded() | WorkerFailed() | WorkerStopped():
                # The time of a hang is that of the last heartbeat. The process still ran after it.
                is_hang = isinstance(event, WorkerFailed) and event.failure.kind is FailureKind.HANG
                self._end_call(at if not is_hang else math.inf, OUTCOMES[type(event)])
            case WorkerExited():
                self.end(at)
            case Restarting():
                self.end(at)
                self.begin("restart", "waiting to be restarted", at, delay=event.delay)
                self.call = call_name
        if isinstance(event, HeartbeatLate | SlowRank | WorkerFailed | WorkerExited | CollectivesRecorded):
            self.marks.append(event)

    def _begin_call(self, at: float) -> None:
        if self.call and self.is_open("process"):
            self.end(at, "call")
            self.begin("call", self.call, at, UNFINISHED)
            self.call = ""

    def _end_call(self, at: float, outcome: str) -> None:
        self.call = ""
        if "process" in self.latest:
            self.latest["process"].outcome = outcome
        if "call" in self.latest and self.latest["call"].outcome == UNFINISHED:
            self.latest["call"].outcome = outcome
            self.end(at, "call")


@dataclass
class Timeline:
    run_id: str
    start: float
    until: float
    started: RunStarted | None = None
    states: Lane = field(default_factory=Lane)
    """The states of the run. Its marks are events that concern all ranks."""
    lanes: dict[int, Lane] = field(default_factory=dict)
    calls: int = 0

    def add(self, event: Event) -> None:
        self.until = event.monotonic
        match event:
            case RunStarted():
                self.started = event
            case StateChanged():
                self.states.end(event.monotonic)
                self.states.begin("state", event.after.name, event.monotonic)
            case RunEnded() | Stopping():
                self.states.marks.append(event)
            case _:
                self.calls += isinstance(event, CallStarted)
                name = self.started.fn if self.started is not None and self.started.fn else f"call {self.calls}"
                for rank in event.ranks:
                    self.lanes.setdefault(rank, Lane()).add(event, name if self.calls else "")
        if isinstance(event, Restarting | RendezvousCompleted):
            self.states.marks.append(event)


def timelines(events: Iterable[Event]) -> list[Timeline]:
    """Return a timeline for each run, in the order of their first events."""
    found: dict[str, Timeline] = {}
    for event in sorted(events, key=lambda event: event.monotonic):
        at = event.monotonic
        found.setdefault(event.run_id, Timeline(event.run_id, start=at, until=at)).add(event)
    for run in found.values():
        for lane in (run.states, *run.lanes.values()):
            lane.end(run.until)
    return list(found.values())

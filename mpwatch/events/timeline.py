"""Makes the lanes of a timeline from events: when each rank started, ran a function, was restarted and exited. Pure.

Events may be missing, or out of order. The spans of a rank never overlap, but those of a process are inside its span.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from mpwatch.events.types import (
    CallStarted,
    CollectivesRecorded,
    Event,
    HeartbeatLate,
    RendezvousCompleted,
    Restarting,
    RunEnded,
    RunStarted,
    StateChanged,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarted,
    WorkerStopped,
    WorkerSucceeded,
)
from mpwatch.results.failure import FailureKind
from mpwatch.results.model import format_end

OUTCOMES: dict[type[Event], str] = {WorkerSucceeded: "succeeded", WorkerFailed: "failed", WorkerStopped: "stopped"}


class Span(NamedTuple):
    """What a timeline draws as a bar. All times here are seconds of CLOCK_MONOTONIC."""

    kind: str
    """ "process", and inside it "start-up" and "call"; "restart" is the wait between two processes."""
    name: str
    start: float
    end: float
    outcome: str = ""
    """Of a call or a process: one of OUTCOMES, or "unfinished"."""
    args: Mapping[str, Any] = {}


@dataclass(kw_only=True)
class CallSpan:
    name: str
    start: float
    end: float | None = None  # not known: until the next call, or the end of the process
    outcome: str = ""


@dataclass(kw_only=True)
class Process:
    attempt: int
    start: float = -math.inf  # not known
    pid: int | None = None
    ready: float | None = None
    calls: list[CallSpan] = field(default_factory=list)
    end: float | None = None
    exited: WorkerExited | None = None
    outcome: str = ""

    def spans(self, start: float, end: float) -> Iterator[Span]:
        outcome = self.outcome or "unfinished"
        args = {"pid": self.pid, "attempt": self.attempt, "outcome": outcome}
        args |= {"exit_code": self.exited.exit_code} if self.exited is not None else {}
        yield Span("process", f"attempt {self.attempt}", start, end, outcome, args)
        ready = end if self.ready is None else min(max(start, self.ready), end)
        if ready > start:
            yield Span("start-up", "start-up", start, ready)
        for call, following in zip_longest(self.calls, self.calls[1:]):
            began = min(max(ready, call.start), end)
            limit = end if following is None else min(end, following.start)
            ready = max(began, min(end, limit if call.end is None else call.end))
            yield Span("call", call.name, began, ready, call.outcome or outcome, {"outcome": call.outcome or outcome})


@dataclass(kw_only=True)
class Lane:
    """One rank: its processes and the delays before its restarts, its late heartbeats and failures, and its collectives."""

    blocks: list[Process | Restarting] = field(default_factory=list)
    marks: list[HeartbeatLate | WorkerFailed] = field(default_factory=list)
    collectives: list[CollectivesRecorded] = field(default_factory=list)
    call: str = ""  # that begins when the rank is ready

    @property
    def processes(self) -> list[Process]:
        return [block for block in self.blocks if isinstance(block, Process)]

    def spans(self, start: float, until: float) -> Iterator[Span]:
        for block, following in zip_longest(self.blocks, self.blocks[1:]):
            start = max(start, _start_of(block))
            limit = until if following is None else min(until, _start_of(following))
            if isinstance(block, Restarting):
                end = max(start, min(start + block.delay, limit))
                yield Span("restart", "waiting to be restarted", start, end, args=restart_args(block))
            else:
                end = max(start, limit if block.end is None else block.end)
                yield from block.spans(start, end)
            start = end

    def add(self, event: Event, call_name: str) -> None:
        """`call_name`: of the run's latest call, which restarted ranks make again."""
        match event:
            case WorkerStarted():
                self._close(event.monotonic)
                self.blocks.append(Process(attempt=event.attempt, start=event.monotonic, pid=event.pid))
            case WorkerReady():
                process = self._find_or_add(event)
                process.ready = event.monotonic
                if self.call:
                    process.calls.append(CallSpan(name=self.call, start=event.monotonic))
                self.call = ""
            case CallStarted():
                self.call = call_name
                last = self.blocks[-1] if self.blocks else None
                if isinstance(last, Process) and last.end is None and last.ready is not None:
                    last.calls.append(CallSpan(name=call_name, start=event.monotonic))
                    self.call = ""
            case RendezvousCompleted():
                self.call = call_name  # the ranks may have changed
            case HeartbeatLate():
                self.marks.append(event)
            case CollectivesRecorded():
                self.collectives.append(event)
            case WorkerSucceeded() | WorkerFailed() | WorkerStopped():
                if isinstance(event, WorkerFailed):
                    self.marks.append(event)
                self._end_call(event)
            case WorkerExited():
                process = self._find_or_add(event)
                process.exited, process.end, process.pid = event, event.monotonic, event.pid or process.pid
            case Restarting():
                self._close(event.monotonic)
                self.blocks.append(event)
                self.call = call_name

    def _find(self, event: Event) -> Process | None:
        return next((process for process in reversed(self.processes) if process.attempt == event.attempt), None)

    def _find_or_add(self, event: Event) -> Process:
        process = self._find(event)
        if process is None:
            process = Process(attempt=event.attempt, ready=-math.inf)
            self.blocks.append(process)
        return process

    def _close(self, at: float) -> None:
        if self.blocks and isinstance(last := self.blocks[-1], Process) and last.end is None:
            last.end = at

    def _end_call(self, event: Event) -> None:
        self.call = ""
        if (process := self._find(event)) is None:
            return  # it could not be started
        process.outcome = OUTCOMES[type(event)]
        if process.calls and process.calls[-1].end is None:
            # The time of a hang is that of the last heartbeat. The process still ran after it.
            hangs = isinstance(event, WorkerFailed) and event.failure.kind is FailureKind.HANG
            process.calls[-1].end = None if hangs else event.monotonic
            process.calls[-1].outcome = process.outcome


@dataclass(kw_only=True)
class Timeline:
    run_id: str
    until: float
    started: RunStarted | None = None
    ended: RunEnded | None = None
    states: list[StateChanged] = field(default_factory=list)
    restarts: list[Restarting] = field(default_factory=list)
    rendezvous: list[RendezvousCompleted] = field(default_factory=list)
    lanes: dict[int, Lane] = field(default_factory=dict)
    calls: int = 0

    def add(self, event: Event) -> None:
        self.until = max(self.until, event.monotonic)
        match event:
            case RunStarted():
                self.started = event
            case RunEnded():
                self.ended = event
            case StateChanged():
                self.states.append(event)
            case _:
                self.restarts += [event] if isinstance(event, Restarting) else []
                self.rendezvous += [event] if isinstance(event, RendezvousCompleted) else []
                self.calls += isinstance(event, CallStarted)
                name = self.started.fn if self.started is not None and self.started.fn else f"call {self.calls}"
                for rank in event.ranks:
                    self.lanes.setdefault(rank, Lane()).add(event, name if self.calls else "")


def timelines(events: Sequence[Event]) -> list[Timeline]:
    """Return a timeline for each run, in the order of their first events."""
    found: dict[str, Timeline] = {}
    for event in events:
        found.setdefault(event.run_id, Timeline(run_id=event.run_id, until=event.monotonic)).add(event)
    return list(found.values())


def restart_args(restart: Restarting) -> dict[str, Any]:
    cause = format_end(restart.cause, restart.reason)
    return {"cause": cause, "delay": restart.delay, "restarts_left": restart.restarts_left}


def _start_of(block: Process | Restarting) -> float:
    return block.start if isinstance(block, Process) else block.monotonic

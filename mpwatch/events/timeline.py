"""When which rank lived, was called and waited, put together from a run's events: what trace.py draws. Pure.

Events come in the order in which they became known, which is not that of their times, and some may be missing: a run was cut
off, or somebody kept only a part. What is made of them is ordered all the same: the spans of a rank follow one another, and
a call lies within its rank's life.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from mpwatch.events.types import (
    CallStarted,
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
from mpwatch.results.model import FailureKind

OUTCOMES: dict[type[Event], str] = {WorkerSucceeded: "succeeded", WorkerFailed: "failed", WorkerStopped: "stopped"}


@dataclass(kw_only=True)
class CallSpan:
    """A function at work in a rank."""

    name: str
    start: float
    """This and all other times: by CLOCK_MONOTONIC, in seconds."""
    end: float | None = None
    """None if it is not known: it lasted until the next call, or as long as the process."""
    outcome: str = ""
    """One of OUTCOMES; empty if it is not known."""


@dataclass(kw_only=True)
class ProcessSpan:
    """A process of a rank, from its start to its end."""

    attempt: int
    start: float
    pid: int | None = None
    ready: float | None = None
    calls: list[CallSpan] = field(default_factory=list)
    end: float | None = None
    ended: WorkerExited | None = None
    outcome: str = ""


@dataclass(kw_only=True)
class Lane:
    """One rank: its lives, and its waits to be started anew; and what happened to it at one instant."""

    blocks: list[ProcessSpan | Restarting] = field(default_factory=list)
    marks: list[HeartbeatLate | WorkerFailed] = field(default_factory=list)
    call: str = ""
    """The name of what is to be called as soon as the rank is ready, if anything is."""

    def known_life(self, event: Event) -> ProcessSpan | None:
        """The life that this is about, if anything was told of it before."""
        lives = [block for block in self.blocks if isinstance(block, ProcessSpan)]
        return next((life for life in reversed(lives) if life.attempt == event.attempt), None)

    def life(self, event: Event) -> ProcessSpan:
        """The life that this is about; one that has always been, if its beginning was not told."""
        life = self.known_life(event)
        if life is None:
            life = ProcessSpan(attempt=event.attempt, start=-math.inf, ready=-math.inf)
            self.blocks.append(life)
        return life

    def close(self, at: float) -> None:
        """Whatever this rank was, it is no more."""
        if self.blocks and isinstance(last := self.blocks[-1], ProcessSpan) and last.end is None:
            last.end = at

    def spans(self, start: float, until: float) -> Iterator[tuple[ProcessSpan | Restarting, float, float]]:
        """Each life and each wait with its beginning and end, none before the end of the one before it."""
        for block, following in zip_longest(self.blocks, self.blocks[1:]):
            start = max(start, _start_of(block))
            limit = until if following is None else min(until, _start_of(following))
            if isinstance(block, Restarting):
                end = min(start + block.delay, limit)
            else:
                end = limit if block.end is None else block.end
            yield block, start, max(start, end)
            start = max(start, end)


@dataclass(kw_only=True)
class Timeline:
    """A run, or a WorkerGroup in all its calls."""

    run_id: str
    until: float
    """The time of the last event: what is not known to have ended was still going on then."""
    started: RunStarted | None = None
    ended: RunEnded | None = None
    states: list[StateChanged] = field(default_factory=list)
    restarts: list[Restarting] = field(default_factory=list)
    meetings: list[RendezvousCompleted] = field(default_factory=list)
    lanes: dict[int, Lane] = field(default_factory=dict)
    """By global rank."""
    calls: int = 0

    def add(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case RunStarted():
                self.started = event
            case RunEnded():
                self.ended = event
            case StateChanged():
                self.states.append(event)
            case _:
                self._add_to_ranks(event)

    def _add_to_ranks(self, event: Event) -> None:
        if isinstance(event, Restarting):
            self.restarts.append(event)
        if isinstance(event, RendezvousCompleted):
            self.meetings.append(event)
        self.calls += isinstance(event, CallStarted)
        for rank in event.ranks:
            self._add_to_lane(self.lanes.setdefault(rank, Lane()), event)

    def _add_to_lane(self, lane: Lane, event: Event) -> None:
        match event:
            case WorkerStarted():
                lane.close(event.monotonic)
                lane.blocks.append(ProcessSpan(attempt=event.attempt, start=event.monotonic, pid=event.pid))
            case WorkerReady():
                life = lane.life(event)
                life.ready = event.monotonic
                if lane.call:
                    life.calls.append(CallSpan(name=lane.call, start=event.monotonic))
                lane.call = ""
            case CallStarted():
                lane.call = self._name_of_call()
                last = lane.blocks[-1] if lane.blocks else None
                if isinstance(last, ProcessSpan) and last.end is None and last.ready is not None:
                    last.calls.append(CallSpan(name=lane.call, start=event.monotonic))
                    lane.call = ""
            case RendezvousCompleted():
                lane.call = self._name_of_call() if self.calls else ""  # it is told once, and these may be other ranks
            case HeartbeatLate():
                lane.marks.append(event)
            case WorkerSucceeded() | WorkerFailed() | WorkerStopped():
                if isinstance(event, WorkerFailed):
                    lane.marks.append(event)
                _answer(lane, event)
            case WorkerExited():
                life = lane.life(event)
                life.ended, life.end, life.pid = event, event.monotonic, event.pid or life.pid
            case Restarting():
                lane.close(event.monotonic)
                lane.blocks.append(event)
                lane.call = self._name_of_call() if self.calls else ""  # it is made again, of ranks too that had returned
            case _:  # of a later version
                pass

    def _name_of_call(self) -> str:
        return self.started.fn if self.started is not None and self.started.fn else f"call {self.calls}"


def timelines(events: Sequence[Event]) -> list[Timeline]:
    """One for each run that these events are of, in the order of their first ones."""
    found: dict[str, Timeline] = {}
    for event in events:
        timeline = found.setdefault(event.run_id, Timeline(run_id=event.run_id, until=event.monotonic))
        timeline.until = max(timeline.until, event.monotonic)
        timeline.add(event)
    return list(found.values())


def called_within(life: ProcessSpan, start: float, end: float) -> Iterator[tuple[CallSpan, float, float]]:
    """Each call of a life that lasted from `start` to `end`, within it and none before the end of the one before it."""
    for call, following in zip_longest(life.calls, life.calls[1:]):
        start = min(max(start, call.start), end)
        limit = end if following is None else min(end, following.start)
        call_end = max(start, min(end, limit if call.end is None else call.end))
        yield call, start, call_end
        start = call_end


def _answer(lane: Lane, event: Event) -> None:
    lane.call = ""
    life = lane.known_life(event)
    if life is None:
        return  # it could not be started
    life.outcome = OUTCOMES[type(event)]
    if life.calls and life.calls[-1].end is None:
        is_silent = isinstance(event, WorkerFailed) and event.failure.kind is FailureKind.HANG
        life.calls[-1].end = (
            None if is_silent else event.monotonic
        )  # it failed when it was last heard of, and was there still
        life.calls[-1].outcome = life.outcome


def _start_of(block: ProcessSpan | Restarting) -> float:
    return block.start if isinstance(block, ProcessSpan) else block.monotonic

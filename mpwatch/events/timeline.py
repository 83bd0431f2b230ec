"""Builds timelines of runs from events. A timeline shows when each rank started, ran a function, was restarted and exited.

All code in this module is pure: it does no input or output. The module builds a timeline even if events of the run are
missing, or if the times of the events are out of order. The spans of a rank never overlap, and a call is always inside
the span of its process.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

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

OUTCOMES: dict[type[Event], str] = {WorkerSucceeded: "succeeded", WorkerFailed: "failed", WorkerStopped: "stopped"}


@dataclass(kw_only=True)
class CallSpan:
    """A call of a function in one rank. All times of a CallSpan are seconds of CLOCK_MONOTONIC."""

    name: str
    start: float
    end: float | None = None
    """None if the end is not known. Then the call is shown until the next call or the end of the process."""
    outcome: str = ""
    """A value of OUTCOMES, or an empty text if the outcome is not known."""


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
    """What a timeline shows for a rank: its processes, delays before restarts, late heartbeats, failures and collectives."""

    blocks: list[ProcessSpan | Restarting] = field(default_factory=list)
    marks: list[HeartbeatLate | WorkerFailed] = field(default_factory=list)
    collectives: list[CollectivesRecorded] = field(default_factory=list)
    call: str = ""
    """Name of the call that begins when the rank is ready. The name is empty if no call begins at that time."""

    def find_process(self, event: Event) -> ProcessSpan | None:
        """Return the process to which an event belongs, or None if the lane does not contain this process."""
        processes = [block for block in self.blocks if isinstance(block, ProcessSpan)]
        return next((process for process in reversed(processes) if process.attempt == event.attempt), None)

    def find_or_add_process(self, event: Event) -> ProcessSpan:
        """Return the process to which an event belongs.

        If the lane does not contain the process of the event, append a ProcessSpan that starts at -inf.
        """
        process = self.find_process(event)
        if process is None:
            process = ProcessSpan(attempt=event.attempt, start=-math.inf, ready=-math.inf)
            self.blocks.append(process)
        return process

    def close(self, at: float) -> None:
        """If the rank's last process has no end yet, set its end to the time `at`."""
        if self.blocks and isinstance(last := self.blocks[-1], ProcessSpan) and last.end is None:
            last.end = at

    def spans(self, start: float, until: float) -> Iterator[tuple[ProcessSpan | Restarting, float, float]]:
        """Yield the rank's processes and the delays before its restarts, each with a start time and an end time.

        The yielded spans do not overlap.
        """
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
    """The timeline of a run, or of all calls of a WorkerGroup."""

    run_id: str
    until: float
    """Time of the last event. A span without a known end is shown until then."""
    started: RunStarted | None = None
    ended: RunEnded | None = None
    states: list[StateChanged] = field(default_factory=list)
    restarts: list[Restarting] = field(default_factory=list)
    rendezvous: list[RendezvousCompleted] = field(default_factory=list)
    lanes: dict[int, Lane] = field(default_factory=dict)
    """The lane of each rank, by global rank."""
    calls: int = 0

    def add(self, event: Event) -> None:
        """Add the next event to the timeline."""
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
            self.rendezvous.append(event)
        self.calls += isinstance(event, CallStarted)
        for rank in event.ranks:
            self._add_to_lane(self.lanes.setdefault(rank, Lane()), event)

    def _add_to_lane(self, lane: Lane, event: Event) -> None:
        match event:
            case WorkerStarted():
                lane.close(event.monotonic)
                lane.blocks.append(ProcessSpan(attempt=event.attempt, start=event.monotonic, pid=event.pid))
            case WorkerReady():
                process = lane.find_or_add_process(event)
                process.ready = event.monotonic
                if lane.call:
                    process.calls.append(CallSpan(name=lane.call, start=event.monotonic))
                lane.call = ""
            case CallStarted():
                lane.call = self._name_of_call()
                last = lane.blocks[-1] if lane.blocks else None
                if isinstance(last, ProcessSpan) and last.end is None and last.ready is not None:
                    last.calls.append(CallSpan(name=lane.call, start=event.monotonic))
                    lane.call = ""
            case RendezvousCompleted():
                lane.call = (
                    self._name_of_call() if self.calls else ""
                )  # the event CallStarted comes only once, and the ranks may have changed
            case HeartbeatLate():
                lane.marks.append(event)
            case CollectivesRecorded():
                lane.collectives.append(event)
            case WorkerSucceeded() | WorkerFailed() | WorkerStopped():
                if isinstance(event, WorkerFailed):
                    lane.marks.append(event)
                _end_call(lane, event)
            case WorkerExited():
                process = lane.find_or_add_process(event)
                process.ended, process.end, process.pid = event, event.monotonic, event.pid or process.pid
            case Restarting():
                lane.close(event.monotonic)
                lane.blocks.append(event)
                lane.call = (
                    self._name_of_call() if self.calls else ""
                )  # the call is made again, even in ranks that had returned
            case _:  # an event that a newer version has added
                pass

    def _name_of_call(self) -> str:
        return self.started.fn if self.started is not None and self.started.fn else f"call {self.calls}"


def timelines(events: Sequence[Event]) -> list[Timeline]:
    """Build one timeline for each run, in the order of the first events of the runs."""
    found: dict[str, Timeline] = {}
    for event in events:
        timeline = found.setdefault(event.run_id, Timeline(run_id=event.run_id, until=event.monotonic))
        timeline.until = max(timeline.until, event.monotonic)
        timeline.add(event)
    return list(found.values())


def calls_within(process: ProcessSpan, start: float, end: float) -> Iterator[tuple[CallSpan, float, float]]:
    """Yield each function call that a process executed, and the times at which the call began and ended.

    The yielded calls do not overlap. `start` is the time at which the process is ready for calls, and `end` is the time at
    which it ends.
    """
    for call, following in zip_longest(process.calls, process.calls[1:]):
        start = min(max(start, call.start), end)
        limit = end if following is None else min(end, following.start)
        call_end = max(start, min(end, limit if call.end is None else call.end))
        yield call, start, call_end
        start = call_end


def _end_call(lane: Lane, event: Event) -> None:
    lane.call = ""
    process = lane.find_process(event)
    if process is None:
        return  # the process could not be started
    process.outcome = OUTCOMES[type(event)]
    if process.calls and process.calls[-1].end is None:
        # The time of a hang is the time of the last heartbeat. The process still ran after it, so the call has no known end.
        hangs = isinstance(event, WorkerFailed) and event.failure.kind is FailureKind.HANG
        process.calls[-1].end = None if hangs else event.monotonic
        process.calls[-1].outcome = process.outcome


def _start_of(block: ProcessSpan | Restarting) -> float:
    return block.start if isinstance(block, ProcessSpan) else block.monotonic

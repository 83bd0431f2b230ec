"""`write_chrome_trace`: the timeline of a run in the Trace Event Format, which Perfetto and chrome://tracing draw.

A run is a process there, with a lane ("thread") for the states of the group and one for each rank.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from mpwatch.events.timeline import Lane, ProcessSpan, Timeline, called_within, timelines
from mpwatch.events.to_json import plain
from mpwatch.events.types import Event, HeartbeatLate, RendezvousCompleted, Restarting, WorkerFailed
from mpwatch.results.report import blame, failure_text, ranks_text

GROUP_LANE = 1  # some viewers take 0 for the kernel's idle thread
FIRST_RANK_LANE = 2
COLOURS = {  # by the names that chrome://tracing has for them; Perfetto has colours of its own, by the name of a span
    "succeeded": "good",
    "failed": "terrible",
    "stopped": "grey",
    "INIT": "startup",
    "HEALTHY": "good",
    "UNHEALTHY": "bad",
    "SUCCEEDED": "good",
    "FAILED": "terrible",
    "STOPPED": "grey",
}
TELLING = ("kind", "exit_code", "signal", "summary", "traceback", "stack", "stderr", "evidence")  # of a failure
NO_EVENTS = (
    "there are no events to draw: a run's are in `result.events`; those of a WorkerGroup's calls are not kept, so collect "
    "them (events = []; WorkerGroup(..., on_event=events.append)) and call mpwatch.events.write_chrome_trace(events, path)"
)


def write_chrome_trace(events: Iterable[Event], path: str | os.PathLike[str]) -> None:
    """Write the timeline of these events, of one run or of several, to a file that Perfetto (ui.perfetto.dev) opens.

    A part of a run's events will do. Times are in microseconds from the first event. Raises ValueError if there are none,
    and OSError.
    """
    import json

    told = list(events)
    if not told:
        raise ValueError(NO_EVENTS)
    for event in told:
        if not isinstance(event, Event):
            raise TypeError(f"events must be those of a run, as in `result.events`, not {event!r:.200}")
    first = min(told, key=lambda event: event.monotonic)
    traced = [line for pid, run in enumerate(timelines(told), 1) for line in _TraceWriter(pid, run, first.monotonic).lines()]
    document = {"traceEvents": traced, "displayTimeUnit": "ms", "otherData": {"seconds_since_1970_at_0": plain(first.time)}}
    text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


class _TraceWriter:
    """The lines of one run."""

    def __init__(self, pid: int, run: Timeline, zero: float) -> None:
        self._pid = pid
        self._run = run
        self._zero = zero

    def lines(self) -> Iterator[dict[str, Any]]:
        """Names first, then what happened; what contains something before what it contains."""
        started = self._run.started
        what = (started.fn or "WorkerGroup") + f" on {started.hostname}" if started is not None else "run"
        yield self._named("process_name", GROUP_LANE, {"name": plain(f"{what} ({self._run.run_id})")})
        ranks = sorted(self._run.lanes)
        for tid, name in [(GROUP_LANE, "group"), *((FIRST_RANK_LANE + rank, f"rank {rank}") for rank in ranks)]:
            yield self._named("thread_name", tid, {"name": name})
            yield self._named("thread_sort_index", tid, {"sort_index": tid})
        yield from self._group()
        for rank in ranks:
            yield from self._rank(FIRST_RANK_LANE + rank, self._run.lanes[rank])

    def _group(self) -> Iterator[dict[str, Any]]:
        run, start = self._run, self._zero
        for change, following in zip_longest(run.states, run.states[1:]):
            start = max(start, change.monotonic)
            end = max(start, run.until if following is None else following.monotonic)
            state, before = change.after.name, {"before": change.before.name}
            yield self._span(GROUP_LANE, state, start, end, category="state", args=before, colour=state)
            start = end
        for restart in run.restarts:
            yield self._mark(
                GROUP_LANE, f"restart of {ranks_text(restart.ranks)}", "restart", restart.monotonic, _of_wait(restart)
            )
        for met in run.meetings:
            name = f"node {met.group_rank} of {met.group_world_size}: {ranks_text(met.ranks)}"
            yield self._mark(GROUP_LANE, name, "nodes", met.monotonic, _of_meeting(met))
        if run.ended is not None:
            args = {"elapsed": run.ended.elapsed, "restarts": run.ended.restarts, "reason": run.ended.reason}
            yield self._mark(GROUP_LANE, run.ended.state.name, "run", run.ended.monotonic, args)

    def _rank(self, tid: int, lane: Lane) -> Iterator[dict[str, Any]]:
        for block, start, end in lane.spans(self._zero, self._run.until):
            if isinstance(block, Restarting):
                yield self._span(tid, "waiting to be restarted", start, end, category="restart", args=_of_wait(block))
            else:
                yield from self._life(tid, block, start, end)
        for mark in lane.marks:
            name, args = _of_mark(mark)
            yield self._mark(tid, name, "failure" if isinstance(mark, WorkerFailed) else "heartbeat", mark.monotonic, args)

    def _life(self, tid: int, life: ProcessSpan, start: float, end: float) -> Iterator[dict[str, Any]]:
        args: dict[str, Any] = {"pid": life.pid, "attempt": life.attempt, "outcome": life.outcome or "unfinished"}
        if life.ended is not None:
            args["exit_code"] = life.ended.exit_code
        yield self._span(tid, f"attempt {life.attempt}", start, end, category="life", args=args)
        ready = end if life.ready is None else min(max(start, life.ready), end)
        if ready > start:
            yield self._span(tid, "start-up", start, ready, category="startup", args={})
        for call, began, over in called_within(life, ready, end):
            outcome = call.outcome or "unfinished"
            args = {"outcome": outcome}
            yield self._span(tid, call.name, began, over, category=f"call,{outcome}", args=args, colour=outcome)
        if life.ended is not None and life.ended.heartbeat_at is not None:
            yield self._mark(tid, "last heartbeat", "heartbeat", min(max(start, life.ended.heartbeat_at), end), {})
        if life.ended is not None and life.ended.reported_at is not None:
            reported = min(max(start, life.ended.reported_at), end)
            yield self._mark(tid, "last report", "report", reported, plain(life.ended.progress))

    def _named(self, name: str, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self._pid, "tid": tid, "args": args}

    def _mark(self, tid: int, name: str, category: str, at: float, args: Mapping[str, Any]) -> dict[str, Any]:
        where = {"pid": self._pid, "tid": tid, "ts": self._microseconds(at)}
        return {"ph": "i", "s": "t", "name": plain(name), "cat": category, **where, "args": plain(args)}

    def _span(
        self, tid: int, name: str, start: float, end: float, *, category: str, args: Mapping[str, Any], colour: str = ""
    ) -> dict[str, Any]:
        ts = self._microseconds(start)
        where = {"pid": self._pid, "tid": tid, "ts": ts, "dur": self._microseconds(end) - ts}
        look = {"cname": COLOURS[colour]} if colour in COLOURS else {}
        return {"ph": "X", "name": plain(name), "cat": category, **where, **look, "args": plain(args)}

    def _microseconds(self, at: float) -> int:
        """Whole ones: what lies within something else does so when both are rounded."""
        return round((at - self._zero) * 1e6)


def _of_wait(restart: Restarting) -> dict[str, Any]:
    cause = blame(restart.cause) if restart.cause is not None else restart.reason
    return {"cause": cause, "delay": restart.delay, "restarts_left": restart.restarts_left}


def _of_meeting(met: RendezvousCompleted) -> dict[str, Any]:
    store = {"master_addr": met.master_addr, "master_port": met.master_port}
    return {"job": met.job, "attempt": met.attempt, "world_size": met.world_size, **store}


def _of_mark(mark: HeartbeatLate | WorkerFailed) -> tuple[str, dict[str, Any]]:
    if isinstance(mark, HeartbeatLate):
        return "heartbeat lost", {"silent_seconds": mark.silent_seconds, "heartbeat_timeout": mark.heartbeat_timeout}
    more = {name: value for name in TELLING if (value := getattr(mark.failure, name)) not in ("", None)}
    name = "failed first" if mark.is_root_cause else "failed"
    return name, {"what": failure_text(mark.failure), "is_root_cause": mark.is_root_cause, **more}

"""`write_chrome_trace` writes the timeline of a run in the Trace Event Format, which Perfetto and chrome://tracing show.

A viewer shows each run as a process, and each lane of the run as a thread. A run has one lane for its states, and one lane
for each rank.

If collectives of a rank were recorded, a second lane of the rank shows them. A collective in which the rank was waiting is
shown as a bar. A completed collective is shown as a mark at the time of its call, because torch's flight recorder does not
record when a collective ends.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from mpwatch.events.timeline import Lane, ProcessSpan, Timeline, calls_within, timelines
from mpwatch.events.types import Event, HeartbeatLate, RendezvousCompleted, Restarting, WorkerFailed
from mpwatch.results.collective import CollectiveState
from mpwatch.results.failure import format_failure, format_ranks, format_root_cause
from mpwatch.results.to_json import to_json

GROUP_LANE = 1  # not 0, which some viewers show as the kernel's idle thread
FIRST_RANK_LANE = 2
COLOURS = {  # names in chrome://tracing. Perfetto ignores them and chooses a colour by the name of a span
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
FAILURE_FIELDS = ("kind", "exit_code", "signal", "summary", "traceback", "stack", "stderr", "evidence")
NO_EVENTS = (
    "there are no events to write. The events of a run are in `result.events`. A WorkerGroup keeps no events, so collect "
    "them (events = []; WorkerGroup(..., on_event=events.append)) and call mpwatch.events.write_chrome_trace(events, path)"
)


def write_chrome_trace(events: Iterable[Event], path: str | os.PathLike[str]) -> None:
    """Write the timeline of one or several runs to a file that Perfetto (ui.perfetto.dev) can open.

    Args:
        events: events of one or several runs, such as `result.events`. You may also pass only a part of a run's events.
        path: the file, which is replaced. Times in the file are microseconds since the first event.

    Raises:
        ValueError: there are no events.
        TypeError: an item is not an Event.
        OSError: the file cannot be written.
    """
    import json

    known = list(events)
    if not known:
        raise ValueError(NO_EVENTS)
    for event in known:
        if not isinstance(event, Event):
            raise TypeError(f"events must be events of a run, as in `result.events`, not {event!r:.200}")
    first = min(known, key=lambda event: event.monotonic)
    entries = [
        entry for pid, run in enumerate(timelines(known), 1) for entry in _TraceBuilder(pid, run, first.monotonic).entries()
    ]
    document = {
        "traceEvents": entries,
        "displayTimeUnit": "ms",
        "otherData": {"seconds_since_1970_at_0": to_json(first.time)},
    }
    text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


class _TraceBuilder:
    """Makes the trace entries of one run."""

    def __init__(self, pid: int, run: Timeline, zero: float) -> None:
        self._pid = pid
        self._run = run
        self._zero = zero

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield the trace entries. An outer span comes before the spans inside it."""
        started = self._run.started
        what = (started.fn or "WorkerGroup") + f" on {started.hostname}" if started is not None else "run"
        yield self._metadata("process_name", GROUP_LANE, {"name": to_json(f"{what} ({self._run.run_id})")})
        ranks = sorted(self._run.lanes)
        first_lane_of_collectives = FIRST_RANK_LANE + max(ranks, default=0) + 1
        names = {GROUP_LANE: "group"}
        for rank in ranks:
            names[FIRST_RANK_LANE + rank] = f"rank {rank}"
            if self._run.lanes[rank].collectives:
                names[first_lane_of_collectives + rank] = f"rank {rank}: collectives"
        for position, (tid, name) in enumerate(names.items(), 1):
            yield self._metadata("thread_name", tid, {"name": name})
            yield self._metadata("thread_sort_index", tid, {"sort_index": position})
        yield from self._group()
        for rank in ranks:
            yield from self._rank(FIRST_RANK_LANE + rank, self._run.lanes[rank])
            yield from self._collectives(first_lane_of_collectives + rank, self._run.lanes[rank])

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
                GROUP_LANE, f"restart of {format_ranks(restart.ranks)}", "restart", restart.monotonic, _restart_args(restart)
            )
        for met in run.rendezvous:
            name = f"node {met.group_rank} of {met.group_world_size}: {format_ranks(met.ranks)}"
            yield self._mark(GROUP_LANE, name, "nodes", met.monotonic, _rendezvous_args(met))
        if run.ended is not None:
            args = {"elapsed": run.ended.elapsed, "restarts": run.ended.restarts, "reason": run.ended.reason}
            yield self._mark(GROUP_LANE, run.ended.state.name, "run", run.ended.monotonic, args)

    def _rank(self, tid: int, lane: Lane) -> Iterator[dict[str, Any]]:
        for block, start, end in lane.spans(self._zero, self._run.until):
            if isinstance(block, Restarting):
                yield self._span(tid, "waiting to be restarted", start, end, category="restart", args=_restart_args(block))
            else:
                yield from self._process(tid, block, start, end)
        for mark in lane.marks:
            name, args = _name_and_args_of(mark)
            yield self._mark(tid, name, "failure" if isinstance(mark, WorkerFailed) else "heartbeat", mark.monotonic, args)

    def _process(self, tid: int, process: ProcessSpan, start: float, end: float) -> Iterator[dict[str, Any]]:
        args: dict[str, Any] = {"pid": process.pid, "attempt": process.attempt, "outcome": process.outcome or "unfinished"}
        if process.ended is not None:
            args["exit_code"] = process.ended.exit_code
        yield self._span(tid, f"attempt {process.attempt}", start, end, category="process", args=args)
        ready = end if process.ready is None else min(max(start, process.ready), end)
        if ready > start:
            yield self._span(tid, "start-up", start, ready, category="startup", args={})
        for call, began, over in calls_within(process, ready, end):
            outcome = call.outcome or "unfinished"
            args = {"outcome": outcome}
            yield self._span(tid, call.name, began, over, category=f"call,{outcome}", args=args, colour=outcome)
        if process.ended is not None and process.ended.heartbeat_at is not None:
            yield self._mark(tid, "last heartbeat", "heartbeat", min(max(start, process.ended.heartbeat_at), end), {})
        if process.ended is not None and process.ended.reported_at is not None:
            reported = min(max(start, process.ended.reported_at), end)
            yield self._mark(tid, "last report", "report", reported, to_json(process.ended.progress))

    def _collectives(self, tid: int, lane: Lane) -> Iterator[dict[str, Any]]:
        start = self._zero
        for recorded in sorted(lane.collectives, key=lambda event: event.monotonic):
            end = recorded.monotonic
            for call in sorted(recorded.collectives, key=lambda call: -call.seconds):
                called = min(max(start, end - call.seconds), end)
                args = {"group": call.group_title, "tensors": call.tensors, "place": call.place, "attempt": recorded.attempt}
                if call.state is CollectiveState.WAITING:
                    yield self._span(tid, call.title, called, end, category="collective", args=args, colour="failed")
                else:
                    yield self._mark(tid, call.title, "collective", called, args)
            start = end

    def _metadata(self, name: str, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self._pid, "tid": tid, "args": args}

    def _mark(self, tid: int, name: str, category: str, at: float, args: Mapping[str, Any]) -> dict[str, Any]:
        where = {"pid": self._pid, "tid": tid, "ts": self._microseconds(at)}
        return {"ph": "i", "s": "t", "name": to_json(name), "cat": category, **where, "args": to_json(args)}

    def _span(
        self, tid: int, name: str, start: float, end: float, *, category: str, args: Mapping[str, Any], colour: str = ""
    ) -> dict[str, Any]:
        ts = self._microseconds(start)
        where = {"pid": self._pid, "tid": tid, "ts": ts, "dur": self._microseconds(end) - ts}
        look = {"cname": COLOURS[colour]} if colour in COLOURS else {}
        return {"ph": "X", "name": to_json(name), "cat": category, **where, **look, "args": to_json(args)}

    def _microseconds(self, at: float) -> int:
        """Return the time in whole microseconds. After rounding, an inner span is still inside its outer span."""
        return round((at - self._zero) * 1e6)


def _restart_args(restart: Restarting) -> dict[str, Any]:
    cause = format_root_cause(restart.cause) if restart.cause is not None else restart.reason
    return {"cause": cause, "delay": restart.delay, "restarts_left": restart.restarts_left}


def _rendezvous_args(met: RendezvousCompleted) -> dict[str, Any]:
    store = {"master_addr": met.master_addr, "master_port": met.master_port}
    return {"job": met.job, "attempt": met.attempt, "world_size": met.world_size, **store}


def _name_and_args_of(mark: HeartbeatLate | WorkerFailed) -> tuple[str, dict[str, Any]]:
    if isinstance(mark, HeartbeatLate):
        return "heartbeat late", {"silent_seconds": mark.silent_seconds, "heartbeat_timeout": mark.heartbeat_timeout}
    more = {name: value for name in FAILURE_FIELDS if (value := getattr(mark.failure, name)) not in ("", None)}
    name = "failed first" if mark.is_root_cause else "failed"
    return name, {"what": format_failure(mark.failure), "is_root_cause": mark.is_root_cause, **more}

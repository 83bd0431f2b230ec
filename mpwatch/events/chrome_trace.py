"""`write_chrome_trace` writes timelines in the Trace Event Format, which Perfetto and chrome://tracing show.

A run is a process there, and each rank is a thread. If a rank's collectives were recorded, it has a second one for them: a
collective in which the rank waited is a bar, and a completed one a mark at its call, as torch does not record its end.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from mpwatch.events.timeline import Lane, Span, Timeline, restart_args, timelines
from mpwatch.events.types import Event, HeartbeatLate
from mpwatch.results.collective import CollectiveState
from mpwatch.results.failure import format_failure, format_ranks
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
    entries = [entry for pid, run in enumerate(timelines(known), 1) for entry in _Trace(pid, first.monotonic).draw(run)]
    other = {"seconds_since_1970_at_0": to_json(first.time)}
    document = {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": other}
    text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


class _Trace:
    """Makes the entries of one run. An outer span comes before the spans inside it."""

    def __init__(self, pid: int, zero: float) -> None:
        self._pid = pid
        self._zero = zero

    def draw(self, run: Timeline) -> Iterator[dict[str, Any]]:
        started = run.started
        what = (started.fn or "WorkerGroup") + f" on {started.hostname}" if started is not None else "run"
        yield self._metadata("process_name", GROUP_LANE, {"name": to_json(f"{what} ({run.run_id})")})
        ranks = sorted(run.lanes)
        first_lane_of_collectives = FIRST_RANK_LANE + max(ranks, default=0) + 1
        names = {GROUP_LANE: "group"}
        for rank in ranks:
            names[FIRST_RANK_LANE + rank] = f"rank {rank}"
            if run.lanes[rank].collectives:
                names[first_lane_of_collectives + rank] = f"rank {rank}: collectives"
        for position, (tid, name) in enumerate(names.items(), 1):
            yield self._metadata("thread_name", tid, {"name": name})
            yield self._metadata("thread_sort_index", tid, {"sort_index": position})
        yield from self._group(run)
        for rank in ranks:
            yield from self._rank(FIRST_RANK_LANE + rank, run.lanes[rank], run.until)
            yield from self._collectives(first_lane_of_collectives + rank, run.lanes[rank])

    def _group(self, run: Timeline) -> Iterator[dict[str, Any]]:
        start = self._zero
        for change, following in zip_longest(run.states, run.states[1:]):
            start = max(start, change.monotonic)
            end = max(start, run.until if following is None else following.monotonic)
            state = change.after.name
            yield self._span(GROUP_LANE, "state", Span("state", state, start, end, state, {"before": change.before.name}))
            start = end
        for restart in run.restarts:
            name = f"restart of {format_ranks(restart.ranks)}"
            yield self._mark(GROUP_LANE, name, "restart", restart.monotonic, restart_args(restart))
        for met in run.rendezvous:
            name = f"node {met.group_rank} of {met.group_world_size}: {format_ranks(met.ranks)}"
            args = {name: getattr(met, name) for name in ("job", "attempt", "world_size", "master_addr", "master_port")}
            yield self._mark(GROUP_LANE, name, "nodes", met.monotonic, args)
        if (ended := run.ended) is not None:
            args = {"elapsed": ended.elapsed, "restarts": ended.restarts, "reason": ended.reason}
            yield self._mark(GROUP_LANE, ended.state.name, "run", ended.monotonic, args)

    def _rank(self, tid: int, lane: Lane, until: float) -> Iterator[dict[str, Any]]:
        processes = iter(lane.processes)
        for span in lane.spans(self._zero, until):
            category = {"call": f"call,{span.outcome}", "start-up": "startup"}.get(span.kind, span.kind)
            yield self._span(tid, category, span)
            if span.kind == "process" and (exited := next(processes).exited) is not None:
                if exited.heartbeat_at is not None:
                    at = min(max(span.start, exited.heartbeat_at), span.end)
                    yield self._mark(tid, "last heartbeat", "heartbeat", at, {})
                if exited.reported_at is not None:
                    at = min(max(span.start, exited.reported_at), span.end)
                    yield self._mark(tid, "last report", "report", at, to_json(exited.progress))
        for mark in lane.marks:
            if isinstance(mark, HeartbeatLate):
                limit = {"silent_seconds": mark.silent_seconds, "heartbeat_timeout": mark.heartbeat_timeout}
                yield self._mark(tid, "heartbeat late", "heartbeat", mark.monotonic, limit)
            else:
                more = {name: value for name in FAILURE_FIELDS if (value := getattr(mark.failure, name)) not in ("", None)}
                args = {"what": format_failure(mark.failure), "is_root_cause": mark.is_root_cause, **more}
                name = "failed first" if mark.is_root_cause else "failed"
                yield self._mark(tid, name, "failure", mark.monotonic, args)

    def _collectives(self, tid: int, lane: Lane) -> Iterator[dict[str, Any]]:
        start = self._zero
        for recorded in sorted(lane.collectives, key=lambda event: event.monotonic):
            end = recorded.monotonic
            for call in sorted(recorded.collectives, key=lambda call: -call.seconds):
                called = min(max(start, end - call.seconds), end)
                args = {"group": call.group_title, "tensors": call.tensors, "place": call.place, "attempt": recorded.attempt}
                if call.state is CollectiveState.WAITING:
                    yield self._span(tid, "collective", Span("collective", call.title, called, end, "failed", args))
                else:
                    yield self._mark(tid, call.title, "collective", called, args)
            start = end

    def _metadata(self, name: str, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self._pid, "tid": tid, "args": args}

    def _mark(self, tid: int, name: str, category: str, at: float, args: Mapping[str, Any]) -> dict[str, Any]:
        where = {"pid": self._pid, "tid": tid, "ts": self._microseconds(at)}
        return {"ph": "i", "s": "t", "name": to_json(name), "cat": category, **where, "args": to_json(args)}

    def _span(self, tid: int, category: str, span: Span) -> dict[str, Any]:
        ts = self._microseconds(span.start)
        where = {"pid": self._pid, "tid": tid, "ts": ts, "dur": self._microseconds(span.end) - ts}
        look = {"cname": COLOURS[span.outcome]} if span.outcome in COLOURS and span.kind != "process" else {}
        return {"ph": "X", "name": to_json(span.name), "cat": category, **where, **look, "args": to_json(span.args)}

    def _microseconds(self, at: float) -> int:
        return round((at - self._zero) * 1e6)  # monotonic, so an inner span is still inside its outer span

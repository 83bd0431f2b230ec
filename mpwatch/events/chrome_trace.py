"""`write_chrome_trace` writes timelines in the Trace Event Format, which Perfetto and chrome://tracing show.

A run is a process there, and each rank is a thread.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

from mpwatch.events.timeline import Timeline, timelines
from mpwatch.events.types import Event
from mpwatch.results.to_json import to_json

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
        OSError: the file cannot be written.
    """
    import json

    known = list(events)
    if not known:
        raise ValueError(NO_EVENTS)
    first = min(known, key=lambda event: event.monotonic)
    entries = [entry for pid, run in enumerate(timelines(known), 1) for entry in _draw(run, pid, first.monotonic)]
    other = {"seconds_since_1970_at_0": to_json(first.time)}
    document = {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": other}
    text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _draw(run: Timeline, pid: int, zero: float) -> Iterator[dict[str, Any]]:
    """Yield the entries of a run. An outer span comes before the spans inside it."""

    def entry(tid: int, phase: str, name: str, args: object, **more: Any) -> dict[str, Any]:
        return {"ph": phase, "name": to_json(name), "pid": pid, "tid": tid, "args": to_json(args), **more}

    def microseconds(at: float) -> int:
        return max(0, round((at - zero) * 1e6))

    what = (run.started.fn or "WorkerGroup") + f" on {run.started.hostname}" if run.started is not None else "run"
    yield entry(1, "M", "process_name", {"name": f"{what} ({run.run_id})"})
    lanes = [("group", run.states), *((f"rank {rank}", lane) for rank, lane in sorted(run.lanes.items()))]
    for tid, (name, lane) in enumerate(lanes, 1):  # not from 0, which some viewers show as the kernel's idle thread
        yield entry(tid, "M", "thread_name", {"name": name})
        yield entry(tid, "M", "thread_sort_index", {"sort_index": tid})
        for span in lane.spans:
            start = microseconds(span.start)
            where = {"ts": start, "dur": microseconds(span.end) - start}
            yield entry(tid, "X", span.name, {**span.args, "outcome": span.outcome}, cat=span.kind, **where)
        for mark in lane.marks:
            yield entry(tid, "i", str(mark), mark.to_dict(), cat=mark.name, ts=microseconds(mark.monotonic), s="t")

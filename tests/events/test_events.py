"""Events as JSON data, and the output of the observers of the package: log, JSON lines, trace, picture."""

import json
import logging
import math
import os
import platform
import signal
from dataclasses import dataclass, fields, replace
from xml.etree import ElementTree

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpwatch
from mpwatch import Collective, CollectiveState, FailureKind, Lateness, ProcessFailure, Progress, RunResult, WorkerState
from mpwatch import events as ev
from mpwatch.events.logging_observer import LogEvents
from mpwatch.events.timeline_svg import COLOURS, draw_timelines

NOT_UTF8 = "caf\udce9"  # a file name that is not UTF-8, as os.fsdecode has it
START = 1000.0  # by CLOCK_MONOTONIC
BOTH = (0, 1)


def at(after, kind, ranks=BOTH, attempt=0, /, *, run_id="a1b2c3d4e5", **more):
    """Return an event so many seconds after the start of the run."""
    return kind(time=1e9 + after, monotonic=START + after, run_id=run_id, ranks=ranks, attempt=attempt, **more)


def change(after, before, state):
    return at(after, ev.StateChanged, before=WorkerState[before], after=WorkerState[state])


def failure(rank, kind=FailureKind.EXCEPTION, **more):
    seen = {"exit_code": 1, "elapsed": 1.5, "exception": ValueError("boom"), "summary": "ValueError: boom", **more}
    return ProcessFailure(rank=rank, local_rank=rank, pid=100 + rank, hostname="here", kind=kind, **seen)


def start(after, ranks=BOTH, attempt=0, run_id="a1b2c3d4e5"):
    """The ranks start, and are ready after 0.4 seconds."""
    started = [at(after, ev.WorkerStarted, (rank,), attempt, run_id=run_id, pid=100 + rank) for rank in ranks]
    call = at(after, ev.CallStarted, ranks, attempt, run_id=run_id)
    return [*started, call, *(at(after + 0.4, ev.WorkerReady, (rank,), attempt, run_id=run_id) for rank in ranks)]


RUN_STARTED = at(0.0, ev.RunStarted, fn="train", role="default", nprocs=2, max_restarts=1, hostname="here")
STARTED = [RUN_STARTED, *start(0.1)]
# rank 1 fails once; after the restart both ranks succeed
RESTARTED = [
    RUN_STARTED,
    change(0.0, "UNKNOWN", "INIT"),
    *start(0.1),
    change(0.5, "INIT", "HEALTHY"),
    at(1.2, ev.HeartbeatLate, (0,), silent_seconds=5.0, heartbeat_timeout=10.0),
    change(1.5, "HEALTHY", "UNHEALTHY"),
    at(1.6, ev.WorkerExited, (1,), pid=101, exit_code=1, heartbeat_at=START + 1.4),
    at(2.0, ev.WorkerExited, (0,), pid=100, exit_code=-15, was_stopped=True),
    at(1.5, ev.WorkerFailed, (1,), failure=failure(1), is_root_cause=True),
    at(2.0, ev.WorkerStopped, (0,)),
    at(2.0, ev.Restarting, cause=failure(1), delay=1.0, restarts_left=0),
    change(3.0, "UNHEALTHY", "INIT"),
    *start(3.0, attempt=1),
    change(3.4, "INIT", "HEALTHY"),
    *(at(4.5, ev.WorkerSucceeded, (rank,), 1) for rank in BOTH),
    *(at(4.6, ev.WorkerExited, (rank,), 1, pid=100 + rank, exit_code=0) for rank in BOTH),
    change(4.6, "HEALTHY", "SUCCEEDED"),
    at(4.7, ev.RunEnded, state=WorkerState.SUCCEEDED, elapsed=4.7, restarts=1, reason=""),
]


def complete_rendezvous(after, attempt, group_rank, nodes):
    """This node of several nodes gets the ranks of its place."""
    position = {"group_rank": group_rank, "group_world_size": nodes, "world_size": 2 * nodes}
    role = {"role_rank": 2 * group_rank, "role_world_size": 2 * nodes}
    ranks, store = (2 * group_rank, 2 * group_rank + 1), {"master_addr": "10.0.0.1", "master_port": 4711}
    return [
        at(after, ev.RendezvousCompleted, ranks, attempt, job="job", **position, **role, **store),
        *start(after, ranks, attempt),
    ]


# the third of three nodes becomes the second of two when the first one has failed, and is the second one when a third one joins
MOVED = [
    replace(RUN_STARTED, ranks=()),
    *complete_rendezvous(0.0, 0, 2, 3),
    *(at(1.4, ev.WorkerStopped, (rank,)) for rank in (4, 5)),
    at(1.5, ev.Restarting, (4, 5), cause=failure(0), delay=0.0, restarts_left=1),
    *complete_rendezvous(2.0, 1, 1, 2),
    *(at(3.4, ev.WorkerStopped, (rank,), 1) for rank in (2, 3)),
    at(3.5, ev.Restarting, (2, 3), 1, cause=None, delay=0.0, restarts_left=1, reason="other nodes", is_counted=False),
    *complete_rendezvous(4.0, 2, 1, 3),
    *(at(5.0, ev.WorkerSucceeded, (rank,), 2) for rank in (2, 3)),
]


def parse_strictly(text):
    """Parse JSON without the constants that Python adds to it, such as NaN."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text.encode().decode(), parse_constant=refuse)


# --- JSON data


def test_an_event_as_json_data():
    (event,) = (event for event in RESTARTED if isinstance(event, ev.WorkerFailed))
    data = event.to_dict()
    sent_failure = data.pop("failure")
    at = {"time": event.time, "monotonic": event.monotonic}
    ids = {"run_id": "a1b2c3d4e5", "ranks": [1], "attempt": 0}
    assert data == {"event": "worker_failed", **at, **ids, "is_root_cause": True}
    assert [*sent_failure] == [field.name for field in fields(ProcessFailure)]
    expected = {"rank": 1, "kind": "EXCEPTION", "signal": None, "exception": "ValueError", "node_ranks": [], "log_files": {}}
    assert sent_failure | expected == sent_failure


class CustomError(Exception):
    pass


class FailsInRepr:
    def __repr__(self):
        raise ValueError("no")


@dataclass
class Pair:
    left: object
    right: object


def with_metric(value):
    progress = Progress(step=1, total=None, metrics={"value": value}, elapsed=0.0)
    return at(0.0, ev.WorkerExited, run_id=NOT_UTF8, pid=1, exit_code=0, progress=progress)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (numpy.float32(0.5), 0.5),
        (numpy.int64(7), 7),
        ({None: 3, FailureKind.OOM: 4, ("a", 1): 5, NOT_UTF8: 6}, {"None": 3, "OOM": 4, "['a', 1]": 5, "caf\\udce9": 6}),
        (signal.SIGTERM, "SIGTERM"),
        (CustomError("x"), f"{__name__}.CustomError"),
        (Pair((1, [2]), Pair), {"left": [1, [2]], "right": repr(Pair)}),
        (FailsInRepr(), "<FailsInRepr>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_becomes_json_data(value, expected):
    found = with_metric(value).to_dict()["progress"]["metrics"]["value"]
    assert (found, type(found)) == (expected, type(expected))


TEXTS = st.text(st.characters(codec=None))
OBJECTS = [FailureKind.OOM, ValueError(NOT_UTF8), Pair(NOT_UTF8, math.nan), numpy.float16(1e-7), numpy.bool_(1)]
SIMPLE = (st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.binary(), st.builds(FailsInRepr))
ANY_VALUES = st.recursive(
    st.one_of(TEXTS, st.sampled_from(OBJECTS), *SIMPLE),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(TEXTS | st.integers(), inner),
    max_leaves=10,
)


@given(value=ANY_VALUES)
def test_the_data_of_any_value_is_valid_json(value):
    data = with_metric(value).to_dict()
    assert parse_strictly(json.dumps(data, ensure_ascii=False, allow_nan=False)) == data


# --- logging


def log_events(caplog, level, events):
    caplog.set_level(level, "mpwatch")
    for event in events:
        LogEvents()(event)
    return [record.getMessage() for record in caplog.records]


def test_by_default_only_restarts_are_logged(caplog):
    (line,) = log_events(caplog, logging.WARNING, RESTARTED)
    assert line == "run a1b2c3d4: restarting ranks 0-1 in 1.0 s (restart 1, 0 left): rank 1 failed first: ValueError: boom"
    assert caplog.records[0].levelno == logging.WARNING


def test_the_progress_of_a_run_is_logged_at_info(caplog):
    lines = [line.removeprefix("run a1b2c3d4: ") for line in log_events(caplog, logging.INFO, RESTARTED)]
    states = ["UNKNOWN -> INIT", "INIT -> HEALTHY", "rank 0: silent for 5.0 s of 10.0 s allowed"]
    assert lines[:4] == ["train starts on here: 2 ranks of role default", *states]
    assert (len(lines), lines[-1]) == (10, "SUCCEEDED after 4.7 s, after 1 restart")


def test_a_log_record_is_one_line_that_can_be_encoded(caplog):
    cause = failure(0, FailureKind.EXIT, evidence=f"one\ntwo {NOT_UTF8}")
    event = at(0.0, ev.Restarting, (0,), run_id=NOT_UTF8, cause=cause, delay=0.0, restarts_left=2)
    (line,) = log_events(caplog, logging.INFO, [event, at(0.0, ev.Event)])  # the second one is of a later version
    assert line.startswith("run caf\\udce: restarting rank 0 (restart 1, 2 left): rank 0 ended with exit code 1 ")
    assert line.endswith(" (one two caf\\udce9)")


# --- JSON lines


def test_each_event_is_a_line_whatever_its_text(tmp_path):
    path = tmp_path / "events.jsonl"
    text = f"größer\n\r\x0b\x1c\x85\u2028\u2029\x00 {NOT_UTF8}"
    for _ in range(2):
        ev.JsonLines(path)(replace(RUN_STARTED, fn=text))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert parse_strictly(lines[1])["fn"] == text.replace("\udce9", "\\udce9")


def test_several_processes_append_to_one_file(tmp_path, barrier):
    path = tmp_path / "events.jsonl"

    def append_many(barrier):
        observe = ev.JsonLines(path)
        event = replace(RUN_STARTED, run_id=str(mpwatch.current_worker().rank), fn="f" * 5000)
        barrier.wait()
        for _ in range(200):
            observe(event)

    mpwatch.run(append_many, 3, args=(barrier,))
    found = [parse_strictly(line)["run_id"] for line in path.read_text().splitlines()]
    assert sorted(found) == ["0"] * 200 + ["1"] * 200 + ["2"] * 200


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ev.JsonLines(tmp_path / "nowhere" / "events.jsonl")
    with pytest.raises(IsADirectoryError):
        ev.JsonLines(tmp_path)


# --- the trace


def write_trace(tmp_path, events):
    path = tmp_path / "trace.json"
    ev.write_chrome_trace(events, path)
    return parse_strictly(path.read_text(encoding="utf-8"))["traceEvents"]


def find_spans(lines, tid):
    spans = [line for line in lines if line["ph"] == "X" and line["tid"] == tid]
    return [(span["name"], span["ts"], span["ts"] + span["dur"]) for span in spans]


def find_marks(lines, tid):
    return [(line["name"], line["ts"]) for line in lines if line["ph"] == "i" and line["tid"] == tid]


def check_nesting(lines):
    """Check that two overlapping spans of a lane are nested, and that the inner span is written after the outer one."""
    for tid in {line["tid"] for line in lines}:
        found = find_spans(lines, tid)
        for number, (_, start, end) in enumerate(found):
            assert 0 <= start <= end
            for _, later_start, later_end in found[number + 1 :]:
                assert later_start >= end or start <= later_start <= later_end <= end
    assert all(line["ts"] >= 0 for line in lines if line["ph"] != "M")


def name_lanes(lines):
    return {line["tid"]: line["args"]["name"] for line in lines if line["name"] == "thread_name"}


def test_the_trace_has_a_process_for_each_run_and_a_lane_with_the_attempts_and_calls_of_each_rank(tmp_path):
    lines = write_trace(tmp_path, RESTARTED)
    assert name_lanes(lines) == {1: "group", 2: "rank 0", 3: "rank 1"}
    assert [line["args"]["name"] for line in lines if line["name"] == "process_name"] == ["train on here (a1b2c3d4e5)"]
    found = find_spans(lines, 1)
    assert [name for name, _, _ in found] == ["INIT", "HEALTHY", "UNHEALTHY", "INIT", "HEALTHY", "SUCCEEDED"]
    assert [end for _, _, end in found[:-1]] == [start for _, start, _ in found[1:]]
    assert find_spans(lines, 3) == [
        ("attempt 0", 100_000, 1_600_000),
        ("start-up", 100_000, 500_000),
        ("train", 500_000, 1_500_000),
        ("waiting to be restarted", 2_000_000, 3_000_000),
        ("attempt 1", 3_000_000, 4_600_000),
        ("start-up", 3_000_000, 3_400_000),
        ("train", 3_400_000, 4_500_000),
    ]
    calls = [(line["tid"], line["args"]["outcome"]) for line in lines if line.get("cat") == "call"]
    assert calls == [(2, "stopped"), (2, "succeeded"), (3, "failed"), (3, "succeeded")]
    check_nesting(lines)
    two_runs = RESTARTED + start(0.1, run_id="b")
    assert {line["pid"] for line in write_trace(tmp_path, two_runs)} == {1, 2}


def test_the_call_of_a_hanging_rank_lasts_until_it_is_stopped(tmp_path):
    """The failure itself is drawn at the last heartbeat."""
    exited = at(9.0, ev.WorkerExited, (1,), pid=101, exit_code=-9, heartbeat_at=START + 1.0)
    hung = at(1.0, ev.WorkerFailed, (1,), failure=failure(1, FailureKind.HANG), is_root_cause=True)
    lines = write_trace(tmp_path, [*STARTED, exited, hung])
    assert ("train", 500_000, 9_000_000) in find_spans(lines, 3)
    assert ("rank 1: hung: still at work (the root cause)", 1_000_000) in find_marks(lines, 3)


def test_ranks_that_moved_from_another_node_are_drawn(tmp_path):
    lines = write_trace(tmp_path, MOVED)
    assert name_lanes(lines) == {1: "group", 2: "rank 2", 3: "rank 3", 4: "rank 4", 5: "rank 5"}
    for tid, starts in ((4, [400_000]), (2, [2_400_000, 4_400_000])):
        assert [start for name, start, _ in find_spans(lines, tid) if name == "train"] == starts


CALLED = {"group": "default", "ranks": (0, 1)}
COLLECTIVE = Collective(name="broadcast", sequence=1, state=CollectiveState.COMPLETED, seconds=1.0, **CALLED)
WAITING = Collective(name="all_reduce", sequence=2, state=CollectiveState.WAITING, seconds=0.75, place="x", **CALLED)


def test_the_collectives_of_a_rank_are_at_the_mark_of_their_recording(tmp_path):
    events = [*STARTED, at(2.0, ev.CollectivesRecorded, (0,), collectives=(COLLECTIVE, WAITING))]
    (mark,) = (line for line in write_trace(tmp_path, events) if line.get("cat") == "collectives_recorded")
    assert (mark["tid"], mark["ts"]) == (2, 2_000_000)
    assert [(call["name"], call["place"]) for call in mark["args"]["collectives"]] == [
        ("broadcast", ""),
        ("all_reduce", "x"),
    ]


LATENESS = Lateness(rank=0, share=0.42)
SOME_EVENTS = [
    *RESTARTED,
    *MOVED,
    at(0.0, ev.CollectivesRecorded, collectives=(COLLECTIVE, WAITING)),
    at(0.0, ev.Progressed, step=3, total=None, metrics={"loss": math.inf}),
    at(0.0, ev.SlowRank, lateness=LATENESS),
    at(0.0, ev.Stopping, stop_cause="SIGUSR1", after_step=None),
]
SECONDS = st.floats(0, 100, allow_nan=False)


@given(events=st.lists(st.tuples(st.sampled_from(SOME_EVENTS), st.none() | SECONDS), min_size=1, max_size=25))
def test_any_events_in_any_order_can_be_drawn(tmp_path_factory, events):
    folder = tmp_path_factory.getbasetemp()
    events = [event if at is None else replace(event, monotonic=START + at) for event, at in events]
    check_nesting(write_trace(folder, events))
    RunResult(WorkerState.STOPPED, events=tuple(events)).to_html(folder / "run.html")


def test_the_events_to_draw_are_of_all_types():
    assert {type(event) for event in SOME_EVENTS} == set(ev.Event.__subclasses__())


def test_a_result_writes_the_trace_of_its_events(tmp_path):
    path, result = tmp_path / "trace.json", RunResult(WorkerState.SUCCEEDED, events=tuple(RESTARTED))
    with pytest.raises(ValueError, match=r"on_event=events\.append"):
        replace(result, events=()).to_chrome_trace(path)
    assert not os.listdir(tmp_path)
    result.to_chrome_trace(path)
    ev.write_chrome_trace(iter(RESTARTED), tmp_path / "again.json")
    assert path.read_bytes() == (tmp_path / "again.json").read_bytes()


# --- the picture

NAME = "{http://www.w3.org/2000/svg}"
COLOUR_NAMES = {colour: name for name, colour in COLOURS.items()}


def rows(events):
    """Return for each row of the picture its name, its bars, the titles of its marks and lines, and the text at its end."""
    found = {}
    for element in ElementTree.fromstring(draw_timelines(events)).iter():
        name = element.tag.removeprefix(NAME)
        y = float(element.get("y", element.get("y1", 0)))
        row = found.setdefault(int((y - 24) // 20), [])
        title = element.find(f"{NAME}title")
        if name == "rect" and title is not None:
            row.append(COLOUR_NAMES[element.get("fill")])
        elif name in ("text", "line") and title is not None:
            row.append(title.text)
        elif name == "text":
            row.append(element.text)
    return [row for number, row in sorted(found.items()) if number >= 0]


def test_the_picture_of_a_restarted_run():
    late = "rank 0: silent for 5.0 s of 10.0 s allowed"
    failed = "rank 1: ValueError: boom (the root cause)"
    first, second = ("start-up", "waits 1.0 s to be restarted"), ("start-up", "succeeded")
    assert rows(RESTARTED) == [
        ["rank 0", first[0], "stopped", first[1], *second, late, "succeeded, restarted once"],
        ["rank 1", first[0], "failed", first[1], *second, failed, "succeeded, restarted once"],
        [*COLOURS],
    ]
    assert draw_timelines([replace(RUN_STARTED, ranks=())]) == draw_timelines(()) == ""


def test_of_many_ranks_those_that_failed_are_drawn():
    events = [replace(RUN_STARTED, ranks=tuple(range(100))), *start(0.1, tuple(range(100)))]
    for rank, summary in ((90, "<escaped>"), (95, "boom")):
        events.append(at(1.5, ev.WorkerFailed, (rank,), failure=failure(rank, summary=summary), is_root_cause=rank == 95))
    *drawn, hidden, _ = rows(events)
    assert [row[0] for row in drawn] == [f"rank {rank}" for rank in [*range(30), 90, 95]]
    assert hidden == ["68 more ranks are not drawn"]


def test_a_page_for_a_browser_says_how_the_run_was_made(tmp_path):
    path, result = tmp_path / "run.html", mpwatch.run(int, 1, grace_period=3)
    result.to_html(path)
    page = path.read_text(encoding="utf-8")
    for text in ("grace_period=3", f"mpwatch {mpwatch.__version__}", f"1 rank on {platform.node()}", "command"):
        assert text in page
    result = replace(result, state=WorkerState.STOPPED, reason="<why>")
    result.to_html(path)
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "<title>&lt;why&gt;</title>" in page
    assert draw_timelines(result.events) in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert mpwatch.RunFailedError(result)._repr_html_() in page

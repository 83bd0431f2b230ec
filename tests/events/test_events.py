"""Events as JSON data, and the output of the observers of the package. The event streams are made by hand."""

import json
import logging
import math
import os
import signal
from dataclasses import dataclass, fields, replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpwatch
import mpwatch.events
from mpwatch import Collective, CollectiveState, FailureKind, Lateness, ProcessFailure, Progress, RunResult, WorkerState
from mpwatch.events import (
    CollectivesRecorded,
    Event,
    JsonLines,
    Progressed,
    Restarting,
    SlowRank,
    Stopping,
    WorkerExited,
    WorkerFailed,
    write_chrome_trace,
)
from mpwatch.events.logging_observer import LogEvents
from support.event_streams import START, EventHistory, failed_run, failure, moved_node_run, restarted_run
from support.programs import python

NOT_UTF8 = "caf\udce9"  # a file name that is not UTF-8, as os.fsdecode has it


def parse_strictly(text):
    """Parse JSON without the constants that Python adds to it, such as NaN."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text.encode().decode(), parse_constant=refuse)


def test_importing_events_loads_few_modules():
    modules = python("-c", "import sys, mpwatch.events; print(*sys.modules)").stdout.split()
    assert not {"torch", "json", "logging"} & set(modules)


# --- JSON data


def test_an_event_as_json_data():
    (event,) = (event for event in restarted_run() if isinstance(event, WorkerFailed))
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
    """An event that has any value in it."""
    progress = Progress(step=1, total=None, metrics={"value": value}, elapsed=0.0)
    return WorkerExited(time=0.0, monotonic=0.0, run_id=NOT_UTF8, ranks=(0,), pid=1, exit_code=0, progress=progress)


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
    (line,) = log_events(caplog, logging.WARNING, restarted_run())
    assert line == "run a1b2c3d4: restarting ranks 0-1 in 1.0 s (restart 1, 0 left): rank 1 failed first: ValueError: boom"
    assert caplog.records[0].levelno == logging.WARNING


def test_the_progress_of_a_run_is_logged_at_info(caplog):
    lines = [line.removeprefix("run a1b2c3d4: ") for line in log_events(caplog, logging.INFO, restarted_run())]
    states = ["UNKNOWN -> INIT", "INIT -> HEALTHY", "rank 0: silent for 5.0 s of 10.0 s allowed"]
    assert lines[:4] == ["train starts on here: 2 ranks of role default", *states]
    assert (len(lines), lines[-1]) == (10, "SUCCEEDED after 4.7 s, after 1 restart")


def test_a_log_record_is_one_line_that_can_be_encoded(caplog):
    cause = failure(0, FailureKind.EXIT, evidence=f"one\ntwo {NOT_UTF8}")
    at = {"time": 0.0, "monotonic": 0.0, "ranks": (0,)}
    event = Restarting(run_id=NOT_UTF8, cause=cause, delay=0.0, restarts_left=2, **at)
    (line,) = log_events(caplog, logging.INFO, [event, Event(run_id="of a later version", **at)])
    assert line.startswith("run caf\\udce: restarting rank 0 (restart 1, 2 left): rank 0 ended with exit code 1 ")
    assert line.endswith(" (one two caf\\udce9)")


# --- JSON lines


def test_each_event_is_a_line_whatever_its_text(tmp_path):
    path = tmp_path / "events.jsonl"
    text = f"größer\n\r\x0b\x1c\x85\u2028\u2029\x00 {NOT_UTF8}"
    for _ in range(2):
        JsonLines(path)(EventHistory(fn=text).events[0])
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert parse_strictly(lines[1])["fn"] == text.replace("\udce9", "\\udce9")


def test_several_processes_append_to_one_file(tmp_path, barrier):
    path = tmp_path / "events.jsonl"

    def append_many(barrier):
        observe = JsonLines(path)
        event = EventHistory(run_id=str(mpwatch.current_worker().rank), fn="f" * 5000).events[0]
        barrier.wait()
        for _ in range(200):
            observe(event)

    mpwatch.run(append_many, 3, args=(barrier,))
    found = [parse_strictly(line)["run_id"] for line in path.read_text().splitlines()]
    assert sorted(found) == ["0"] * 200 + ["1"] * 200 + ["2"] * 200


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        JsonLines(tmp_path / "nowhere" / "events.jsonl")
    with pytest.raises(IsADirectoryError):
        JsonLines(tmp_path)


# --- the trace


def write_trace(tmp_path, events):
    path = tmp_path / "trace.json"
    write_chrome_trace(events, path)
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
    lines = write_trace(tmp_path, restarted_run())
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
        ("start-up", 3_000_000, 3_500_000),
        ("train", 3_500_000, 4_500_000),
    ]
    calls = [(line["tid"], line["args"]["outcome"]) for line in lines if line.get("cat") == "call"]
    assert calls == [(2, "stopped"), (2, "succeeded"), (3, "failed"), (3, "succeeded")]
    check_nesting(lines)
    two_runs = restarted_run() + EventHistory(run_id="b").start_and_call().events
    assert {line["pid"] for line in write_trace(tmp_path, two_runs)} == {1, 2}


def test_the_call_of_a_hanging_rank_lasts_until_it_is_stopped(tmp_path):
    """The failure itself is drawn at the last heartbeat."""
    history = EventHistory().start_and_call().add(WorkerExited, 9.0, (1,), pid=101, exit_code=-9, heartbeat_at=START + 1.0)
    history.add(WorkerFailed, 1.0, (1,), failure=failure(1, FailureKind.HANG), is_root_cause=True)
    lines = write_trace(tmp_path, history.events)
    assert ("train", 500_000, 9_000_000) in find_spans(lines, 3)
    assert ("rank 1: hung: still at work (the root cause)", 1_000_000) in find_marks(lines, 3)


def test_ranks_that_moved_from_another_node_are_drawn(tmp_path):
    lines = write_trace(tmp_path, moved_node_run())
    assert name_lanes(lines) == {1: "group", 2: "rank 2", 3: "rank 3", 4: "rank 4", 5: "rank 5"}
    for tid, starts in ((4, [500_000]), (2, [2_500_000, 4_500_000])):
        assert [start for name, start, _ in find_spans(lines, tid) if name == "train"] == starts


CALLED = {"group": "default", "ranks": (0, 1)}
COLLECTIVE = Collective(name="broadcast", sequence=1, state=CollectiveState.COMPLETED, seconds=1.0, **CALLED)
WAITING = Collective(name="all_reduce", sequence=2, state=CollectiveState.WAITING, seconds=0.75, place="x", **CALLED)


def test_the_collectives_of_a_rank_are_at_the_mark_of_their_recording(tmp_path):
    history = EventHistory().start_and_call().fail_rank_1(after=2.0)
    history.add(CollectivesRecorded, 2.0, (0,), collectives=(COLLECTIVE, WAITING))
    (mark,) = (line for line in write_trace(tmp_path, history.events) if line.get("cat") == "collectives_recorded")
    assert (mark["tid"], mark["ts"]) == (2, 2_000_000)
    assert [(call["name"], call["place"]) for call in mark["args"]["collectives"]] == [
        ("broadcast", ""),
        ("all_reduce", "x"),
    ]


AT = {"run_id": "a1b2c3d4e5", "ranks": (0, 1), "time": START, "monotonic": START}
LATENESS = Lateness(rank=0, share=0.42)
SOME_EVENTS = [
    *(restarted_run() + failed_run() + moved_node_run()),
    CollectivesRecorded(collectives=(COLLECTIVE, WAITING), **AT),
    Progressed(step=3, total=None, metrics={"loss": math.inf}, **AT),
    SlowRank(lateness=LATENESS, **AT),
    Stopping(stop_cause="SIGUSR1", after_step=None, **AT),
]
SECONDS = st.floats(0, 100, allow_nan=False)


@given(events=st.lists(st.tuples(st.sampled_from(SOME_EVENTS), st.none() | SECONDS), min_size=1, max_size=25))
def test_any_events_in_any_order_can_be_drawn(tmp_path_factory, events):
    folder = tmp_path_factory.getbasetemp()
    events = [event if at is None else replace(event, monotonic=START + at) for event, at in events]
    check_nesting(write_trace(folder, events))
    RunResult(WorkerState.STOPPED, events=tuple(events)).to_html(folder / "run.html")


def test_the_events_to_draw_are_of_all_types():
    assert {type(event) for event in SOME_EVENTS} == set(Event.__subclasses__())


def test_the_error_without_events_says_how_to_collect_them(tmp_path):
    with pytest.raises(ValueError, match=r"on_event=events\.append"):
        RunResult(WorkerState.SUCCEEDED).to_chrome_trace(tmp_path / "trace.json")
    assert not os.listdir(tmp_path)


def test_a_result_writes_the_trace_of_its_events(tmp_path):
    path, result = tmp_path / "trace.json", RunResult(WorkerState.SUCCEEDED, events=tuple(restarted_run()))
    result.to_chrome_trace(path)
    write_chrome_trace(iter(restarted_run()), tmp_path / "again.json")
    assert path.read_bytes() == (tmp_path / "again.json").read_bytes()
    with pytest.raises(FileNotFoundError):
        result.to_chrome_trace(tmp_path / "nowhere" / "trace.json")

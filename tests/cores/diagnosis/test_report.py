"""The text of reports, from evidence made by hand."""

import os
from dataclasses import replace

import pytest

from cores.diagnosis.evidence import (
    HEAD,
    IN_C10D,
    LIBRARY,
    LOADS,
    LOST_PEER,
    STOPPED,
    WAITS,
    died,
    judge,
    raised,
    returned,
    stack,
    stopped,
)
from mpwatch import Progress, RunFailedError
from mpwatch.results.places import ACTIVITIES_BY_FILE, PACKAGE_FOLDER, format_location
from mpwatch.results.run_result import format_report
from mpwatch.watcher.diagnosis.stack_dumps import RANK_MAIN_FILE, SCRIPT_FILE
from mpwatch.wire.shared_memory import HeartbeatSample, Report

CAUSE = raised(ValueError("x"))


def report(*ranks, **more):
    return format_report(judge(*ranks, **more)).splitlines()


def test_512_ranks_take_a_line_for_each_fate():
    ranks = [STOPPED] * 512
    ranks[100], ranks[200], ranks[300] = CAUSE, raised(LOST_PEER, 9.5), raised(LOST_PEER, 9.6)
    assert report(*ranks) == [
        "rank 100 failed first: ValueError: x",
        "  ranks 0-99, 101-199, 201-299, 301-511: stopped by the watcher",
        f"  ranks 200, 300: victims of rank 100: RuntimeError: {LOST_PEER}",
    ]
    beats = {rank: 4.0 + rank / 1000 for rank in range(512)}
    assert len(report(*[WAITS] * 511, LOADS, silent_ranks=beats, heartbeat_timeout=5.0)) == 2


def test_ranks_are_grouped_by_where_they_were_and_many_groups_are_counted():
    places = [stopped(stack("step", line)) for line in (12, 88, 12)]
    assert report(CAUSE, *places)[1:] == [
        "  ranks 1, 3: stopped by the watcher (train.py:12 in step)",
        "  rank 2: stopped by the watcher (train.py:88 in step)",
    ]
    lines = report(CAUSE, *(stopped(stack("step", line)) for line in range(1, 512)))
    assert lines[31:] == ["  and 481 more groups of ranks: see .failures and .stacks"]


def test_peer_errors_without_a_cause_are_no_victims():
    lines = report(raised(LOST_PEER, 1.0), raised(LOST_PEER, 2.0), returned())
    head = "no rank was seen to fail by itself; the first to report a problem with a peer: rank 0: RuntimeError: [gloo/"
    starts = [head, "  rank 1: RuntimeError: [gloo/", "  rank 2: had returned"]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


@pytest.mark.parametrize(
    ("died_at", "lines"),
    [
        (8.9, ["rank 0 was killed by SIGKILL (", "  ranks 1-2: perhaps victims of rank 0: ValueError: x"]),
        (9.05, ["rank 1 failed first: ValueError: x", "at the same moment, so it may have failed first", "  rank 2: "]),
        (2.0, ["rank 0 was killed by SIGKILL (", "  ranks 1-2: ValueError: x"]),
    ],
)
def test_an_exception_and_a_death_at_the_same_moment_are_both_named(died_at, lines):
    result = judge(died(-9, died_at), CAUSE, CAUSE)
    assert all(text in line for text, line in zip(lines, format_report(result).splitlines(), strict=True))
    assert "perhaps" not in format_report(replace(result, keep_going=True))  # then they are independent


def test_the_last_lines_that_an_interpreter_printed():
    lines = report(died(1, was_ready=False, startup_output="".join(f"line {n}\n" for n in range(100))))
    assert lines[1:] == ["  what it printed:", *(f"    line {n}" for n in range(88, 100))]
    assert "was not ready after 300 s" in report(returned(), STOPPED, never_ready=[1], start_timeout=300.0)[0]


# --- silence and waiting


def test_a_silent_rank_is_reported_with_its_last_step_and_its_victims_in_one_line():
    waits = stopped(
        f"{IN_C10D}\n{stack('train', 21).removeprefix(HEAD)}", heartbeat=HeartbeatSample(4.0, Report(4.0, 7, 20, {}))
    )
    loads = {**LOADS, "heartbeat": HeartbeatSample(4.5, Report(4.5, 120, 500, {"loss": 0.5}))}
    result = judge(waits, waits, loads, silent_ranks={0: 4.0, 1: 4.1, 2: 4.5}, heartbeat_timeout=5.0)
    at = "silent for 5.5 s (heartbeat_timeout=5), at step 120 of 500: still at work (train.py:12 in load: sleep(60))"
    fate = "waited in all_reduce (train.py:21 in train), silent for 6.0 s at step 7 of 20"
    assert format_report(result).splitlines() == [f"rank 2 was {at}", f"  ranks 0-1: victims of rank 2: {fate}"]
    assert str(result.failures[0]) == f"rank 0: {fate}"
    assert result.progress[2] == Progress(step=120, total=500, metrics={"loss": 0.5}, elapsed=4.5)
    assert (result.root_cause.elapsed, result.root_cause.stack) == (4.5, LOADS["stacks"])


# --- places


def frames(*files):
    return HEAD + "".join(f'  File "{os.path.join(LIBRARY, file)}", line 1 in f\n' for file in files)


IN_STEP = f"{IN_C10D}\n{stack('step', 88, 'dist.f(x)').removeprefix(HEAD)}"
UNPACK = f"{PACKAGE_FOLDER}/wire/pickling/call_payload.py"


@pytest.mark.parametrize(
    ("stacks", "phrase"),
    [
        (stack("step", 88, "time.sleep(60)"), " (train.py:88 in step: time.sleep(60))"),
        (IN_STEP, " in all_reduce (train.py:88 in step: dist.f(x))"),
        (stack("step", 88, "x" * 300), f" (train.py:88 in step: {'x' * 100} ...)"),
        (stack("step", 88, "run('# 1')  # calls C++"), " (train.py:88 in step: run('# 1'))"),
        (f'{HEAD}  File "<string>", line 2 in __init__\n  File "/me/a.py", line 8 in f', " in __init__ (a.py:8 in f)"),
        ("suspended, by SIGSTOP or SIGTSTP", " (suspended, by SIGSTOP or SIGTSTP)"),
        # without code of the user, the place is in a package other than torch
        (frames("torch/graph.py", "trainer/precision.py", "trainer/loop.py"), " in f (precision.py:1 in f)"),
        # outside of the function
        (frames(f"{PACKAGE_FOLDER}/wire/shared_memory.py", "/home/me/train.py"), " (train.py:1 in f)"),
        (frames(f"{PACKAGE_FOLDER}/worker/process_group.py"), " while joining the process group"),
        (frames("/home/me/train.py", UNPACK), " while loading the call (train.py:1 in f)"),
    ],
)
def test_where_a_rank_was(stacks, phrase):
    assert format_location(stacks) == phrase


def test_files_of_mpwatch_that_reports_recognise_exist():
    """A renamed module would silently lose its phrase, or show its frames as the user's."""
    files = [*ACTIVITIES_BY_FILE, f"/..{RANK_MAIN_FILE}", f"/..{SCRIPT_FILE}"]
    assert [file for file in files if not os.path.exists(PACKAGE_FOLDER + file)] == []


# --- tables of notebooks


def test_the_table_of_a_failure_escapes_what_ranks_say():
    error = RunFailedError(judge(raised(ValueError("<script>")), stopped(stack("<module>"))))
    html = error._repr_html_()
    assert html == error.result._repr_html_()
    assert "<script>" not in html
    shown = ("<b>rank 0 failed first: ValueError: &lt;script&gt;</b>", ">rank 1</th>", "(train.py:3 in &lt;module&gt;)")
    assert all(text in html for text in (*shown, "<summary>traceback of rank 0</summary>"))

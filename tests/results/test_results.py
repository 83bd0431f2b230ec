"""Results, failures, errors and collectives as programs and notebooks see them."""

import copy
import json
import multiprocessing
import os
import pickle
import re
import threading
from dataclasses import replace

import pytest

import mpwatch
from mpwatch import FailureKind, ProcessFailure, Progress, RunFailedError, RunResult, RunTimeoutError, WorkerState
from support import failing
from support.runs import failed

FAILED, STOPPED = WorkerState.FAILED, WorkerState.STOPPED


def failure(rank, kind=FailureKind.EXIT, **more):
    given = {"exit_code": 3, "elapsed": 1.0, "hostname": "h", **more}
    return ProcessFailure(rank=rank, local_rank=rank, pid=1, kind=kind, **given)


def failed_result(*failures, states=()):
    by_rank = {each.rank: each for each in failures}
    states = dict(states) | dict.fromkeys(by_rank, FAILED)
    return RunResult(FAILED, failures=by_rank, root_cause=failures[0], worker_states=states)


def text_of(result):
    return str(RunFailedError(result)).splitlines()


EVIDENCE = "its program sent no sign of life for 15 s (node_timeout)"
LOSS = {"group_rank": 1, "node_ranks": (2, 3), "hostname": "gpu7", "kind": FailureKind.LOST, "evidence": EVIDENCE}
LOST_RANKS = [replace(failure(rank), **LOSS) for rank in (2, 3)]


def test_a_lost_node_is_the_subject_of_the_verdict_and_its_ranks_share_a_line_if_another_rank_failed_first():
    assert text_of(failed_result(*LOST_RANKS, states={0: STOPPED, 1: STOPPED})) == [
        f"node 1 (gpu7) with ranks 2-3 was lost: {EVIDENCE}",
        "  ranks 0-1: stopped by the watcher",
    ]
    assert str(LOST_RANKS[1]) == f"rank 3: lost with node 1 (gpu7): {EVIDENCE}"
    assert text_of(failed_result(failure(0), *LOST_RANKS))[1:] == [f"  ranks 2-3: lost with node 1 (gpu7): {EVIDENCE}"]


def test_the_report_of_a_run_without_failure_has_the_last_steps():
    def report_of(*steps):
        reports = [Progress(step=step, total=total, metrics={}, elapsed=1.0) for step, total in steps]
        return text_of(RunResult(STOPPED, progress=dict(enumerate(reports)), reason="the run was stopped"))

    few = "  last reports: ranks 0-1 at step 30 of 100; rank 2 at step 12 of 100; rank 4 at step 7"
    assert report_of((30, 100), (30, 100), (12, 100), (None, None), (7, None)) == ["the run was stopped", few]
    assert report_of(*((step, 100) for step in range(9)))[1] == "  last reports: ranks 0-8 at steps 0 to 8"


def test_the_repr_and_the_json_of_a_result():
    result = mpwatch.run(failing.rank, 2)
    assert json.loads(result.to_json())["return_values"] == {"0": 0, "1": 1}
    assert re.fullmatch(r"<RunResult SUCCEEDED after \d+\.\d s: \[0, 1\]>", repr(result))
    assert re.fullmatch(r"\(<Attempt 0: first start, \d+\.\d s: SUCCEEDED>,\)", repr(result.attempts))
    assert repr(replace(result, return_values={0: "x" * 1000, 1: range(9)}, elapsed=2)).endswith("xx', range(0, 9)]>")
    assert repr(failed_result(failure(1))) == "<RunResult FAILED after 0.0 s: rank 1 ended with exit code 3 and no result>"


def test_the_json_of_a_failed_result_has_its_facts():
    def report_and_fail():
        mpwatch.report(step=3, loss=float("nan"))
        raise KeyError("key")

    result = mpwatch.run(report_and_fail, 1, check=False)
    facts = json.loads(RunFailedError(result).to_json())
    assert (facts["verdict"], facts["failures"]["0"]["summary"]) == (result.verdict, "KeyError: 'key'")
    assert "in report_and_fail" in facts["root_cause"]["traceback"]
    assert (facts["progress"]["0"]["step"], facts["progress"]["0"]["metrics"]) == (3, {"loss": "nan"})


def test_every_error_can_be_pickled_and_copied():
    def fail():
        raise ValueError("x", lambda: None)

    result = mpwatch.run(fail, 1, check=False)
    for kind in (RunFailedError, RunTimeoutError):
        error = kind(result)
        assert repr(error) == f"{kind.__name__}({result.verdict!r})"
        for back in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(back) is kind
            assert str(back).splitlines()[1:] == str(error).splitlines()[1:]
            assert back.result.verdict.startswith("rank 0 failed first: ValueError: ")
            assert back.root_cause.exception.args[0] == "x"
            assert back.__cause__ is back.root_cause.exception


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "all_reduce #3 (default group)"),
        ({"group": "1 (pair)", "place": "a.py:1 in f"}, "all_reduce #3 (group 1 (pair)) at a.py:1 in f"),
        ({"group": "0123456789" * 4}, "all_reduce #3 (group 01234567)"),
        ({"input_shapes": ((),), "input_dtypes": ("int64",)}, "all_reduce #3 (int64[], default group)"),
        ({"output_shapes": ((2,), (2,)), "output_dtypes": ("int8",) * 2}, "all_reduce #3 (2 x int8[2], default group)"),
        ({"input_shapes": ((2,), (3,)), "input_dtypes": ("int8",) * 2}, "all_reduce #3 (int8[2] and 1 more, default group)"),
    ],
)
def test_a_collective_in_words(fields, text):
    called = {"name": "all_reduce", "sequence": 3, "group": "default", "ranks": (0, 1), **fields}
    assert str(mpwatch.Collective(state=mpwatch.CollectiveState.WAITING, **called)) == text


def test_the_table_of_values_is_short_and_escaped():
    values = {0: "<b>", **dict.fromkeys(range(1, 512), [1] * 1000)}
    table = RunResult(WorkerState.SUCCEEDED, return_values=values)._repr_html_()
    assert (table.count("<tr>"), "480 more" in table, "&lt;b&gt;" in table, len(table) < 5000) == (33, True, True, True)


NASTY = "bad\x1b]0;title\x07\r\x1b[2J\x85\udcff\u202e\n\tend"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
CLEAN = r"bad\x1b]0;title\x07\r\x1b[2J\x85\udcff\u202e"


def test_no_control_character_of_an_exception_is_printed(caplog, capsys):
    def fails():
        def step_of_rank():
            raise ValueError(NASTY)

        mpwatch.report(step=1, **{"lo\x1bss\n\udcff": 1.0})
        step_of_rank.__code__ = step_of_rank.__code__.replace(co_name="st\x1bep\n", co_filename="/tr\x1bain\n.py")
        step_of_rank()

    caplog.set_level("DEBUG", "mpwatch")
    error = failed(fails, 1, progress=True)
    result = error.result
    assert error.__cause__.args == (NASTY,)
    assert result.progress[0].metrics == {"lo\x1bss\n\udcff": 1.0}
    with pytest.raises(SystemExit):
        mpwatch.main(fails, 1)
    printed = capsys.readouterr().err
    texts = [str(error), repr(error), error._repr_html_(), error.root_cause.summary, error.root_cause.traceback, str(result)]
    assert not any(map(CONTROL.search, [*texts, caplog.text, printed]))
    verdict = f"rank 0 failed first: ValueError: {CLEAN} … "
    assert str(error).startswith(verdict)
    assert re.search(r" \(tr\\x1bain\\n\.py:\d+ in st\\x1bep\\n\)$", str(error), re.MULTILINE)
    assert f"ValueError: {CLEAN}\n\tend\nRunFailedError: {verdict}" in printed
    assert r"lo\x1bss\n\udcff 1" in printed


def test_control_characters_of_stderr_are_escaped():
    def prints_and_exits():
        os.write(2, b"\x1b[31mred\x1b[0m \x1b]0;title\x07\n")
        os._exit(3)

    error = failed(prints_and_exits, 1, logs=mpwatch.LogSpec(show="none"))
    assert str(error).splitlines()[1:3] == ["  the end of its stderr:", r"    red \x1b]0;title\x07"]


def test_control_characters_of_names_are_escaped(caplog, capfd):
    def blocks():
        threading.Thread(target=threading.Event().wait, name="th\x1b[2J\n\udcff").start()
        multiprocessing.get_context("fork").Process(target=threading.Event().wait, name="pr\x1b[2J\udcff").start()

    mpwatch.run(blocks, 1, grace_period=0.0)
    names = r"(non-daemon threads: th\x1b[2J\n\udcff; non-daemon processes: pr\x1b[2J\udcff)"
    (record,) = caplog.records
    text = f"rank 0 had returned but was still running 1 s later {names}; mpwatch stopped it. Its value is kept"
    assert record.getMessage() == text
    assert "Traceback" not in capfd.readouterr().err

"""What is said of a run, and who is blamed: pure, from facts."""

import pickle
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from told import COMPLAINT, IN_TORCH, LIBRARY, STOPPED, at, died, observations, raised, returned

from mpwatch import FailureKind, ProcessFailure, RunFailedError, RunResult, RunTimeoutError, WorkerState
from mpwatch.os_support.signals import DUMP_SIGNAL
from mpwatch.results.html import group_table
from mpwatch.results.report import exit_text, ranks_text, report, where
from mpwatch.watcher.diagnosis.diagnose import diagnose
from mpwatch.watcher.machine.transitions import StopReason


def test_the_earliest_primary_failure_is_the_cause():
    result = diagnose(observations(raised(ValueError("late"), 9.9), raised(ValueError("early"), 9.8), STOPPED))
    assert result.root_cause.rank == 1
    assert set(result.failures) == {0, 1}
    assert result.worker_states[2] is WorkerState.STOPPED


def test_class_comes_before_time():
    result = diagnose(observations(raised(COMPLAINT, 1.0), raised(ValueError("cause"), 9.0), died(-9, 9.5)))
    assert result.root_cause.rank == 1
    assert result.failures[0].is_secondary
    assert not result.failures[2].is_secondary


def test_a_complaint_that_an_exception_was_raised_from_makes_it_secondary():
    error = RuntimeError("training failed")
    error.__cause__ = COMPLAINT
    result = diagnose(observations(raised(error, 1.0), died(-9)))
    assert result.root_cause.rank == 1


def test_a_report_after_the_stop_is_a_consequence_of_it():
    result = diagnose(observations(raised(ValueError("cause"), 9.0), raised(KeyboardInterrupt(), 10.1), STOPPED))
    assert set(result.failures) == {0}


@pytest.mark.parametrize(("code", "failed"), [(-9, True), (-11, True), (-15, False), (3, False), (0, False)])
def test_a_death_while_being_stopped_is_the_rank_s_own_only_if_we_cannot_have_caused_it(code, failed):
    result = diagnose(observations(raised(ValueError("x"), 9.0), died(code, 10.2, sent=[signal.SIGTERM])))
    assert (1 in result.failures) == failed
    assert 1 not in diagnose(observations(raised(ValueError("x"), 9.0), died(-9, 20.2, sent=[9, 15]))).failures


def test_a_program_that_a_rank_became_as_it_was_looked_at_died_of_that():
    looked_at = {**died(-DUMP_SIGNAL, 10.01), "was_asked": True}
    assert set(diagnose(observations(looked_at, raised(ValueError("x"), 9.9))).failures) == {1}
    assert set(diagnose(observations(died(-DUMP_SIGNAL, 10.01), raised(ValueError("x"), 9.9))).failures) == {0, 1}


def test_a_crash_of_a_rank_that_is_being_stopped_is_no_cause():
    result = diagnose(observations(raised(COMPLAINT, 9.0), died(-6, 10.2, sent=[signal.SIGTERM])))
    assert result.root_cause.rank == 0
    assert set(result.failures) == {0, 1}


def test_a_rank_that_was_killed_after_it_had_returned_may_be_the_cause():
    gone = {**returned(), "died_at": 5.0, "exit_code": -9}
    result = diagnose(observations(gone, raised(COMPLAINT, 6.0)))
    assert result.root_cause.rank == 0
    assert diagnose(observations(gone, returned(), verdict=StopReason.SUCCEEDED, stopped_at=None)).failures == {}


def test_a_user_s_own_words_are_no_complaint():
    result = diagnose(observations(raised(RuntimeError("timed out waiting for the data server"), 9.0), STOPPED))
    assert not result.root_cause.is_secondary


def test_a_text_of_many_lines_takes_one_line_here():
    result = diagnose(observations(raised(ValueError("first\nsecond"), 9.0), raised(ValueError("a\nb"), 9.5)))
    assert report(result).splitlines() == ["rank 0 failed first: ValueError: first …", "  rank 1: ValueError: a …"]


def test_two_that_died_before_anything_was_done_are_both_failures():
    result = diagnose(observations(died(7), died(7), STOPPED))
    assert set(result.failures) == {0, 1}


@pytest.mark.parametrize(
    ("what", "kind", "exit_code", "text"),
    [
        (died(7), FailureKind.EXIT, 7, "rank 0 ended with exit code 7 and no result"),
        (died(0), FailureKind.LOST, 1, "rank 0 ended without returning a result"),
        (died(None), FailureKind.LOST, 1, "rank 0 ended without returning a result"),
        (died(-11), FailureKind.SIGNAL, 139, "rank 0 was killed by SIGSEGV (an invalid memory access"),
        (died(-40), FailureKind.SIGNAL, 168, "rank 0 was killed by signal 40"),
        (
            {**died(1), "was_ready": False},
            FailureKind.START,
            1,
            "rank 0 never started: its interpreter ended with exit code 1",
        ),
        ({**died(-9), "was_ready": False}, FailureKind.START, 137, "rank 0 never started: it was killed by SIGKILL"),
        (raised(SystemExit(256), 1.0), FailureKind.EXIT, 1, "rank 0 ended with exit code 1 and no result (SystemExit: 256)"),
        (raised(SystemExit("no"), 1.0), FailureKind.EXIT, 1, "(SystemExit: no)"),
        (raised(ValueError(), 1.0), FailureKind.EXCEPTION, 1, "rank 0 failed first: ValueError"),
        (raised(ValueError("x" * 600), 1.0), FailureKind.EXCEPTION, 1, "x" * 488 + " …"),
    ],
)
def test_kinds_and_verdicts(what, kind, exit_code, text):
    was_ready = what.pop("was_ready", True)
    given = observations(what)
    given.ranks[0].was_ready = was_ready
    result = diagnose(given)
    assert (result.root_cause.kind, result.root_cause.exit_code) == (kind, exit_code)
    assert text in report(result).splitlines()[0]


def test_ranks_that_never_came_up():
    result = diagnose(observations(returned(), STOPPED, never_ready=[1], start_timeout=300.0))
    assert result.root_cause.kind is FailureKind.START
    assert "was not ready after 300 s" in report(result)


def test_a_success():
    result = diagnose(observations(returned(1), returned(2), verdict=StopReason.SUCCEEDED, stopped_at=None))
    assert list(result) == [1, 2]
    assert result.state is WorkerState.SUCCEEDED


def test_an_interrupt():
    result = diagnose(observations(STOPPED, returned(), verdict=StopReason.INTERRUPTED, signum=signal.SIGTERM))
    assert result.state is WorkerState.STOPPED
    assert report(result).splitlines() == [
        "the run was stopped: this process received SIGTERM",
        "  rank 0: stopped by the watcher",
        "  rank 1: had returned",
    ]


def test_equal_fates_are_one_line_at_512_ranks():
    ranks = [STOPPED] * 512
    ranks[100] = raised(ValueError("x"), 9.0)
    ranks[200] = ranks[300] = raised(COMPLAINT, 9.5)
    text = report(diagnose(observations(*ranks)))
    assert len(text.splitlines()) == 3
    assert "ranks 200, 300: a victim of rank 100: RuntimeError" in text
    assert "ranks 0-99, 101-199, 201-299, 301-511: stopped by the watcher" in text


FROM_STEP = " in all_reduce (train.py:88 in step: dist.all_reduce(x))"
IN_FROM_STEP = " in all_reduce (train.py:88 in step: dist.all_reduce(x))"


@pytest.mark.parametrize(
    ("stacks", "words"),
    [
        (at("step", 88, "time.sleep(60)"), " (train.py:88 in step: time.sleep(60))"),
        (at("step", 88), " (train.py:88 in step)"),
        (at("step", 88) + "\n\n" + at("other", 1, thread="Thread 0x2"), " (train.py:88 in step)"),
        (IN_TORCH + '\n    wait()\n  File "/home/me/train.py", line 88 in step\n    dist.all_reduce(x)', FROM_STEP),
        (f'Thread 0x1 (most recent call first):\n  File "{LIBRARY}/torch/c10d.py", line 3 in f', " (c10d.py:3 in f)"),
        (at("step", 88, "x" * 300), f" (train.py:88 in step: {'x' * 100})"),
        (
            'Thread 0x1 (most recent call first):\n  File "<string>", line 2 in __init__\n  File "/me/train.py", line 8 in f\n    Cfg()',
            " in __init__ (train.py:8 in f: Cfg())",
        ),
        ('Thread 0x1 (most recent call first):\n  File "<stdin>", line 2 in f', " (<stdin>:2 in f)"),
        ("suspended, by SIGSTOP or SIGTSTP", " (suspended, by SIGSTOP or SIGTSTP)"),
        ("Thread 0x1 (most recent call first):\n  <no Python frame>", ""),
        ("", ""),
    ],
)
def test_where_a_rank_was(stacks, words):
    assert where(stacks) == words


def test_ranks_are_grouped_by_where_they_were():
    ranks = [{**STOPPED, "stacks": at("step", 88 if rank % 2 else 12)} for rank in range(8)]
    ranks[3] = raised(ValueError("x"), 9.0)
    error = RunFailedError(diagnose(observations(*ranks)))
    assert str(error).splitlines() == [
        "rank 3 failed first: ValueError: x",
        "  ranks 0, 2, 4, 6: stopped by the watcher (train.py:12 in step)",
        "  ranks 1, 5, 7: stopped by the watcher (train.py:88 in step)",
    ]
    assert str(error).splitlines() == [error.verdict, *(f"  {line}" for line in error.fates)]


def test_many_groups_are_counted():
    ranks = [raised(ValueError("x"), 9.0), *({**STOPPED, "stacks": at("step", line)} for line in range(1, 512))]
    lines = report(diagnose(observations(*ranks))).splitlines()
    assert len(lines) == 32
    assert lines[-1] == "  and 481 more groups of ranks: see .failures and .stacks"


def test_victims_are_called_so_if_there_is_a_cause():
    result = diagnose(observations(raised(COMPLAINT, 1.0), raised(ValueError("x"), 9.0)))
    assert "  rank 0: a victim of rank 1: RuntimeError: [gloo/" in report(result)
    alone = diagnose(observations(raised(COMPLAINT, 1.0), raised(COMPLAINT, 2.0), returned()))
    verdict, other, ended = report(alone).splitlines()
    assert verdict.startswith(
        "no rank was seen to fail by itself; the first to complain of a peer: rank 0: RuntimeError: [gloo/"
    )
    assert other.startswith("  rank 1: RuntimeError: [gloo/")
    assert ended == "  rank 2: had returned"


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ({"oom": "proof"}, FailureKind.OOM, "rank 0 was killed by the kernel's out-of-memory killer (proof)"),
        (
            {"likely_oom": "why"},
            FailureKind.SIGNAL,
            "rank 0 was killed by SIGKILL (likely the out-of-memory killer: why)",
        ),
        ({"was_ready": False, "oom": "proof"}, FailureKind.OOM, "rank 0 was killed by the kernel's out-of-memory killer"),
    ],
)
def test_out_of_memory(what, kind, words):
    was_ready = what.pop("was_ready", True)
    given = observations({**died(-9), **what})
    given.ranks[0].was_ready = was_ready
    result = diagnose(given)
    assert (result.root_cause.kind, result.root_cause.exit_code, result.root_cause.signal) == (kind, 137, 9)
    assert report(result).startswith(words)


def test_details_that_do_not_come_out_here_cost_the_class_and_nothing_else():
    broken = {**raised(ValueError("x"), 9.0), "details": b"garbage"}
    result = diagnose(observations(broken))
    assert isinstance(result.root_cause.exception, ValueError)
    assert report(result) == "rank 0 failed first: ValueError: x"


@pytest.mark.parametrize(("code", "why"), [(-9, "making its text did not end"), (3, "it ended before its text was made")])
def test_an_exception_that_was_announced_and_never_told(code, why):
    silent = {"failing_at": 9.0, **died(code, 20.0, sent=[signal.SIGTERM, signal.SIGKILL])}
    result = diagnose(observations(silent, STOPPED))
    assert result.root_cause.kind is FailureKind.EXCEPTION
    assert report(result).startswith(f"rank 0 failed first: raised an exception that could not be sent ({why})")


def test_the_end_of_what_was_printed_is_told():
    given = observations({**died(1), "printed": "".join(f"line {n}\n" for n in range(100))})
    given.ranks[0].was_ready = False
    lines = report(diagnose(given)).splitlines()
    assert lines[1:3] == ["  what it printed:", "    line 88"]
    assert lines[-1] == "    line 99"


def test_the_table_of_a_notebook():
    good = diagnose(observations(returned("<b>"), returned([1] * 1000), verdict=StopReason.SUCCEEDED, stopped_at=None))
    assert "&lt;b&gt;" in good._repr_html_()
    assert len(good._repr_html_()) < 1000
    bad = diagnose(observations(raised(ValueError("<script>"), 9.0), {**STOPPED, "stacks": at("<module>", 3)}))
    html = RunFailedError(bad)._repr_html_()
    assert html == bad._repr_html_()
    assert "<script>" not in html
    assert "<b>rank 0 failed first: ValueError: &lt;script&gt;</b>" in html
    assert '<th style="text-align:left">rank 1</th>' in html
    assert "(train.py:3 in &lt;module&gt;)" in html
    assert "<summary>traceback of rank 0</summary>" in html
    assert "__repr__" not in RunResult(WorkerState.STOPPED, reason="why")._repr_html_()


def test_a_table_of_very_many_values():
    many = diagnose(
        observations(*[returned(n) for n in range(512)], verdict=StopReason.SUCCEEDED, stopped_at=None)
    )._repr_html_()
    assert many.count("<tr>") == 33
    assert "480 more" in many


def test_the_table_of_a_group():
    ranks = diagnose(observations(STOPPED, STOPPED, STOPPED)).workers
    html = group_table(WorkerState.HEALTHY, ranks, None)
    assert "<b>WorkerGroup of ranks 0-2</b>" in html
    assert "HEALTHY: the ranks are there" in html
    assert '<th style="text-align:left">started anew</th><td style="text-align:left">never</td>' in html
    assert "backend" not in html
    html = group_table(WorkerState.UNHEALTHY, [replace(rank, restart_count=2) for rank in ranks], "gloo")
    assert "the next call starts all of them anew" in html
    assert ">2 times<" in html
    assert ">gloo<" in html


def test_cells_are_called_what_ipython_calls_them(monkeypatch):
    compiler = SimpleNamespace(format_code_name=lambda file: ("Cell", "In[7]") if file == "/home/me/train.py" else None)
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    bad = diagnose(observations(raised(ValueError("bad"), 9.0), {**STOPPED, "stacks": at("train", 3)}))
    assert "(Cell In[7]:3 in train" in report(bad)
    shell.compile = None  # of another kind
    assert "(train.py:3 in train" in report(bad)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([5, 0, 2, 1], "ranks 0-2, 5"), ([0, 2], "ranks 0, 2")],
)
def test_ranks_text(ranks, text):
    assert ranks_text(ranks) == text


def test_exit_text():
    assert exit_text(3) == "ended with exit code 3"
    assert exit_text(-11).startswith("was killed by SIGSEGV")


@pytest.mark.parametrize("kind", [RunFailedError, RunTimeoutError])
def test_every_error_pickles(kind):
    error = kind(diagnose(observations(raised(ValueError("x", lambda: None), 9.0), STOPPED)))
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back).splitlines()[1:] == str(error).splitlines()[1:]
    assert back.root_cause.exception.args[0] == "x"


def test_states_say_whether_they_run():
    assert {state for state in WorkerState if state.is_running} == {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


def test_a_failure_and_a_result_can_be_made_by_users():
    failure = ProcessFailure(rank=0, local_rank=0, pid=1, hostname="h", kind=FailureKind.LOST, exit_code=1)
    result = RunResult(WorkerState.FAILED, failures={0: failure}, root_cause=failure)
    assert "rank 0 ended without" in str(RunFailedError(result))

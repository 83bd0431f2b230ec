"""The diagnosis and the report of an attempt: pure functions of observations."""

import copy
import os
import pickle
import signal
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mpwatch import FailureKind, ProcessFailure, Progress, RunFailedError, RunResult, RunTimeoutError, WorkerState
from mpwatch.results.failure import format_exit, format_ranks
from mpwatch.results.html import make_group_table
from mpwatch.results.places import ACTIVITIES_BY_FILE, PACKAGE_FOLDER, format_location
from mpwatch.results.report import FATE_LINES, format_overdue_ranks, format_report
from mpwatch.watcher.diagnosis.diagnose import diagnose
from mpwatch.watcher.diagnosis.stack_dumps import RANK_MAIN_FILE, SCRIPT_FILE
from mpwatch.watcher.machine.transitions import StopReason
from support.observations import (
    CONNECTION_LOST_ERROR,
    IN_TORCH,
    LIBRARY,
    STOPPED_RANK,
    make_observations,
    rank_that_died,
    rank_that_raised,
    rank_that_returned,
    stack_in,
)


def test_a_text_of_several_lines_takes_one_line_of_the_report():
    result = diagnose(
        make_observations(rank_that_raised(ValueError("first\nsecond"), 9.0), rank_that_raised(ValueError("a\nb"), 9.5))
    )
    assert format_report(result).splitlines() == ["rank 0 failed first: ValueError: first …", "  rank 1: ValueError: a …"]


@pytest.mark.parametrize(
    ("what", "kind", "exit_code", "text"),
    [
        (rank_that_died(7), FailureKind.EXIT, 7, "rank 0 ended with exit code 7 and no result"),
        (rank_that_died(0), FailureKind.LOST, 1, "rank 0 ended without returning a result"),
        (rank_that_died(None), FailureKind.LOST, 1, "rank 0 ended without returning a result"),
        (rank_that_died(-11), FailureKind.SIGNAL, 139, "rank 0 was killed by SIGSEGV (an invalid memory access"),
        (rank_that_died(-40), FailureKind.SIGNAL, 168, "rank 0 was killed by signal 40"),
        (
            {**rank_that_died(1), "was_ready": False},
            FailureKind.START,
            1,
            "rank 0 never started: its interpreter ended with exit code 1",
        ),
        (
            {**rank_that_died(-9), "was_ready": False},
            FailureKind.START,
            137,
            "rank 0 never started: it was killed by SIGKILL",
        ),
        (
            rank_that_raised(SystemExit(256), 1.0),
            FailureKind.EXIT,
            1,
            "rank 0 ended with exit code 1 and no result (SystemExit: 256)",
        ),
        (rank_that_raised(SystemExit("no"), 1.0), FailureKind.EXIT, 1, "(SystemExit: no)"),
        (rank_that_raised(ValueError(), 1.0), FailureKind.EXCEPTION, 1, "rank 0 failed first: ValueError"),
        (rank_that_raised(ValueError("x" * 600), 1.0), FailureKind.EXCEPTION, 1, "x" * 488 + " …"),
    ],
)
def test_kinds_and_verdicts(what, kind, exit_code, text):
    was_ready = what.pop("was_ready", True)
    given = make_observations(what)
    given.ranks[0].was_ready = was_ready
    result = diagnose(given)
    assert (result.root_cause.kind, result.root_cause.exit_code) == (kind, exit_code)
    assert text in format_report(result).splitlines()[0]


def test_a_rank_that_was_never_ready():
    result = diagnose(make_observations(rank_that_returned(), STOPPED_RANK, never_ready=[1], start_timeout=300.0))
    assert result.root_cause.kind is FailureKind.START
    assert "was not ready after 300 s" in format_report(result)


@pytest.mark.parametrize("stop_reason", [StopReason.INTERRUPTED, StopReason.CANCELLED_BY_JOB])
def test_an_interrupt(stop_reason):
    result = diagnose(make_observations(STOPPED_RANK, rank_that_returned(), stop_reason=stop_reason, signum=signal.SIGTERM))
    assert result.state is WorkerState.STOPPED
    assert format_report(result).splitlines() == [
        "the run was stopped: this process received SIGTERM",
        "  rank 0: stopped by the watcher",
        "  rank 1: had returned",
    ]


@pytest.mark.parametrize("stop_reason", [StopReason.INTERRUPTED, StopReason.CANCELLED_BY_JOB])
def test_a_rank_that_a_signal_to_all_processes_has_ended_did_not_fail(stop_reason):
    """It ended before the watcher had sent it a signal. A crash is a failure."""
    died = [rank_that_died(-signal.SIGTERM, 10.1), rank_that_died(-signal.SIGSEGV, 10.1)]
    result = diagnose(make_observations(*died, stop_reason=stop_reason, signum=signal.SIGTERM))
    assert result.worker_states == {0: WorkerState.STOPPED, 1: WorkerState.FAILED}


def test_equal_fates_share_a_line_at_512_ranks():
    ranks = [STOPPED_RANK] * 512
    ranks[100] = rank_that_raised(ValueError("x"), 9.0)
    ranks[200] = ranks[300] = rank_that_raised(CONNECTION_LOST_ERROR, 9.5)
    text = format_report(diagnose(make_observations(*ranks)))
    assert len(text.splitlines()) == 3
    assert "ranks 200, 300: victims of rank 100: RuntimeError" in text
    assert "ranks 0-99, 101-199, 201-299, 301-511: stopped by the watcher" in text


HEAD = "Thread 0x1 (most recent call first):\n"
FROM_STEP = " in all_reduce (train.py:88 in step: dist.all_reduce(x))"


@pytest.mark.parametrize(
    ("stacks", "phrase"),
    [
        (stack_in("step", 88, "time.sleep(60)"), " (train.py:88 in step: time.sleep(60))"),
        (stack_in("step", 88), " (train.py:88 in step)"),
        (stack_in("step", 88) + "\n\n" + stack_in("other", 1, thread="Thread 0x2"), " (train.py:88 in step)"),
        (IN_TORCH + '\n    wait()\n  File "/home/me/train.py", line 88 in step\n    dist.all_reduce(x)', FROM_STEP),
        (f'Thread 0x1 (most recent call first):\n  File "{LIBRARY}/torch/c10d.py", line 3 in f', " (c10d.py:3 in f)"),
        (stack_in("step", 88, "x" * 300), f" (train.py:88 in step: {'x' * 100} ...)"),
        (stack_in("step", 88, f"run({'x' * 80}, yyyyy, zzzzzz, 0)"), f" (train.py:88 in step: run({'x' * 80}, yyyyy, ...)"),
        (stack_in("step", 88, "run(  # calls C++"), " (train.py:88 in step: run()"),
        (stack_in("step", 88, "run('# 1')  # calls C++"), " (train.py:88 in step: run('# 1'))"),
        (stack_in("step", 88, "isn't # code"), " (train.py:88 in step: isn't # code)"),
        (stack_in("step", 88, "# of another version"), " (train.py:88 in step: # of another version)"),
        (
            'Thread 0x1 (most recent call first):\n  File "<string>", line 2 in __init__\n  File "/me/train.py", line 8 in f\n    Cfg()',
            " in __init__ (train.py:8 in f: Cfg())",
        ),
        ('Thread 0x1 (most recent call first):\n  File "<stdin>", line 2 in f', " (<stdin>:2 in f)"),
        (
            f'{HEAD}  File "{PACKAGE_FOLDER}/wire/shared_memory.py", line 2 in beat\n  File "/me/train.py", line 8 in f',
            " (train.py:8 in f)",
        ),
        ("suspended, by SIGSTOP or SIGTSTP", " (suspended, by SIGSTOP or SIGTSTP)"),
        ("Thread 0x1 (most recent call first):\n  <no Python frame>", ""),
        ("", ""),
    ],
)
def test_format_location(stacks, phrase):
    assert format_location(stacks) == phrase


@pytest.mark.parametrize(
    ("files", "phrase"),
    [
        (
            ["torch/autograd/graph.py", "torch/_tensor.py", "trainer/precision.py", "trainer/loop.py"],
            " in f (precision.py:1 in f)",
        ),
        (["torch/autograd/graph.py", "torch/_tensor.py"], " (graph.py:1 in f)"),
        (["mpwatch_tools/a.py", "torch/_tensor.py"], " (a.py:1 in f)"),
        ([threading.__file__, "torch/_tensor.py", "torchtrainer/loop.py"], " in f (loop.py:1 in f)"),
        ([threading.__file__, "torch/_tensor.py"], " (threading.py:1 in f)"),
        ([f"{PACKAGE_FOLDER}/api.py", "trainer/loop.py", "/home/me/train.py"], " in f (train.py:1 in f)"),
    ],
)
def test_without_user_code_the_place_is_in_a_package_other_than_torch(files, phrase):
    frames = "".join(f'  File "{os.path.join(LIBRARY, file)}", line 1 in f\n' for file in files)
    assert format_location(HEAD + frames) == phrase


def test_ranks_are_grouped_by_where_they_were():
    ranks = [{**STOPPED_RANK, "stacks": stack_in("step", 88 if rank % 2 else 12)} for rank in range(8)]
    ranks[3] = rank_that_raised(ValueError("x"), 9.0)
    error = RunFailedError(diagnose(make_observations(*ranks)))
    assert str(error).splitlines() == [
        "rank 3 failed first: ValueError: x",
        "  ranks 0, 2, 4, 6: stopped by the watcher (train.py:12 in step)",
        "  ranks 1, 5, 7: stopped by the watcher (train.py:88 in step)",
    ]
    assert str(error).splitlines() == [error.result.verdict, *(f"  {line}" for line in error.result.fates)]


def test_many_groups_are_counted():
    ranks = [
        rank_that_raised(ValueError("x"), 9.0),
        *({**STOPPED_RANK, "stacks": stack_in("step", line)} for line in range(1, 512)),
    ]
    lines = format_report(diagnose(make_observations(*ranks))).splitlines()
    assert len(lines) == 32
    assert lines[-1] == "  and 481 more groups of ranks: see .failures and .stacks"


def test_secondary_failures_are_called_victims_if_there_is_a_cause():
    result = diagnose(
        make_observations(rank_that_raised(CONNECTION_LOST_ERROR, 1.0), rank_that_raised(ValueError("x"), 9.0))
    )
    assert "  rank 0: a victim of rank 1: RuntimeError: [gloo/" in format_report(result)
    alone = diagnose(
        make_observations(
            rank_that_raised(CONNECTION_LOST_ERROR, 1.0), rank_that_raised(CONNECTION_LOST_ERROR, 2.0), rank_that_returned()
        )
    )
    verdict, other, ended = format_report(alone).splitlines()
    assert verdict.startswith(
        "no rank was seen to fail by itself; the first to report a problem with a peer: rank 0: RuntimeError: [gloo/"
    )
    assert other.startswith("  rank 1: RuntimeError: [gloo/")
    assert ended == "  rank 2: had returned"


@pytest.mark.parametrize(
    ("died_at", "report"),
    [
        (8.9, ["rank 0 was killed by SIGKILL (", "  ranks 1-2: perhaps victims of rank 0: ValueError: x"]),
        (9.05, ["rank 1 failed first: ValueError: x", "at the same moment, so it may have failed first", "  rank 2: "]),
        (2.0, ["rank 0 was killed by SIGKILL (", "  ranks 1-2: ValueError: x"]),
    ],
)
def test_an_exception_and_a_death_at_the_same_moment_are_both_named(died_at, report):
    raised = rank_that_raised(ValueError("x"), 9.0)
    lines = format_report(diagnose(make_observations(rank_that_died(-9, died_at), raised, raised))).splitlines()
    assert all(text in line for text, line in zip(report, lines, strict=True))


def test_independent_ranks_are_no_victims_of_each_other():
    result = diagnose(make_observations(rank_that_died(-9, 9.0), rank_that_raised(ValueError("x"), 9.0)))
    assert "perhaps" not in format_report(replace(result, keep_going=True))


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ({"oom_proof": "proof"}, FailureKind.OOM, "rank 0 was killed by the kernel's out-of-memory killer (proof)"),
        (
            {"oom_hint": "why"},
            FailureKind.SIGNAL,
            "rank 0 was killed by SIGKILL (likely the out-of-memory killer: why)",
        ),
        (
            {"was_ready": False, "oom_proof": "proof"},
            FailureKind.OOM,
            "rank 0 was killed by the kernel's out-of-memory killer",
        ),
    ],
)
def test_out_of_memory(what, kind, text):
    was_ready = what.pop("was_ready", True)
    given = make_observations({**rank_that_died(-9), **what})
    given.ranks[0].was_ready = was_ready
    result = diagnose(given)
    assert (result.root_cause.kind, result.root_cause.exit_code, result.root_cause.signal) == (kind, 137, 9)
    assert format_report(result).startswith(text)


def test_an_exception_whose_details_cannot_be_unpickled_is_reported():
    broken = {**rank_that_raised(ValueError("x"), 9.0), "details": b"garbage"}
    result = diagnose(make_observations(broken))
    assert isinstance(result.root_cause.exception, ValueError)
    assert format_report(result) == "rank 0 failed first: ValueError: x"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (-9, "making the text of the exception did not end in time"),
        (3, "the rank ended before the text of the exception was made"),
    ],
)
def test_an_exception_that_was_announced_but_never_sent(code, why):
    silent = {"raised_at": 9.0, **rank_that_died(code, 20.0, sent=[signal.SIGTERM, signal.SIGKILL])}
    result = diagnose(make_observations(silent, STOPPED_RANK))
    assert result.root_cause.kind is FailureKind.EXCEPTION
    assert format_report(result).startswith(f"rank 0 failed first: raised an exception that could not be sent ({why})")


def test_the_end_of_the_startup_output_is_reported():
    given = make_observations({**rank_that_died(1), "startup_output": "".join(f"line {n}\n" for n in range(100))})
    given.ranks[0].was_ready = False
    lines = format_report(diagnose(given)).splitlines()
    assert lines[1:3] == ["  what it printed:", "    line 88"]
    assert lines[-1] == "    line 99"


def test_the_html_table_of_a_result():
    good = diagnose(
        make_observations(
            rank_that_returned("<b>"), rank_that_returned([1] * 1000), stop_reason=StopReason.SUCCEEDED, stopped_at=None
        )
    )
    assert "&lt;b&gt;" in good._repr_html_()
    assert len(good._repr_html_()) < 1000
    bad = diagnose(
        make_observations(rank_that_raised(ValueError("<script>"), 9.0), {**STOPPED_RANK, "stacks": stack_in("<module>", 3)})
    )
    html = RunFailedError(bad)._repr_html_()
    assert html == bad._repr_html_()
    assert "<script>" not in html
    assert "<b>rank 0 failed first: ValueError: &lt;script&gt;</b>" in html
    assert '<th style="text-align:left">rank 1</th>' in html
    assert "(train.py:3 in &lt;module&gt;)" in html
    assert "<summary>traceback of rank 0</summary>" in html
    assert "__repr__" not in RunResult(WorkerState.STOPPED, reason="why")._repr_html_()


def test_the_html_table_of_very_many_values():
    many = diagnose(
        make_observations(*[rank_that_returned(n) for n in range(512)], stop_reason=StopReason.SUCCEEDED, stopped_at=None)
    )._repr_html_()
    assert many.count("<tr>") == 33
    assert "480 more" in many


def test_the_html_table_of_a_group():
    ranks = diagnose(make_observations(STOPPED_RANK, STOPPED_RANK, STOPPED_RANK)).workers
    html = make_group_table(WorkerState.HEALTHY, ranks, None)
    assert "<b>WorkerGroup of ranks 0-2</b>" in html
    assert "HEALTHY: the ranks are ready" in html
    assert '<th style="text-align:left">restarts</th><td style="text-align:left">never</td>' in html
    assert "backend" not in html
    html = make_group_table(WorkerState.UNHEALTHY, [replace(rank, restart_count=2) for rank in ranks], "gloo")
    assert "the next call restarts all of them" in html
    assert ">2 times<" in html
    assert ">gloo<" in html


def test_notebook_cells_have_the_names_that_ipython_gives_them(monkeypatch):
    compiler = SimpleNamespace(format_code_name=lambda file: ("Cell", "In[7]") if file == "/home/me/train.py" else None)
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    bad = diagnose(
        make_observations(rank_that_raised(ValueError("bad"), 9.0), {**STOPPED_RANK, "stacks": stack_in("train", 3)})
    )
    assert "(Cell In[7]:3 in train" in format_report(bad)
    shell.compile = None  # of another kind
    assert "(train.py:3 in train" in format_report(bad)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([5, 0, 2, 1], "ranks 0-2, 5"), ([0, 2], "ranks 0, 2")],
)
def test_format_ranks(ranks, text):
    assert format_ranks(ranks) == text


def test_format_exit():
    assert format_exit(3) == "ended with exit code 3"
    assert format_exit(-11).startswith("was killed by SIGSEGV")


@pytest.mark.parametrize("kind", [RunFailedError, RunTimeoutError])
def test_every_error_pickles(kind):
    error = kind(diagnose(make_observations(rank_that_raised(ValueError("x", lambda: None), 9.0), STOPPED_RANK)))
    assert repr(error) == f"{kind.__name__}({error.result.verdict!r})"
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(back) is kind
        assert str(back).splitlines()[1:] == str(error).splitlines()[1:]
        assert back.result.verdict.startswith("rank 0 failed first: ValueError: ")
        assert back.root_cause.exception.args[0] == "x"
        assert back.__cause__ is back.root_cause.exception


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([rank_that_raised(ValueError("x"), 9.0)], "<RunResult FAILED: 1 rank, 1 failure>"),
        ([rank_that_raised(ValueError("x"), 9.0), STOPPED_RANK], "<RunResult FAILED: 2 ranks, 1 failure>"),
        ([rank_that_died(3), rank_that_died(3)], "<RunResult FAILED: 2 ranks, 2 failures>"),
    ],
)
def test_the_repr_of_a_result_counts_ranks_and_failures(ranks, text):
    assert repr(diagnose(make_observations(*ranks))) == text


def test_is_running():
    assert {state for state in WorkerState if state.is_running} == {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


def test_a_failure_and_a_result_can_be_made_by_users():
    failure = ProcessFailure(rank=0, local_rank=0, pid=1, hostname="h", kind=FailureKind.LOST, exit_code=1)
    result = RunResult(WorkerState.FAILED, failures={0: failure}, root_cause=failure)
    assert "rank 0 ended without" in str(RunFailedError(result))


def test_files_of_mpwatch_that_reports_recognise_exist():
    """A renamed module would silently lose its phrase, or show its frames as the user's."""
    files = [PACKAGE_FOLDER + file for file in ACTIVITIES_BY_FILE]
    files += [f"{PACKAGE_FOLDER}/..{file}" for file in (RANK_MAIN_FILE, SCRIPT_FILE)]
    assert [file for file in files if not os.path.exists(file)] == []


def test_format_location_of_a_rank_outside_of_its_function():
    file = f"{PACKAGE_FOLDER}/worker/process_group.py"
    assert format_location(f'{HEAD}  File "{file}", line 2 in f') == (" while joining the process group")
    call = f'  File "{PACKAGE_FOLDER}/wire/pickling/call_payload.py", line 2 in unpack'
    user = '  File "/home/me/model.py", line 3 in <module>\n    import torch'
    assert format_location(f"{HEAD}{user}\n{call}") == " while loading the call (model.py:3 in <module>: import torch)"


@pytest.mark.parametrize(
    ("functions", "phrase"),
    [
        (["_receive", "interaction"], " at a prompt of the debugger (train.py:3 in f)"),
        (["_connect", "open", "interaction"], " in _recv (train.py:3 in f)"),
        (["_connect", "open", "set_trace"], " in _recv (train.py:3 in f)"),
    ],
)
def test_a_rank_that_asks_for_a_prompt_of_the_debugger_is_not_at_a_prompt(functions, phrase):
    debugger = "".join(f'  File "{PACKAGE_FOLDER}/worker/debugger.py", line 2 in {function}\n' for function in functions)
    waits = f'  File "{os.path.join(LIBRARY, "connection.py")}", line 9 in _recv\n'
    assert format_location(f'{HEAD}{waits}{debugger}  File "/home/me/train.py", line 3 in f') == phrase


def test_a_crash_without_python_frames_has_no_stack():
    """A thread that runs no Python code has crashed."""
    crash = "Fatal Python error: Aborted\n\n<no Python frame>"
    report = format_report(diagnose(make_observations({**rank_that_died(-6), "crash_stack": crash}, STOPPED_RANK)))
    assert "its Python stack" not in report


def test_a_failure_says_what_happened():
    result = diagnose(make_observations(rank_that_died(-9), rank_that_raised(ValueError("x"), 9.9), rank_that_died(3, 9.9)))
    assert [str(failure) for failure in result.failures.values()] == [
        "rank 0: was killed by SIGKILL (not sent by mpwatch: the out-of-memory killer, or somebody's kill -9)",
        "rank 1: ValueError: x",
        "rank 2: ended with exit code 3 and no result",
    ]
    assert [failure.summary for failure in result.failures.values()] == [
        "was killed by SIGKILL (not sent by mpwatch: the out-of-memory killer, or somebody's kill -9)",
        "ValueError: x",
        "ended with exit code 3 and no result",
    ]


def test_the_report_of_a_run_without_failure_has_the_last_steps():
    reports = {0: (30, 100), 1: (30, 100), 2: (12, 100), 3: (None, None), 4: (7, None)}
    progress = {rank: Progress(step=step, total=total, metrics={}, elapsed=1.0) for rank, (step, total) in reports.items()}
    result = RunResult(WorkerState.STOPPED, progress=progress, reason="the run was stopped")
    expected = "  last reports: ranks 0-1 at step 30 of 100; rank 2 at step 12 of 100; rank 4 at step 7"
    assert format_report(result).splitlines() == ["the run was stopped", expected]
    many = {rank: replace(progress[0], step=rank) for rank in range(9)}
    assert format_report(replace(result, progress=many)).splitlines()[1] == "  last reports: ranks 0-8 at steps 0 to 8"


def test_a_rank_that_has_not_started_is_starting():
    given = make_observations(STOPPED_RANK, stop_reason=StopReason.TIMED_OUT)
    given.ranks[0].was_ready = False
    assert format_report(diagnose(given)).splitlines()[-1] == "  rank 0: still at work (starting)"


@pytest.mark.parametrize(
    ("places", "text"),
    [
        (
            {1: ", at step 20 (a.py:6 in f)"},
            "rank 1 had not returned within StopPolicy(timeout=4), at step 20 (a.py:6 in f)",
        ),
        ({0: "", 1: ""}, "ranks 0-1 had not returned within StopPolicy(timeout=4)"),
        (
            {0: ", at step 1 (a.py:6 in f)", 1: " (a.py:1 in g)", 2: ", at step 1 (a.py:6 in f)"},
            "ranks 0-2 had not returned within StopPolicy(timeout=4): ranks 0, 2, at step 1 (a.py:6 in f); rank 1 (a.py:1 in g)",
        ),
    ],
)
def test_ranks_that_do_not_return_in_time_are_grouped_by_where_they_are(places, text):
    assert format_overdue_ranks(4, places) == text


@pytest.mark.parametrize(("more", "words"), [(1, "1 more group of ranks"), (2, "2 more groups of ranks")])
def test_very_many_ranks_that_do_not_return_in_time_are_counted(more, words):
    text = format_overdue_ranks(4, {rank: f", at step {rank}" for rank in range(FATE_LINES + more)})
    assert text.endswith(f"; rank {FATE_LINES - 1}, at step {FATE_LINES - 1}; and {words}")


def make_losses(*ranks):
    """Return the failures of the ranks of node 1, which was lost."""
    return {
        rank: ProcessFailure(
            rank=rank,
            local_rank=rank - min(ranks),
            pid=None,
            hostname="gpu7",
            group_rank=1,
            node_ranks=ranks,
            kind=FailureKind.LOST,
            exit_code=1,
            evidence="its program sent no sign of life for 15 s (node_timeout)",
        )
        for rank in ranks
    }


def test_a_lost_node_is_the_subject_of_the_verdict():
    losses = make_losses(2, 3)
    states = dict.fromkeys((0, 1), WorkerState.STOPPED) | dict.fromkeys(losses, WorkerState.FAILED)
    result = RunResult(WorkerState.FAILED, failures=losses, root_cause=losses[2], worker_states=states)
    assert format_report(result).splitlines() == [
        "node 1 (gpu7) with ranks 2-3 was lost: its program sent no sign of life for 15 s (node_timeout)",
        "  ranks 0-1: stopped by the watcher",
    ]
    assert str(losses[3]) == "rank 3: lost with node 1 (gpu7): its program sent no sign of life for 15 s (node_timeout)"


def test_the_ranks_of_a_lost_node_share_a_line_if_another_rank_failed_first():
    failed = diagnose(make_observations(rank_that_died(7))).failures
    failures = {**failed, **make_losses(2, 3)}
    states = dict.fromkeys(failures, WorkerState.FAILED)
    result = RunResult(WorkerState.FAILED, failures=failures, root_cause=failed[0], worker_states=states)
    assert format_report(result).splitlines()[1:] == [
        "  ranks 2-3: lost with node 1 (gpu7): its program sent no sign of life for 15 s (node_timeout)"
    ]

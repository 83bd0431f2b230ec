"""Runs from end to end in which a rank fails: a table of saboteur functions, and the expected report for each."""

import multiprocessing
import os
import pickle
import re
import signal
import time

import pytest

import mpwatch
from mpwatch import FailureKind, WorkerState
from mpwatch.os_support.signals import PYTHON_DUMP_SIGNAL
from support import failing
from support.process_state import is_alive
from watcher.diagnosis import failing_functions

SPAWN = multiprocessing.get_context("spawn")
EXCEPTION, EXIT, SIGNAL, LOST = FailureKind.EXCEPTION, FailureKind.EXIT, FailureKind.SIGNAL, FailureKind.LOST

CRASHES = {128 + number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)}
TABLE = {
    # saboteur: kind, exit code, type of the exception, a part of the verdict
    failing.raises_value_error: (
        EXCEPTION,
        1,
        ValueError,
        "rank 1 failed first: ValueError: the batch is bad (failing.py:",
    ),
    failing.raises_keyword_only_error: (
        EXCEPTION,
        1,
        failing.KeywordOnlyError,
        "KeywordOnlyError: code 7: two arguments",
    ),
    failing_functions.raises_from_cause: (EXCEPTION, 1, RuntimeError, "while loading"),
    failing_functions.raises_group: (EXCEPTION, 1, ExceptionGroup, "two things"),
    failing_functions.raises_with_a_lock: (EXCEPTION, 1, ValueError, "holds a lock"),
    failing_functions.raises_keyboard_interrupt: (EXCEPTION, 1, KeyboardInterrupt, "from the rank itself"),
    failing.recurses: (EXCEPTION, 1, RecursionError, "maximum recursion depth"),
    failing.exits_with_3: (EXIT, 3, SystemExit, "rank 1 ended with exit code 3 and no result"),
    failing_functions.exits_with_256: (EXIT, 1, SystemExit, "SystemExit: 256"),
    failing_functions.exits_with_text: (EXIT, 1, SystemExit, "cannot go on"),
    failing.calls_os_exit_with_7: (EXIT, 7, None, "rank 1 ended with exit code 7 and no result"),
    failing_functions.calls_os_exit_with_0: (LOST, 1, None, "rank 1 ended without returning a result"),
    failing.is_killed: (SIGNAL, 137, None, "rank 1 was killed by SIGKILL (not sent by mpwatch"),
    failing.is_terminated: (SIGNAL, 143, None, "rank 1 was killed by SIGTERM (not sent by mpwatch"),
    failing.crashes: (SIGNAL, 139, None, "rank 1 was killed by SIGSEGV (an invalid memory access"),
    failing_functions.aborts: (SIGNAL, 134, None, "rank 1 was killed by SIGABRT (compiled code called abort()"),
    failing_functions.reads_beyond_the_end_of_a_file: (SIGNAL, 135, None, "rank 1 was killed by SIGBUS (a memory error"),
    failing_functions.divides_by_zero_in_c: (SIGNAL, 136, None, "rank 1 was killed by SIGFPE (an arithmetic error"),
    failing_functions.executes_an_illegal_instruction: (SIGNAL, 132, None, "rank 1 was killed by SIGILL (an instruction"),
    failing_functions.execs_a_program_that_exits_with_9: (EXIT, 9, None, "rank 1 ended with exit code 9"),
    failing_functions.closes_descriptors_and_raises: (EXCEPTION, 1, ValueError, "the batch is bad"),
    failing_functions.leaves_a_thread_and_raises: (EXCEPTION, 1, ValueError, "the batch is bad"),
    failing_functions.returns_a_lock: (
        EXCEPTION,
        1,
        TypeError,
        "its return value['model'][1] cannot be sent back: it is of type _thread.lock",
    ),
}


@pytest.mark.usefixtures("_wait_for_all_stacks")
@pytest.mark.parametrize("nprocs", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("saboteur", TABLE, ids=lambda saboteur: saboteur.__name__)
def test_the_first_failure_is_reported(saboteur, nprocs, barrier):
    kind, exit_code, exception, text = TABLE[saboteur]
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(failing.call_on_rank_1, nprocs, args=(saboteur, barrier))
    error, root = caught.value, caught.value.root_cause
    assert (root.rank, root.kind, root.exit_code, root.is_secondary) == (1, kind, exit_code, False)
    assert error.exit_code == exit_code
    assert type(root.exception) is (exception or type(None))
    assert error.__cause__ is root.exception
    verdict, *others = str(error).splitlines()
    assert text in verdict
    assert re.search(r"ranks? .*: stopped by the watcher .*\(failing\.py:", others[-1])
    assert set(error.result.stacks) - {1} == {
        0,
        *range(2, nprocs),
    }  # on a busy machine, rank 1 may still encode its exception
    assert (f" in {saboteur.__name__}" in root.stack) == (exit_code in CRASHES)
    assert error.result.failures == {1: root}
    assert error.result.return_values == {}
    assert error.result.state is WorkerState.FAILED
    states = [error.result.worker_states[rank] for rank in range(nprocs)]
    assert states == [WorkerState.FAILED if rank == 1 else WorkerState.STOPPED for rank in range(nprocs)]
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)


@pytest.mark.usefixtures("_wait_for_all_stacks")
def test_ranks_at_the_same_location_share_a_line_of_the_report():
    with pytest.raises(mpwatch.RunFailedError) as caught:
        pids = SPAWN.Array("i", 8)
        args = (failing.raises_value_error, pids)
        mpwatch.run(failing_functions.call_on_rank_1_when_others_sleep, 8, args=args)
    _, others = str(caught.value).splitlines()
    assert re.fullmatch(
        r"  ranks 0, 2-7: stopped by the watcher \(failing\.py:\d+ in wait_to_be_stopped: signal\.pause\(\)\)", others
    )
    lines = caught.value.result.stacks[7].splitlines()
    assert "thread 0x" in lines[0].lower()
    assert [line.strip() for line in lines[2::2]] == ["signal.pause()", "wait_to_be_stopped()"]


def fail(function, barrier, more=()):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(failing.call_on_rank_1, 3, args=(function, barrier, *more))
    return caught.value


def frames_of(error):
    trace, found = error.__traceback__, []
    while trace is not None:
        found.append((os.path.basename(trace.tb_frame.f_code.co_filename), trace.tb_frame.f_code.co_name, trace.tb_lineno))
        trace = trace.tb_next
    return found


def test_frames_are_those_of_the_rank_and_begin_at_its_function(barrier):
    error = fail(failing.raises_value_error, barrier)
    frames = frames_of(error.__cause__)
    assert [name for _, name, _ in frames] == ["call_on_rank_1", "raises_value_error"]
    assert {file for file, _, _ in frames} == {"failing.py"}
    assert 'raise ValueError("the batch is bad")  # THE-LINE' in error.root_cause.traceback


def test_cause_notes_and_members_survive(barrier):
    error = fail(failing_functions.raises_from_cause, barrier).__cause__
    assert error.__notes__ == ["shard 17"]
    assert repr(error.__cause__) == "KeyError('lost key')"
    assert error.__suppress_context__
    group = fail(failing_functions.raises_group, barrier).__cause__
    assert [type(member) for member in group.exceptions] == [ValueError, ExceptionGroup]
    assert group.exceptions[1].exceptions[0].filename == "file"


def test_attributes_survive_except_those_that_cannot_be_pickled(barrier):
    error = fail(failing_functions.raises_with_a_lock, barrier).__cause__
    assert error.code == 3
    assert not hasattr(error, "lock")
    picky = fail(failing.raises_keyword_only_error, barrier).__cause__
    assert (picky.code, picky.detail) == (7, "two arguments")


def test_a_crash_leaves_its_python_stack(barrier, capfd):
    error = fail(failing.crashes, barrier)
    assert "in crashes" in error.root_cause.stack
    assert "ctypes.string_at(0)" in str(error)
    assert "worker/main.py" not in str(error)
    assert "Segmentation" not in capfd.readouterr().err


def test_nothing_is_written_into_files_that_replaced_descriptors_of_mpwatch(caplog):
    assert list(mpwatch.run(failing_functions.replaces_descriptors_and_returns, 2)) == [0, 1]
    assert caplog.text == ""


def test_a_value_that_cannot_be_unpickled_is_a_failure_of_its_rank():
    with mpwatch.WorkerGroup(1) as ranks:
        with pytest.raises(mpwatch.RunFailedError) as caught:
            ranks.run(failing_functions.returns_a_value_that_cannot_be_unpickled)
        assert list(ranks.run(int)) == [0]
        assert ranks.workers[0].restart_count == 0
    assert str(caught.value) == (
        "rank 0 failed first: TypeError: its return value cannot be rebuilt in the caller: it is of type"
        " watcher.diagnosis.failing_functions.CannotBeUnpickled (watcher.diagnosis.failing_functions._refuse raised LookupError: not here); return plain data instead"
    )
    reason = caught.value.__cause__.__cause__
    assert isinstance(reason, LookupError)
    assert frames_of(reason)[-1][1] == "_refuse"


def test_an_exception_of_a_local_class_is_caught_as_itself():
    class MyError(Exception):
        pass

    def fail():
        raise MyError("mine")

    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(fail, 1)
    assert type(caught.value.__cause__) is MyError


def test_check_false_returns_the_failed_result(barrier):
    result = mpwatch.run(failing.call_on_rank_1, 3, args=(failing.exits_with_3, barrier), check=False)
    assert result.state is WorkerState.FAILED
    assert result.root_cause is result.failures[1]
    with pytest.raises(LookupError, match=r"rank 0 has no value: stopped by the watcher \(failing\.py:"):
        result[0]
    assert (len(result), dict(result.items())) == (3, {})


def test_a_module_that_a_rank_cannot_import(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("import os\nif 'RANK' in os.environ: import no_such_module\ndef f(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    with pytest.raises(mpwatch.RunFailedError, match="could not load the call: ModuleNotFoundError") as caught:
        mpwatch.run(only_here.f, 2)
    assert caught.value.root_cause.kind is FailureKind.START


def test_a_peer_error_is_not_the_cause_even_if_it_comes_first(barrier):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(failing_functions.reports_a_lost_peer_before_the_peer_fails, 3, args=(barrier, SPAWN.Event()))
    assert caught.value.root_cause.rank == 1
    assert type(caught.value.__cause__) is ValueError


def test_a_report_without_a_primary_failure_says_so(barrier):
    error = fail(failing_functions.raises_connection_closed_by_peer, barrier)
    assert str(error).startswith("no rank was seen to fail by itself; the first to report a problem with a peer: rank 1:")


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace_period(barrier):
    start = time.monotonic()
    with pytest.raises(mpwatch.RunFailedError, match="rank 1 failed first"):
        mpwatch.run(failing_functions.ignores_sigterm, 3, args=(barrier,), grace_period=0.3)
    assert 0.3 < time.monotonic() - start < 5


def test_a_suspended_rank_is_continued_so_that_it_can_end(barrier):
    with pytest.raises(mpwatch.RunFailedError, match="rank 1 failed first"):
        mpwatch.run(failing.fails_beside_a_suspended_rank, 3, args=(barrier, SPAWN.Value("i", 0)), grace_period=60)


def test_helpers_are_killed_with_their_ranks(barrier):
    pids = SPAWN.Array("i", 3)
    with pytest.raises(mpwatch.RunFailedError, match="rank 1 was killed by SIGKILL"):
        mpwatch.run(failing_functions.starts_a_helper, 3, args=(barrier, pids))
    assert all(pids)
    assert not any(is_alive(pid) for pid in pids)


def test_a_forked_child_that_holds_all_descriptors_delays_nothing(barrier):
    pid = SPAWN.Value("i", 0)
    start = time.monotonic()
    try:
        with pytest.raises(mpwatch.RunFailedError, match="rank 1 was killed by SIGKILL"):
            mpwatch.run(failing_functions.forks_a_child_that_waits, 3, args=(pid, barrier))
        assert time.monotonic() - start < 30
        assert is_alive(pid.value)  # it had left the process group of the rank
    finally:
        os.kill(pid.value, signal.SIGKILL)


@pytest.mark.usefixtures("_wait_for_all_stacks")
def test_timeout():
    start = time.monotonic()
    with pytest.raises(mpwatch.RunTimeoutError) as caught:
        mpwatch.run(failing_functions.only_rank_1_returns, 3, timeout=3.0)
    assert 3.0 <= time.monotonic() - start < 8
    error = caught.value
    assert isinstance(error, TimeoutError)
    verdict, late, ended = str(error).splitlines()
    assert verdict == "the run did not end within timeout=3 s: ranks 0, 2 had not returned"
    assert late.startswith("  ranks 0, 2: still at work (failing.py:")
    assert ended == "  rank 1: had returned"
    assert "in only_rank_1_returns" in error.result.failures[0].stack
    assert error.result.stacks[0] == error.result.failures[0].stack
    assert (error.root_cause, error.exit_code, set(error.result.failures)) == (None, 124, {0, 2})
    assert error.result.failures[0].kind is FailureKind.TIMEOUT


@pytest.mark.usefixtures("_wait_for_all_stacks")
@pytest.mark.parametrize("ending", ["exit 0", "exit 1", "raise"])
def test_a_timeout_stays_a_timeout_however_ranks_handle_sigterm(ending):
    with pytest.raises(mpwatch.RunTimeoutError) as caught:
        mpwatch.run(failing_functions.exits_or_raises_at_sigterm, 2, args=(ending,), timeout=2.0)
    verdict, late = str(caught.value).splitlines()
    assert verdict == "the run did not end within timeout=2 s: ranks 0-1 had not returned"
    assert late.startswith("  ranks 0-1: still at work (failing.py:")
    assert caught.value.exit_code == 124


@pytest.mark.usefixtures("_wait_for_all_stacks")
@pytest.mark.parametrize("ending", ["exit 0", "exit 1", "raise"])
def test_a_rank_that_ends_because_of_sigterm_counts_as_stopped(ending, barrier, capfd):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(failing_functions.exits_or_raises_at_sigterm, 3, args=(ending, barrier))
    for others in str(caught.value).splitlines()[1:]:  # one or two lines: a rank may still be in the barrier
        assert re.match(r"  ranks? [02](, 2)?: stopped by the watcher .*\(failing(_functions)?\.py:", others)
    assert set(caught.value.result.failures) == {1}
    out, err = capfd.readouterr()
    assert (out.count("received SIGTERM"), err) == (2, "")


def test_the_time_of_a_failure_is_when_it_happened_not_when_it_was_pickled(barrier):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(failing_functions.fails_first_but_reports_late, 3, args=(barrier, SPAWN.Event(), SPAWN.Event()))
    assert caught.value.root_cause.rank == 0
    assert type(caught.value.__cause__) is failing_functions.SlowTextError


@pytest.mark.usefixtures("_wait_for_all_stacks")
def test_an_exception_whose_str_never_returns_is_reported(barrier):
    start = time.monotonic()
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(
            failing.call_on_rank_1, 3, args=(failing_functions.raises_exception_that_hangs_in_str, barrier), grace_period=0.3
        )
    assert time.monotonic() - start < 20
    root = caught.value.root_cause
    assert (root.rank, root.kind, root.exception) == (1, EXCEPTION, None)
    assert "raised an exception that could not be sent (making the text of the exception did not end in time" in str(
        caught.value
    )
    assert "in __str__" in root.stack


def test_a_rank_that_exits_while_its_exception_is_pickled(barrier):
    error = fail(failing_functions.raises_exception_that_exits_in_str, barrier)
    assert (error.root_cause.rank, error.root_cause.kind, error.exit_code) == (1, EXIT, 5)
    assert "had raised an exception" in str(error)


@pytest.mark.parametrize(
    "saboteur",
    [
        failing_functions.raises_exception_that_exits_when_unpickled,
        failing_functions.raises_exception_that_hangs_when_unpickled,
    ],
)
def test_an_exception_that_harms_the_process_that_unpickles_it_is_tried_in_the_rank(saboteur, barrier):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(failing.call_on_rank_1, 3, args=(saboteur, barrier), grace_period=0.3)
    error = caught.value.root_cause.exception
    expected = (
        ("ExitsWhenUnpickledError", "code 7: two arguments")
        if "exits" in saboteur.__name__
        else (
            "HangsWhenUnpickledError",
            "the batch is bad",
        )
    )
    assert (type(error).__name__, str(error)) == expected
    assert caught.value.root_cause.kind is EXCEPTION
    assert frames_of(error)[-1][1] == saboteur.__name__


def test_a_rank_without_free_descriptors_can_report_its_exception(barrier):
    error = fail(failing_functions.opens_all_descriptors_and_raises, barrier)
    assert isinstance(error.__cause__, OSError)
    assert "Too many open files" in str(error)


@pytest.mark.parametrize("grace_period", [0, 0.0])
def test_without_a_grace_period_the_exception_arrives_complete(grace_period):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(failing_functions.rank_0_raises_keyword_only_error, 3, grace_period=grace_period)
    assert (type(caught.value.__cause__), caught.value.__cause__.code) == (failing.KeywordOnlyError, 7)


def test_a_timer_of_the_function_does_not_disturb_the_report_of_its_exception(barrier):
    error = fail(failing_functions.raises_exception_whose_timer_fires_in_str, barrier)
    assert "rank 1 failed first: TimerFiresInStrError: the batch is bad (failing_functions.py:" in str(error)


@pytest.mark.parametrize("how", [failing.is_killed, failing.crashes], ids=lambda how: how.__name__)
def test_a_rank_that_lost_its_peer_is_a_victim(how, barrier):
    """The kernel closes the connections of a process before it reports that the process has ended."""
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(failing_functions.raises_own_error_when_its_peer_dies, 3, args=(barrier, how))
    assert caught.value.root_cause.rank == 1, str(caught.value)
    assert all(failure.is_secondary for rank, failure in caught.value.result.failures.items() if rank != 1)


@pytest.mark.parametrize(
    ("other_raises", "verdict"),
    [(False, "rank 0 failed first: ReportedBrokenPipeError: broken"), (True, "rank 1 failed first: KeyError: 'lr'")],
)
def test_a_lost_connection_is_the_cause_unless_another_rank_raises(other_raises, verdict):
    """A rank may close its connections before it raises. Then its peer fails first."""
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(
            failing_functions.loses_a_connection,
            2,
            args=(SPAWN.Barrier(2), SPAWN.Event()),
            kwargs={"other_raises": other_raises},
        )
    assert str(caught.value).startswith(verdict)
    assert ("a victim of rank 1: ReportedBrokenPipeError" in str(caught.value)) is other_raises


def test_signals_do_not_disturb_the_report_of_an_exception(barrier):
    error = fail(failing_functions.raises_exception_that_is_interrupted_when_pickled, barrier)
    assert type(error.__cause__) is failing_functions.InterruptedWhenPickledError


@pytest.mark.parametrize("number", [signal.SIGUSR1, PYTHON_DUMP_SIGNAL])
def test_a_handler_of_the_function_does_not_disturb_the_report(number):
    with pytest.raises(mpwatch.RunFailedError, match="rank 0 failed first: RuntimeError: from the handler"):
        mpwatch.run(failing_functions.raises_in_a_handler_again_and_again, 1, args=(number,))


def test_a_forked_child_that_raises_prints_its_own_traceback(capfd):
    assert list(mpwatch.run(failing_functions.forks_a_child_that_raises, 1)) == [1]
    assert "ValueError: the batch is bad" in capfd.readouterr().err


def test_a_failure_is_noticed_quickly():
    """Not a benchmark: a bound that waiting for the interpreters to wind down would break."""
    waits = []
    for _ in range(5):
        failed_at, barrier = SPAWN.Value("d", 0.0), SPAWN.Barrier(3)  # a rank killed while it leaves a barrier breaks it
        with pytest.raises(mpwatch.RunFailedError):
            mpwatch.run(failing_functions.records_time_of_failure, 3, args=(barrier, failed_at))
        waits.append(time.monotonic() - failed_at.value)
    assert sorted(waits)[2] < 0.5


@pytest.mark.parametrize("name", failing_functions.STRANGE_EXCEPTIONS)
def test_an_exception_that_resists_inspection_is_reported(name, barrier):
    error = fail(failing_functions.raises_strange_exception, barrier, more=(name,))
    root = error.root_cause
    assert (root.rank, root.kind) == (1, EXCEPTION)
    assert type(root.exception).__name__ in type(failing_functions.STRANGE_EXCEPTIONS[name]()).__name__
    assert "rank 1 failed first: " in str(error)
    if name != "own note":  # which exits in the process that pickles it
        assert str(pickle.loads(pickle.dumps(error))).splitlines()[1:] == str(error).splitlines()[1:]


def test_generated_code_may_have_no_lines(barrier):
    assert str(fail(failing_functions.raises_without_line_numbers, barrier).__cause__) == "no line"


@pytest.mark.parametrize("code", ["", [], 0.0, "text", 300, -1, failing_functions.TruthlessCode()], ids=repr)
def test_only_none_and_0_are_successful_codes_of_sys_exit(code, barrier):
    error = fail(failing_functions.exits_with, barrier, more=(code,))
    assert error.root_cause.kind is EXIT
    assert 0 < error.exit_code < 256
    assert isinstance(error.__cause__, SystemExit)


def test_a_broken_stdout_does_not_lose_the_value():
    assert list(mpwatch.run(failing_functions.breaks_stdout_and_returns, 2)) == [0, 1]


def test_a_value_that_exits_when_it_is_pickled_is_a_failure(barrier):
    error = fail(failing_functions.returns_a_value_that_exits_when_pickled, barrier)
    assert "its return value cannot be sent back" in str(error)


def test_a_large_value_that_cannot_be_sent_is_reported_with_the_reason(barrier):
    error = fail(failing_functions.closes_descriptors_and_returns_2_mib, barrier)
    assert "bytes could not be sent: the function closed or replaced descriptors" in str(error)


def test_main_returns_what_run_returns():
    assert list(mpwatch.main(failing.rank, 2)) == [0, 1]


@pytest.mark.parametrize(
    ("saboteur", "status"),
    [
        (failing.raises_value_error, 1),
        (failing.exits_with_3, 3),
        (failing.calls_os_exit_with_7, 7),
        (failing.is_killed, 137),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_main_ends_the_program_as_the_failed_rank_ended(saboteur, status, barrier, capsys):
    with pytest.raises(SystemExit) as caught:
        mpwatch.main(failing.call_on_rank_1, 3, args=(saboteur, barrier))
    assert caught.value.code == status
    err = capsys.readouterr().err
    assert "RunFailedError: rank 1 " in err
    assert ("# THE-LINE" in err) == (saboteur is failing.raises_value_error)

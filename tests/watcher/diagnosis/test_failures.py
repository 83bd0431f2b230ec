"""Runs in which a rank fails: a table of saboteurs with the expected report of each, and who failed first."""

import os
import pickle
import re
import signal
import sys
import time

import pytest

import mpwatch
from mpwatch import FailureKind, WorkerState
from support import failing
from support.process_state import SPAWN, is_alive
from support.programs import in_own_process
from watcher.diagnosis import failing_functions

EXCEPTION, EXIT, SIGNAL, LOST = FailureKind.EXCEPTION, FailureKind.EXIT, FailureKind.SIGNAL, FailureKind.LOST
CRASHES = {128 + number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)}
TABLE = {
    # saboteur: kind, exit code, type of the exception, a part of the verdict
    failing.raises_value_error: (EXCEPTION, 1, ValueError, "rank 1 failed first: ValueError: the batch is bad (failing.py:"),
    failing_functions.raises_keyboard_interrupt: (EXCEPTION, 1, KeyboardInterrupt, "from the rank itself"),
    failing.recurses: (EXCEPTION, 1, RecursionError, "maximum recursion depth"),
    failing.exits_with_3: (EXIT, 3, SystemExit, "rank 1 ended with exit code 3 and no result"),
    failing.calls_os_exit_with_7: (EXIT, 7, None, "rank 1 ended with exit code 7 and no result"),
    failing_functions.calls_os_exit_with_0: (LOST, 1, None, "rank 1 ended without returning a result"),
    failing.is_killed: (SIGNAL, 137, None, "rank 1 was killed by SIGKILL (not sent by mpwatch"),
    failing.is_terminated: (SIGNAL, 143, None, "rank 1 was killed by SIGTERM (not sent by mpwatch"),
    failing.crashes: (SIGNAL, 139, None, "rank 1 was killed by SIGSEGV (an invalid memory access"),
    failing_functions.aborts: (SIGNAL, 134, None, "rank 1 was killed by SIGABRT (compiled code called abort()"),
    failing_functions.execs_a_program_that_exits_with_9: (EXIT, 9, None, "rank 1 ended with exit code 9"),
    failing_functions.opens_all_descriptors_and_raises: (EXCEPTION, 1, OSError, "Too many open files"),
    failing_functions.returns_a_lock: (
        EXCEPTION,
        1,
        TypeError,
        "value['model'][1] cannot be sent back: it is of type _thread",
    ),
}
OTHERS = r"  ranks 0, 2: stopped by the watcher \(failing\.py:\d+ in wait_to_be_stopped: signal\.pause\(\)\)"


def run_when_others_sleep(saboteur, *more, nprocs=3, **options):
    args = (saboteur, SPAWN.Array("i", nprocs), *more)
    return mpwatch.run(failing_functions.call_on_rank_1_when_others_sleep, nprocs, args=args, **options)


@pytest.mark.usefixtures("_wait_for_all_stacks")
@pytest.mark.parametrize("saboteur", TABLE, ids=lambda saboteur: saboteur.__name__)
def test_the_first_failure_is_reported(saboteur, capfd):
    kind, exit_code, exception, text = TABLE[saboteur]
    with pytest.raises(mpwatch.RunFailedError) as caught:
        run_when_others_sleep(saboteur)
    error, root, result = caught.value, caught.value.root_cause, caught.value.result
    assert (root.rank, root.kind, root.exit_code, root.is_secondary) == (1, kind, exit_code, False)
    assert error.exit_code == exit_code
    assert type(root.exception) is (exception or type(None))
    assert error.__cause__ is root.exception
    verdict, *_, others = str(error).splitlines()
    assert text in verdict
    assert re.fullmatch(OTHERS, others)
    assert (f" in {saboteur.__name__}" in root.stack) == (exit_code in CRASHES)
    assert ("its Python stack, innermost frame first:" in str(error)) == (exit_code in CRASHES)
    assert "worker/main.py" not in str(error)
    assert "Fatal Python error" not in capfd.readouterr().err
    assert (result.failures, result.return_values, result.state) == ({1: root}, {}, WorkerState.FAILED)
    assert result.worker_states == {0: WorkerState.STOPPED, 1: WorkerState.FAILED, 2: WorkerState.STOPPED}
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("saboteur", "status"),
    [(failing.raises_value_error, 1), (failing.exits_with_3, 3), (failing.is_killed, 137)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_main_ends_the_program_as_the_failed_rank_ended(saboteur, status, capsys):
    assert list(mpwatch.main(failing.rank, 2)) == [0, 1]
    with pytest.raises(SystemExit) as caught:
        mpwatch.main(failing.call_on_rank_1, 2, args=(saboteur, SPAWN.Barrier(2)))
    err = capsys.readouterr().err
    assert (caught.value.code, "RunFailedError: rank 1 " in err) == (status, True)
    assert ("# THE-LINE" in err) == (saboteur is failing.raises_value_error)


def test_only_none_and_0_are_successful_codes_of_sys_exit():
    nprocs = len(failing_functions.EXIT_CODES)
    result = mpwatch.run(failing_functions.exits_with_strange_code, nprocs, keep_going=True, check=False)
    assert sorted(result.failures) == list(range(nprocs))
    for failure in result.failures.values():
        assert (failure.kind, type(failure.exception)) == (EXIT, SystemExit)
        assert 0 < failure.exit_code < 256


def test_a_value_that_cannot_be_rebuilt_costs_no_rank_of_a_group():
    with mpwatch.WorkerGroup(1) as group:
        text = "rank 0 failed first: TypeError: its return value cannot be rebuilt in the caller: it is of type .*LookupError: here"
        for error, raised, message in (
            (LookupError("here"), mpwatch.RunFailedError, text),
            (KeyboardInterrupt("meanwhile"), KeyboardInterrupt, "meanwhile"),
        ):
            with pytest.raises(raised, match=message):
                group.run(failing_functions.RaisesWhenRebuilt, (error,))
        assert list(group.run(int)) == [0]
        assert group.workers[0].restart_count == 0


def test_a_module_that_a_rank_cannot_import(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("import os\nif 'RANK' in os.environ: import no_such_module\ndef f(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    with pytest.raises(mpwatch.RunFailedError, match="could not load the call: ModuleNotFoundError") as caught:
        mpwatch.run(only_here.f, 2)
    assert caught.value.root_cause.kind is FailureKind.START


# --- ranks and what is around them


@pytest.mark.usefixtures("_wait_for_all_stacks")
@pytest.mark.linux
def test_a_suspended_rank_is_reported_as_such_and_continued_so_that_it_can_end(barrier):
    with pytest.raises(mpwatch.RunFailedError, match="rank 1 failed first") as caught:
        mpwatch.run(failing.fails_beside_a_suspended_rank, 3, args=(barrier, SPAWN.Value("i", 0)), grace_period=60)
    assert "rank 0: stopped by the watcher (suspended, by SIGSTOP or SIGTSTP)" in str(caught.value)


def test_helpers_are_killed_with_their_ranks(barrier):
    pids = SPAWN.Array("i", 3)
    with pytest.raises(mpwatch.RunFailedError, match="rank 1 was killed by SIGKILL"):
        mpwatch.run(failing_functions.starts_a_helper, 3, args=(barrier, pids))
    assert all(pids)
    assert not any(is_alive(pid) for pid in pids)


# --- timeouts and signals


@pytest.mark.usefixtures("_wait_for_all_stacks")
def test_a_timeout_stays_a_timeout_however_ranks_handle_sigterm():
    start = time.monotonic()
    with pytest.raises(mpwatch.RunTimeoutError) as caught:
        mpwatch.run(failing_functions.ends_at_sigterm, 4, args=(SPAWN.Array("i", 4), False), timeout=2.0, grace_period=60)
    assert 2.0 <= time.monotonic() - start < 60
    error, result = caught.value, caught.value.result
    assert isinstance(error, TimeoutError)
    verdict, late, ended = str(error).splitlines()
    assert verdict == "the run did not end within timeout=2 s: ranks 0, 2-3 had not returned"
    assert late.startswith("  ranks 0, 2-3: still at work (failing.py:")
    assert ended == "  rank 1: had returned"
    assert (error.root_cause, error.exit_code) == (None, 124)
    for rank in (0, 2, 3):
        assert result.failures.pop(rank).kind is FailureKind.TIMEOUT
        assert "in ends_at_sigterm" in result.stacks[rank]
    assert not result.failures


@pytest.mark.usefixtures("_wait_for_all_stacks")
def test_a_rank_that_ends_because_of_sigterm_counts_as_stopped(capfd):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(failing_functions.ends_at_sigterm, 4, args=(SPAWN.Array("i", 4), True))
    _, others = str(caught.value).splitlines()
    assert others.startswith("  ranks 0, 2-3: stopped by the watcher (failing.py:")
    assert set(caught.value.result.failures) == {1}
    out, err = capfd.readouterr()
    assert (out.count("received SIGTERM"), err) == (3, "")


def test_an_exception_that_hangs_when_it_is_unpickled_blocks_nobody():
    hangs = failing_functions.HangsWhenUnpickledError
    with pytest.raises(
        mpwatch.RunFailedError, match=r"^rank 1 failed first: HangsWhen.*Error: the batch is bad \(fail"
    ) as caught:
        run_when_others_sleep(failing_functions.raises, hangs, grace_period=0.3)
    assert type(caught.value.__cause__).__name__ == "HangsWhenUnpickledError"


@pytest.mark.usefixtures("_wait_for_all_stacks")
def test_an_exception_whose_str_never_returns_is_reported():
    start = time.monotonic()
    with pytest.raises(mpwatch.RunFailedError) as caught:
        run_when_others_sleep(failing_functions.raises, failing_functions.HangsInStrError, grace_period=0.3)
    assert time.monotonic() - start < 20
    root = caught.value.root_cause
    assert (root.rank, root.kind, root.exception) == (1, EXCEPTION, None)
    text = "raised an exception that could not be sent (making the text of the exception did not end in time"
    assert text in str(caught.value)
    assert "in __str__" in root.stack


# --- who failed first


def test_a_peer_error_is_not_the_cause_even_if_it_comes_first():
    args = (SPAWN.Barrier(2), SPAWN.Event())
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(failing_functions.reports_a_lost_peer_before_the_peer_fails, 2, args=args)
    assert (caught.value.root_cause.rank, type(caught.value.__cause__)) == (1, ValueError)
    assert "rank 0: a victim of rank 1: RuntimeError: [gloo" in str(caught.value)


def test_a_rank_that_lost_its_peer_is_a_victim(barrier):
    """The kernel closes the connections of a process before it reports that the process has ended."""
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(failing_functions.raises_own_error_when_its_peer_dies, 3, args=(barrier,))
    assert caught.value.root_cause.rank == 1, str(caught.value)
    assert all(failure.is_secondary for rank, failure in caught.value.result.failures.items() if rank != 1)


def test_the_time_of_a_failure_is_when_it_happened_not_when_it_was_pickled():
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(failing_functions.fails_first_but_reports_late, 2, args=(SPAWN.Event(), SPAWN.Event()))
    assert (caught.value.root_cause.rank, type(caught.value.__cause__)) == (0, failing_functions.SlowTextError)


@in_own_process
def test_a_watcher_that_wakes_up_late_still_finds_the_first_failure():
    """It notices a death and a later exception in one wake-up."""
    fn = failing_functions.two_fail_while_the_watcher_is_suspended
    assert mpwatch.run(fn, 3, args=(SPAWN.Array("i", 3),), check=False).root_cause.rank == 2


@in_own_process
def test_two_ranks_that_die_together_end_their_own_calls():
    with mpwatch.WorkerGroup(3, check=False) as group:
        pids = list(group.run(os.getpid))
        calls = [group.submit(failing.wait_to_be_stopped, ranks=rank) for rank in (0, 1)]
        group.run(failing_functions.kill_two_while_the_watcher_is_suspended, (pids[:2],), ranks=2)
        assert [call.result().root_cause.rank for call in calls] == [0, 1]


def test_a_failure_is_noticed_quickly():
    """Not a benchmark: a bound that waiting for the interpreters to wind down would break."""
    waits = []
    for _ in range(3):
        failed_at, barrier = SPAWN.Value("d", 0.0), SPAWN.Barrier(2)  # a rank killed while it leaves a barrier breaks it
        with pytest.raises(mpwatch.RunFailedError):
            mpwatch.run(failing_functions.records_time_of_failure, 2, args=(barrier, failed_at))
        waits.append(time.monotonic() - failed_at.value)
    assert sorted(waits)[1] < 0.5


def test_an_excepthook_that_the_function_has_set_is_called_once(capfd):
    def fail():
        sys.excepthook = lambda kind, error, _: print("hook:", kind.__name__, error, flush=True)
        raise ValueError("x")

    with pytest.raises(mpwatch.RunFailedError, match="ValueError: x"):
        mpwatch.run(fail, 1)
    assert capfd.readouterr().out == "hook: ValueError x\n"


def test_a_heartbeat_timeout_without_heartbeats_is_warned_about_once(caplog):
    with mpwatch.WorkerGroup(2, heartbeat_timeout=0.2) as group:
        for _ in range(2):
            group.run(time.sleep, (0.6,))
    text = "no rank has called report() or heartbeat() in 0.2 s, so heartbeat_timeout=0.2 does not apply yet"
    assert caplog.messages == [text]

"""Runs in which a rank fails: a table of saboteurs with the report of each, who failed first, stacks, and start-up output."""

import os
import pickle
import re
import signal
import socket
import sys

import pytest

import mpwatch
from mpwatch import FailureKind, WorkerState
from support import failing
from support.acts import EXIT_CODE, act
from support.process_state import SPAWN
from support.programs import call, in_own_process
from support.runs import failed
from watcher.diagnosis import failing_functions as fn

EXCEPTION, EXIT, SIGNAL, LOST = FailureKind.EXCEPTION, FailureKind.EXIT, FailureKind.SIGNAL, FailureKind.LOST
CRASHES = {128 + number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)}
TABLE = {
    # what rank 1 does: kind, exit code, type of the exception, a part of the verdict
    "raises": (EXCEPTION, 1, ValueError, "rank 1 failed first: ValueError: the batch is bad (failing.py:"),
    "raises_keyboard_interrupt": (EXCEPTION, 1, KeyboardInterrupt, "from the rank itself"),
    "recurses": (EXCEPTION, 1, RecursionError, "maximum recursion depth"),
    "exits": (EXIT, EXIT_CODE, SystemExit, "rank 1 ended with exit code 77 and no result"),
    "exits_with_256": (EXIT, 1, SystemExit, "rank 1 ended with exit code 1 and no result"),
    "calls_os_exit": (EXIT, EXIT_CODE, None, "rank 1 ended with exit code 77 and no result"),
    "calls_os_exit_with_0": (LOST, 1, None, "rank 1 ended without returning a result"),
    "is_killed": (SIGNAL, 137, None, "rank 1 was killed by SIGKILL (not sent by mpwatch"),
    "is_terminated": (SIGNAL, 143, None, "rank 1 was killed by SIGTERM (not sent by mpwatch"),
    "crashes": (SIGNAL, 139, None, "rank 1 was killed by SIGSEGV (an invalid memory access"),
    "aborts": (SIGNAL, 134, None, "rank 1 was killed by SIGABRT (compiled code called abort()"),
    "execs_a_program_that_fails": (EXIT, EXIT_CODE, None, "rank 1 ended with exit code 77"),
    "opens_all_descriptors": (EXCEPTION, 1, OSError, "Too many open files"),
    "returns_a_lock": (EXCEPTION, 1, TypeError, "value['model'][1] cannot be sent back: it is of type _thread"),
}
OTHERS = r"  ranks 0, 2: stopped by the watcher \(failing\.py:\d+ in wait_to_be_stopped: signal\.pause\(\)\)"


def failed_on_rank_1(action, *more, kwargs=None, **options):
    args = (action, SPAWN.Array("i", 3), *more)
    return failed(fn.call_on_rank_1_when_others_sleep, 3, args=args, kwargs=kwargs, **options)


@pytest.mark.usefixtures("_wait_for_all_stacks")
@pytest.mark.parametrize("action", TABLE)
def test_the_first_failure_is_reported(action, capfd):
    kind, exit_code, exception, text = TABLE[action]
    error = failed_on_rank_1(act, action)
    root, result = error.root_cause, error.result
    assert (root.rank, root.kind, root.exit_code, root.is_secondary) == (1, kind, exit_code, False)
    assert error.exit_code == exit_code
    assert type(root.exception) is (exception or type(None))
    assert error.__cause__ is root.exception
    verdict, *_, others = str(error).splitlines()
    assert text in verdict
    assert re.fullmatch(OTHERS, others)
    assert (" in act\n" in root.stack) == (exit_code in CRASHES)
    assert ("its Python stack, innermost frame first:" in str(error)) == (exit_code in CRASHES)
    assert "worker/main.py" not in str(error)
    assert "Fatal Python error" not in capfd.readouterr().err
    assert (result.failures, result.return_values, result.state) == ({1: root}, {}, WorkerState.FAILED)
    assert result.worker_states == {0: WorkerState.STOPPED, 1: WorkerState.FAILED, 2: WorkerState.STOPPED}
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_main_ends_the_program_as_the_failed_rank_ended(capsys):
    assert list(mpwatch.main(failing.rank, 2)) == [0, 1]
    for saboteur, status in ((failing.raises_value_error, 1), (failing.is_killed, 137)):
        with pytest.raises(SystemExit) as caught:
            mpwatch.main(saboteur, 1)
        err = capsys.readouterr().err
        assert (caught.value.code, "RunFailedError: rank 0 " in err) == (status, True)
        assert ("# THE-LINE" in err) == (status == 1)


def test_a_value_that_cannot_be_rebuilt_costs_no_rank_of_a_group():
    class FailsWhenRebuilt:
        def __init__(self, code):
            self.code = code

        def __reduce__(self):
            return exec, (self.code,)

    with mpwatch.WorkerGroup(1) as group:
        text = "rank 0 failed first: TypeError: its return value cannot be rebuilt in the caller: .*ZeroDivisionError: .* by zero"
        with pytest.raises(mpwatch.RunFailedError, match=text):
            group.run(FailsWhenRebuilt, ("1 // 0",))
        with pytest.raises(KeyboardInterrupt):
            group.run(FailsWhenRebuilt, ("raise KeyboardInterrupt",))
        assert list(group.run(int)) == [0]
        assert group.workers[0].restart_count == 0


def test_a_module_that_a_rank_cannot_import(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("import os\nif 'RANK' in os.environ: import no_such_module\ndef f(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    error = failed(only_here.f, 2)
    assert "could not load the call: ModuleNotFoundError" in str(error)
    assert error.root_cause.kind is FailureKind.START


class ExitsWhenLoaded:
    def __reduce__(self):
        return os._exit, (3,)


def test_a_rank_that_dies_while_it_loads_its_own_argument():
    error = failed(str, 3, args=(mpwatch.PerRank(["a", "b", ExitsWhenLoaded()]),))
    assert "rank 2 ended with exit code 3" in str(error)
    assert list(error.result.failures) == [2]


# --- timeouts and signals


@pytest.mark.usefixtures("_wait_for_all_stacks")
def test_a_timeout_stays_a_timeout_however_ranks_handle_sigterm():
    error = failed(fn.ends_at_sigterm, 4, args=(SPAWN.Array("i", 4), failing.rank), timeout=4.0, grace_period=60)
    assert 4.0 <= error.result.elapsed < 60
    assert isinstance(error, mpwatch.RunTimeoutError)
    verdict, late, ended = str(error).splitlines()
    assert verdict == "the run did not end within timeout=4 s: ranks 0, 2-3 had not returned"
    assert late.startswith("  ranks 0, 2-3: still at work (failing.py:")
    assert ended == "  rank 1: had returned"
    assert (error.root_cause, error.exit_code) == (None, 124)
    assert {rank: failure.kind.name for rank, failure in error.result.failures.items()} == dict.fromkeys(
        (0, 2, 3), "TIMEOUT"
    )
    assert all("in ends_at_sigterm" in error.result.stacks[rank] for rank in (0, 2, 3))


@pytest.mark.usefixtures("_wait_for_all_stacks")
def test_a_rank_that_ends_because_of_sigterm_counts_as_stopped(capfd):
    error = failed(fn.ends_at_sigterm, 4, args=(SPAWN.Array("i", 4), failing.raises_value_error))
    _, others = str(error).splitlines()
    assert others.startswith("  ranks 0, 2-3: stopped by the watcher (failing.py:")
    assert set(error.result.failures) == {1}
    out, err = capfd.readouterr()
    assert (out.count("received SIGTERM"), err) == (3, "")


@pytest.mark.usefixtures("_wait_for_all_stacks")
def test_an_exception_that_hangs_when_it_is_unpickled_or_made_text_blocks_nobody():
    error = failed_on_rank_1(fn.raises, fn.HangsWhenUnpickledError, grace_period=0.3)
    assert str(error).startswith("rank 1 failed first: HangsWhenUnpickledError: the batch is bad (fail")
    assert type(error.__cause__).__name__ == "HangsWhenUnpickledError"
    error = failed_on_rank_1(fn.raises, fn.HangsInStrError, grace_period=0.3)
    root = error.root_cause
    assert (root.rank, root.kind, root.exception) == (1, EXCEPTION, None)
    text = "raised an exception that could not be sent (making the text of the exception did not end in time"
    assert text in str(error)
    assert "in __str__" in root.stack
    assert error.result.elapsed < 20


# --- who failed first


def test_a_peer_error_is_not_the_cause_even_if_it_comes_first():
    def fail(barrier, has_reported):
        """Raise on rank 0 as gloo does, before the root cause, rank 1, raises."""
        barrier.wait()
        if failing.rank() == 0:
            sys.excepthook = lambda *_: has_reported.set()  # a rank calls it when it has sent the exception
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
        has_reported.wait()
        raise ValueError("the batch is bad")

    error = failed(fail, 2, args=(SPAWN.Barrier(2), SPAWN.Event()))
    assert (error.root_cause.rank, type(error.__cause__)) == (1, ValueError)
    assert "rank 0: a victim of rank 1: RuntimeError: [gloo" in str(error)


def test_a_rank_that_lost_its_peer_is_a_victim(tmp_path, barrier):
    """The kernel closes the connections of a process before it reports that the process has ended."""

    def die_or_lose_the_peer(path, barrier):
        end = socket.socket(socket.AF_UNIX)
        if failing.rank() == 1:
            end.bind(path)
            end.listen()
            barrier.wait()
            for peer in [end.accept()[0] for _ in range(2)]:
                peer.sendall(b"x")
            failing.is_killed()
        barrier.wait()
        end.connect(path)
        end.recv(1, socket.MSG_WAITALL)
        end.recv(1)
        raise RuntimeError("lost my peer")

    error = failed(die_or_lose_the_peer, 3, args=(str(tmp_path / "socket"), barrier))
    assert error.root_cause.rank == 1, str(error)
    assert all(failure.is_secondary for rank, failure in error.result.failures.items() if rank != 1)


def test_the_time_of_a_failure_is_when_it_happened_not_when_its_text_was_ready():
    def fail(has_failed, other_has_failed):
        class SlowTextError(Exception):
            def __str__(self):
                has_failed.set()
                other_has_failed.wait()
                return "slow"

        if failing.rank() == 0:
            raise SlowTextError
        has_failed.wait()
        sys.excepthook = lambda *_: other_has_failed.set()  # a rank calls it when it has sent the exception
        raise ValueError("later")

    root = failed(fail, 2, args=(SPAWN.Event(), SPAWN.Event())).root_cause
    assert (root.rank, type(root.exception).__name__) == (0, "SlowTextError")


@in_own_process
def test_a_watcher_that_wakes_up_late_still_finds_the_first_failure():
    """It notices a death and a later exception in one wake-up."""
    result = mpwatch.run(fn.two_fail_while_the_watcher_is_suspended, 3, args=(SPAWN.Array("i", 3),), check=False)
    assert result.root_cause.rank == 2


@in_own_process
def test_two_ranks_that_die_together_end_their_own_calls():
    with mpwatch.WorkerGroup(3, check=False) as group:
        pids = list(group.run(os.getpid))
        calls = [group.submit(failing.wait_to_be_stopped, ranks=rank) for rank in (0, 1)]
        while not all("in wait_to_be_stopped" in group.stacks().get(rank, "") for rank in (0, 1)):
            continue  # they have not begun yet
        group.run(fn.kill_two_while_the_watcher_is_suspended, (pids[:2],), ranks=2)
        assert [call.result().root_cause.rank for call in calls] == [0, 1]


def test_a_failure_is_noticed_quickly():
    """Not a benchmark: a bound that waiting for the interpreters to wind down would break."""
    errors = [failed(failing.call_on_rank_1, 2, args=(failing.raises_value_error, SPAWN.Barrier(2))) for _ in range(3)]
    assert sorted(error.result.elapsed - error.root_cause.elapsed for error in errors)[1] < 0.5


def test_an_excepthook_that_the_function_has_set_is_called_once(capfd):
    def fail():
        sys.excepthook = lambda kind, error, _: print("hook:", kind.__name__, error, flush=True)
        raise ValueError("x")

    assert repr(failed(fail, 1).__cause__) == "ValueError('x')"
    assert capfd.readouterr().out == "hook: ValueError x\n"


# --- stacks


@pytest.mark.usefixtures("_wait_for_all_stacks")
def test_stacks_have_all_threads_and_at_most_a_hundred_frames_of_each():
    kwargs = {"prepare": fn.starts_many_threads, "others": fn.recurses_then_waits}
    main, *others = failed_on_rank_1(failing.raises_value_error, kwargs=kwargs).result.stacks[0].split("\n\n")
    assert 80 <= main.count("in recurses_then_waits") <= 100
    assert sum("in wait_in_a_thread" in other for other in others) > 60


def test_the_stack_of_a_crash_is_in_the_report_unless_the_function_has_faulthandler_write_it_to_a_file(tmp_path, capfd):
    error = failed(fn.crashes_with_faulthandler_enabled, 1)
    assert "in crashes_with_faulthandler_enabled" in error.root_cause.stack
    assert capfd.readouterr().err == ""
    path = tmp_path / "crash.txt"
    error = failed(fn.crashes_with_faulthandler_enabled, 1, args=(str(path),))
    assert error.root_cause.stack == ""
    assert "in crashes_with_faulthandler_enabled" in path.read_text()


# --- what interpreters print

SITE = """\
import os, sys
print("output of the site", file=sys.stderr)
if os.environ.get("RANK") == "1" and os.environ.get("REFUSE"):
    raise SystemExit("no licence")
"""


def start_ranks_that_a_site_refuses(site):
    os.environ["PYTHONPATH"] = os.pathsep.join([site, os.environ["PYTHONPATH"]])
    mpwatch.run(os.getpid, 2)
    os.environ["REFUSE"] = "1"
    result = mpwatch.run(os.getpid, 2, check=False)
    print(result.root_cause.kind.name, result.root_cause.rank, "no licence" in result.root_cause.stderr)
    print(mpwatch.RunFailedError(result))


def test_startup_output_of_an_interpreter(tmp_path):
    """It goes to stderr. If the rank never becomes ready, it is in the report instead."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    done = call(start_ranks_that_a_site_refuses, str(tmp_path))
    first, verdict, *rest = done.stdout.splitlines()
    assert first == "START 1 True"
    assert verdict == "rank 1 never started: its interpreter ended with exit code 1"
    assert rest[0] == "  what it printed:"
    assert "    SystemExit: no licence" in rest
    # two ranks, multiprocessing's resource tracker, and the other rank if it was called before it was stopped
    assert done.stderr in ("output of the site\n" * 3, "output of the site\n" * 4)


def write_to_stderr():
    def write():
        os.write(2, b"by number\n")
        print("by name", file=sys.stderr)
        return os.fstat(2)[:3]

    assert mpwatch.run(write, 1)[0] == os.fstat(2)[:3]


def test_ranks_have_the_stderr_of_the_caller():
    assert call(write_to_stderr).stderr == "by number\nby name\n"

"""The process of the watcher: what signals and its death do to the ranks, and that a run leaves it unchanged."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

import mpwatch
from mpwatch.watcher.processes.guardian import Guardian
from support import failing
from support.programs import ENV, call, command, python
from support.thoroughness import choose
from watcher import interrupting_functions
from watcher.watcher_program import PATIENT_RUN, RUN, Program, alive, guardian_of

SAVE = r"signal.signal(2, lambda *_: (os.write(1, b'saved\n'), os._exit(0)))"
IGNORE = r"signal.signal(2, lambda *_: os.write(1, b'received\n')); signal.signal(15, signal.SIG_IGN)"


IN_THREAD = "thread = threading.Thread(target=mpwatch.run, args=(work, 2)); thread.start(); thread.join()"
FORK = "threading.Timer(0.2, lambda: os.fork() or (signal.alarm(2), signal.pause(), os._exit(0))).start()"


def end_soon(program, number):
    """Wait for a program that ends soon by this signal, and leaves no process. Return its output."""
    status, out, err, seconds = program.end()
    assert status == -number, err
    assert seconds < 4
    assert not alive(program.pids)
    return out, err


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param({}, id="in the main thread"),
        pytest.param({"call": IN_THREAD}, id="in a thread"),
        pytest.param({"in_host": FORK}, id="has forked"),  # the fork holds every pipe open: the guardian ends the ranks
        pytest.param({"in_rank": "os.closerange(3, 4096)"}, id="ranks have closed its pipes"),  # the guardian ends the ranks
    ],
)
def test_no_rank_outlives_a_killed_watcher(statements, eventually):
    program = Program(**statements)
    program.signal(signal.SIGKILL)
    eventually(lambda: not alive(program.pids))
    assert program.end()[0] == -signal.SIGKILL


def test_no_rank_outlives_a_watcher_that_has_lost_its_guardian(eventually):
    """The kernel alone ends the ranks."""
    program = Program()
    os.kill(guardian_of(program.process.pid), signal.SIGKILL)
    program.signal(signal.SIGKILL)
    program.end()
    eventually(lambda: not alive(program.pids))


def test_ctrl_c_raises_keyboard_interrupt_and_prints_one_traceback():
    program = Program()
    program.signal(signal.SIGINT, group=True)
    _, err = end_soon(program, signal.SIGINT)
    assert err.count("Traceback") == 1
    assert "KeyboardInterrupt\nthe run was stopped: this process received SIGINT\n" in err
    assert re.search(r"\n  ranks? .*: stopped by the watcher \(\w+\.py:\d+ in \w+: ", err)


def test_ctrl_c_reaches_the_functions_so_that_they_can_save():
    program = Program(in_rank=SAVE)
    program.signal(signal.SIGINT, group=True)
    status, out, _, _ = program.end()
    assert status == -signal.SIGINT
    assert out.count("saved") == 2


def test_ctrl_c_twice_ends_ranks_that_ignore_the_first():
    program = Program(call=PATIENT_RUN, in_rank=IGNORE)
    program.signal(signal.SIGINT)
    for _ in range(2):
        assert "received" in program.process.stdout.readline()
    program.signal(signal.SIGINT)
    end_soon(program, signal.SIGINT)


@pytest.mark.parametrize(
    "start",
    [
        "executor().submit(call_in_thread)",
        "executor().submit(call_in_thread).result()",
        "with executor() as pool: pool.submit(call_in_thread)",
        "threading.Thread(target=call_in_thread).start()",
    ],
)
def test_ctrl_c_while_a_program_waits_for_the_run_of_a_thread(start):
    program = Program("pass", SAVE, start)
    program.signal(signal.SIGINT, group=True)
    out, _ = end_soon(program, signal.SIGINT)
    assert sorted(out.split()) == ["interrupted", "saved", "saved"]


def test_ctrl_c_stops_the_run_of_a_pool_that_was_imported_late():
    """concurrent.futures registers the function that waits for its threads when it is imported."""
    earlier = "thread = threading.Thread(target=mpwatch.run, args=(os.getpid, 1)); thread.start(); thread.join()"
    program = Program("pass", in_host=f"{earlier}; executor().submit(call_in_thread).result()")
    program.signal(signal.SIGINT)
    assert end_soon(program, signal.SIGINT)[0] == "interrupted\n"


def test_the_end_of_an_interactive_python_stops_no_run_for_an_earlier_ctrl_c():
    program = (
        "import multiprocessing, threading, time, mpwatch\n"
        "raise KeyboardInterrupt\n"
        "thread = threading.Thread(target=lambda: print(list(mpwatch.run(time.sleep, 1, args=(0.5,)))))\n"
        "thread.start()\n"
        "while not multiprocessing.active_children(): pass\n"
        "\n"
        "exit()\n"
    )
    done = python("-i", program=program, check=False)
    status = 0 if sys.version_info < (3, 14) else -signal.SIGINT  # for the Ctrl-C before, also without mpwatch
    assert (done.returncode, done.stdout) == (status, "[None]\n"), done.stderr


def test_ctrl_c_while_a_program_waits_for_the_group_of_a_thread():
    start = "group = mpwatch.WorkerGroup(2, grace_period=5); executor().submit(call_in_thread, 'group.run(work)')"
    program = Program("pass", in_host=start)
    program.signal(signal.SIGINT)
    assert end_soon(program, signal.SIGINT)[0] == "interrupted\n"


def test_ctrl_c_while_a_program_waits_for_several_runs_of_a_thread():
    start = "pool = executor(1); [pool.submit(call_in_thread, PATIENT_RUN) for _ in range(3)]"
    program = Program("pass", in_host=start)
    program.signal(signal.SIGINT)
    status, out, _, seconds = program.end()
    assert status == -signal.SIGINT
    assert "interrupted" in out
    assert seconds < 8
    assert not alive(program.pids)


def test_ctrl_c_twice_while_a_program_waits_for_the_run_of_a_thread():
    program = Program("pass", IGNORE, "executor().submit(call_in_thread, PATIENT_RUN)")
    program.signal(signal.SIGINT)
    for _ in range(2):
        assert "received" in program.process.stdout.readline()
    program.signal(signal.SIGINT)
    end_soon(program, signal.SIGINT)


MAP = "list(mpwatch.map(lambda _: work(), range(2), 2, grace_period=5))"


@pytest.mark.parametrize(
    ("number", "call"),
    [
        (signal.SIGTERM, RUN),
        (signal.SIGHUP, RUN),
        (signal.SIGTERM, "mpwatch.WorkerGroup(2, grace_period=5).run(work)"),
        (signal.SIGTERM, MAP),
        (signal.SIGHUP, MAP),
    ],
)
def test_sigterm_and_sighup_end_the_program_after_its_ranks(number, call):
    """The report is shown before, since no exception has it."""
    program = Program(call)
    program.signal(number)
    verdict, *places = end_soon(program, number)[1].splitlines()
    assert verdict == f"the run was stopped: this process received {number.name}"
    assert places  # one line, unless the ranks were at different places, or one of them did not answer in time
    assert all(re.match(r"  ranks? [01-]+: stopped by the watcher( |$)", place) for place in places), places


def test_only_a_signal_that_ends_the_program_shows_a_report_by_itself():
    program = Program(in_host="signal.signal(2, signal.SIG_DFL)")
    program.signal(signal.SIGINT)
    assert end_soon(program, signal.SIGINT)[1] == ""


def test_a_host_s_own_handler_runs_when_all_is_over():
    own = "signal.signal(15, lambda *_: print('own handler', flush=True))"
    program = Program(in_host=own)
    program.signal(signal.SIGTERM)
    status, out, err, _ = program.end()
    assert status == 1
    assert "own handler" in out
    assert "RunFailedError: the run was stopped: this process received SIGTERM" in err
    assert err.count("the run was stopped") == 1


def test_nohup_is_respected():
    program = Program(in_host="signal.signal(1, signal.SIG_IGN)")
    program.signal(signal.SIGHUP)
    program.signal(signal.SIGTERM)
    assert program.end()[0] == -signal.SIGTERM


def announce_and_run():
    run = mpwatch.run  # imports most of the package; Python may lose a Ctrl-C during an import (in `_get_module_lock`)
    os.write(1, b"go\n")
    run(failing.wait_to_be_stopped, 3, grace_period=2)


@pytest.mark.parametrize("moment", range(12))
def test_a_signal_at_any_moment_of_the_start_leaves_nothing(moment):
    """From the start of the first rank until the last one is ready. An environment variable marks all processes of the run."""
    tag = f"moment-{os.getpid()}-{moment}"
    process = subprocess.Popen(
        [sys.executable, *command(announce_and_run)],
        env={**ENV, "MPWATCH_TEST_TAG": tag},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    process.stdout.readline()
    until = time.monotonic() + moment * 0.012
    while time.monotonic() < until:
        os.sched_yield()
    number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[moment % 3]
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number
    deadline = time.monotonic() + 1
    while (left := tagged(tag)) and time.monotonic() < deadline:
        os.sched_yield()
    assert not left


def tagged(tag):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as env, open(f"/proc/{pid}/cmdline", "rb") as line:
                if tag.encode() in env.read():
                    found.append((pid, line.read()))
        except OSError:
            continue
    return found


def rebuild_slow_value():
    def wait():
        os.write(1, b"rebuilding\n")
        signal.pause()

    class Slow:
        def __reduce__(self):
            return wait, ()

    mpwatch.run(Slow, 1)


def test_ctrl_c_while_a_value_is_rebuilt_here():
    arguments = [sys.executable, *command(rebuild_slow_value)]
    process = subprocess.Popen(arguments, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "rebuilding\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert err.endswith("KeyboardInterrupt\n")


def send_signals_at_the_end(*numbers):
    def close_after_signals(self, close=Guardian.close):
        for number in numbers:
            signal.raise_signal(number)
        close(self)

    signal.signal(signal.SIGTERM, lambda *_: print("the handler", flush=True))
    Guardian.close = close_after_signals
    mpwatch.run(failing.rank, 1)


def test_ctrl_c_at_the_end_of_a_run_is_not_lost():
    done = call(send_signals_at_the_end, 2, check=False)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.endswith("KeyboardInterrupt\n")


def test_every_signal_is_delivered():
    done = call(send_signals_at_the_end, 2, 15, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "the handler\n")


def test_ctrl_c_while_a_failed_run_is_stopped_keeps_the_failure(eventually):
    fail = "signal.signal(10, lambda *_: failing.raises_value_error()); signal.signal(15, signal.SIG_IGN)"
    program = Program(call=PATIENT_RUN, in_rank=fail)
    ranks = program.pids[::2]
    os.kill(ranks[0], signal.SIGUSR1)
    eventually(lambda: len(alive(ranks)) == 1)  # the failed rank has ended, and the other one ignores SIGTERM
    program.signal(signal.SIGINT)
    _, err = end_soon(program, signal.SIGINT)
    assert "failed first: ValueError: the batch is bad" in err
    assert err.endswith("KeyboardInterrupt\n")


def set_event_and_wait(started):
    started.set()
    while True:  # not signal.pause(), which may begin just after the signal has come
        # It calls the handlers. In a child that a thread has forked, the interpreter of Python 3.13 and newer does not.
        signal.pthread_sigmask(signal.SIG_BLOCK, ())
        time.sleep(0.01)


def test_a_child_that_the_host_forks_during_a_run_has_its_own_signals(barrier):
    codes = []

    def fork_and_terminate():
        forked = multiprocessing.get_context("fork")
        started = forked.Event()  # Python forgets signals that reach a child before its first instruction
        child = forked.Process(target=set_event_and_wait, args=(started,))
        child.start()
        started.wait()
        child.terminate()
        child.join()
        codes.append(child.exitcode)
        barrier.wait()

    thread = threading.Thread(target=fork_and_terminate)
    thread.start()
    list(mpwatch.run(interrupting_functions.waits_at_barrier, 2, args=(barrier,)))
    thread.join()
    assert codes == [-signal.SIGTERM]


def test_other_code_may_close_the_processes(barrier):
    def close():
        while not (ranks := [p for p in multiprocessing.active_children() if p.name.startswith("mpwatch-rank")]):
            os.sched_yield()
        ranks[0].join()
        ranks[0].close()

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(mpwatch.RunFailedError, match="rank 1 failed first"):
        mpwatch.run(failing.call_on_rank_1, 3, args=(failing.raises_value_error, barrier))
    thread.join()


def test_ranks_do_not_ignore_sigterm_if_the_host_does():
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        start = time.monotonic()
        with pytest.raises(mpwatch.RunFailedError, match="rank 0 failed first"):
            mpwatch.run(interrupting_functions.only_rank_0_raises, 4, grace_period=60)
        assert time.monotonic() - start < 20
    finally:
        signal.signal(signal.SIGTERM, handler)


def run_with_default_sigpipe_and_no_guardian():
    def kill_guardian_first(self, pid, guard=Guardian.guard):
        with suppress(ProcessLookupError):  # it is called for each rank
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        guard(self, pid)

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    Guardian.guard = kill_guardian_first
    print(list(mpwatch.run(failing.rank, 2)))


def test_sigpipe_at_its_default_does_not_end_the_host():
    done = call(run_with_default_sigpipe_and_no_guardian)
    assert done.stdout == "[0, 1]\n", done
    assert "the guardian is gone" in done.stderr


def test_a_rank_that_has_gone_to_another_group_does_not_outlive_a_killed_watcher(eventually):
    program = Program(in_rank="os.setpgid(0, os.getpgid(os.getppid()))")
    program.signal(signal.SIGKILL)
    program.process.wait()
    ranks, helpers = program.pids[::2], program.pids[1::2]
    try:
        eventually(lambda: not alive(ranks))
    finally:
        for pid in helpers:
            # They are in the host's process group, like their ranks, so mpwatch does not kill them.
            os.kill(pid, signal.SIGKILL)
    program.end()


def test_an_error_in_mpwatch_leaves_nothing(monkeypatch):
    """The leak check after each test looks for what is left."""
    from mpwatch.watcher import event_loop

    def fail(*_):
        raise ZeroDivisionError("a bug in mpwatch")

    monkeypatch.setattr(event_loop.EventLoop, "_handle_message", fail)
    with pytest.raises(ZeroDivisionError):
        mpwatch.run(failing.wait_to_be_stopped, 2)


@pytest.mark.parametrize(
    ("what", "stride", "chaos_stride"),
    [
        ("run", 97, 13),
        pytest.param("run", 13, 1, marks=pytest.mark.slow),
        ("submit", 97, 1),
        ("direct", 199, 1),
        ("calls", 199, 3),
        pytest.param("suspended", 53, 3, marks=pytest.mark.slow),
        pytest.param("group", 53, 1, marks=pytest.mark.slow),
        pytest.param("printing", 375, 7, marks=pytest.mark.slow),
    ],
)
def test_an_exception_at_any_bytecode_leaves_nothing(what, stride, chaos_stride):
    """Throw at some places. `tox -e chaos` throws at more, except with captured output, which is slow to trace."""
    stride = choose(stride, chaos_stride)
    program = Path(__file__).parent / "exception_at_any_bytecode.py"
    done = python("-W", "ignore", str(program), what, "1", str(stride), timeout=None)
    *leaks, line = done.stdout.splitlines()
    assert not leaks, done.stdout + done.stderr
    thrown, of = (int(word) for word in line.split() if word.isdigit())
    assert thrown > 0.5 * (of // stride), line  # a run that is done sooner than the first one has fewer places

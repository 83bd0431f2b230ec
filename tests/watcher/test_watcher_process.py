"""The process of the watcher: what signals and its death do to the ranks, and that a run leaves it unchanged."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mpwatch
from support.programs import ENV
from watcher.watcher_program import PATIENT_RUN, RUN, Program, alive, guardian_of


@pytest.mark.parametrize("where", ["main thread", "thread"])
def test_no_rank_outlives_a_killed_watcher(where, eventually):
    thread = "thread = threading.Thread(target=lambda: mpwatch.run(work, 2)); thread.start(); thread.join()"
    program = Program(call=thread if where == "thread" else RUN)
    program.signal(signal.SIGKILL)
    assert program.end()[0] == -signal.SIGKILL
    eventually(lambda: not alive(program.pids), seconds=1.0)


def test_no_rank_outlives_a_watcher_that_has_forked(eventually):
    """A fork of the watcher's program holds every pipe open. The guardian must end the ranks all the same."""
    fork = "threading.Timer(0, lambda: os.fork() or (signal.alarm(2), signal.pause(), os._exit(0))).start()"
    program = Program(in_rank="", in_host=fork.replace("Timer(0,", "Timer(0.2,"))
    program.signal(signal.SIGKILL)
    eventually(lambda: not alive(program.pids), seconds=1.0)
    program.end()


def test_no_rank_outlives_a_watcher_that_has_lost_its_guardian(eventually):
    """The kernel alone ends the ranks."""
    program = Program()
    os.kill(guardian_of(program.process.pid), signal.SIGKILL)
    program.signal(signal.SIGKILL)
    program.end()
    eventually(lambda: not alive(program.pids), seconds=1.0)


def test_no_rank_outlives_a_watcher_whose_pipes_the_ranks_have_closed(eventually):
    """The guardian alone ends the ranks."""
    program = Program(in_rank="os.closerange(3, 4096)")
    program.signal(signal.SIGKILL)
    program.end()
    eventually(lambda: not alive(program.pids), seconds=1.0)


def test_ctrl_c_raises_keyboard_interrupt_and_prints_one_traceback():
    program = Program()
    program.signal(signal.SIGINT, group=True)
    status, _, err, seconds = program.end()
    assert status == -signal.SIGINT
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert seconds < 4
    assert not alive(program.pids)


def test_ctrl_c_reaches_the_functions_so_that_they_can_save():
    program = Program(in_rank="signal.signal(2, lambda *_: (os.write(1, b'saved\\n'), os._exit(0)))")
    program.signal(signal.SIGINT, group=True)
    status, out, _, _ = program.end()
    assert status == -signal.SIGINT
    assert out.count("saved") == 2


def test_ctrl_c_twice_ends_ranks_that_ignore_the_first():
    ignoring = "signal.signal(2, lambda *_: os.write(1, b'received\\n')); signal.signal(15, signal.SIG_IGN)"
    program = Program(call=PATIENT_RUN, in_rank=ignoring)
    program.signal(signal.SIGINT)
    for _ in range(2):
        assert "received" in program.process.stdout.readline()
    program.signal(signal.SIGINT)
    status, _, _, seconds = program.end()
    assert status == -signal.SIGINT
    assert seconds < 4
    assert not alive(program.pids)


IN_THREAD = """
from concurrent.futures import ThreadPoolExecutor
def call_in_thread():
    try: {call}
    except KeyboardInterrupt: os.write(1, b"interrupted\\n")
{start}
"""
SAVING = "signal.signal(2, lambda *_: (os.write(1, b'saved\\n'), os._exit(0)))"


@pytest.mark.parametrize(
    "start",
    [
        "ThreadPoolExecutor().submit(call_in_thread)",
        "ThreadPoolExecutor().submit(call_in_thread).result()",
        "with ThreadPoolExecutor() as pool: pool.submit(call_in_thread)",
        "threading.Thread(target=call_in_thread).start()",
    ],
)
def test_ctrl_c_while_a_program_waits_for_the_run_of_a_thread(start):
    program = Program("pass", SAVING, IN_THREAD.format(call=RUN, start=start))
    program.signal(signal.SIGINT, group=True)
    status, out, _, seconds = program.end()
    assert status == -signal.SIGINT
    assert sorted(out.split()) == ["interrupted", "saved", "saved"]
    assert seconds < 4
    assert not alive(program.pids)


def test_ctrl_c_stops_the_run_of_a_pool_that_was_imported_late():
    """concurrent.futures registers the function that waits for its threads when it is imported."""
    earlier = "thread = threading.Thread(target=mpwatch.run, args=(os.getpid, 1)); thread.start(); thread.join()\n"
    in_host = earlier + IN_THREAD.format(call=RUN, start="ThreadPoolExecutor().submit(call_in_thread).result()")
    program = Program("pass", in_host=in_host)
    program.signal(signal.SIGINT)
    status, out, _, seconds = program.end()
    assert (status, out) == (-signal.SIGINT, "interrupted\n")
    assert seconds < 4


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
    done = subprocess.run(
        [sys.executable, "-i"], input=program, env=ENV, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[None]\n"), done.stderr


def test_ctrl_c_while_a_program_waits_for_the_group_of_a_thread():
    group = "group = mpwatch.WorkerGroup(2, grace_period=5)"
    start = f"{group}; ThreadPoolExecutor().submit(call_in_thread)"
    program = Program("pass", in_host=IN_THREAD.format(call="group.run(work)", start=start))
    program.signal(signal.SIGINT)
    status, out, _, seconds = program.end()
    assert (status, out) == (-signal.SIGINT, "interrupted\n")
    assert seconds < 4
    assert not alive(program.pids)


def test_ctrl_c_while_a_program_waits_for_several_runs_of_a_thread():
    start = "pool = ThreadPoolExecutor(1); [pool.submit(call_in_thread) for _ in range(3)]"
    program = Program("pass", in_host=IN_THREAD.format(call=PATIENT_RUN, start=start))
    program.signal(signal.SIGINT)
    status, out, _, seconds = program.end()
    assert status == -signal.SIGINT
    assert "interrupted" in out
    assert seconds < 8
    assert not alive(program.pids)


def test_ctrl_c_twice_while_a_program_waits_for_the_run_of_a_thread():
    ignoring = "signal.signal(2, lambda *_: os.write(1, b'received\\n')); signal.signal(15, signal.SIG_IGN)"
    start = "ThreadPoolExecutor().submit(call_in_thread)"
    program = Program("pass", ignoring, IN_THREAD.format(call=PATIENT_RUN, start=start))
    program.signal(signal.SIGINT)
    for _ in range(2):
        assert "received" in program.process.stdout.readline()
    program.signal(signal.SIGINT)
    status, _, _, seconds = program.end()
    assert status == -signal.SIGINT
    assert seconds < 4
    assert not alive(program.pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_end_the_program_after_its_ranks(number):
    program = Program()
    program.signal(number)
    status, _, err, seconds = program.end()
    assert status == -number
    assert err == ""
    assert seconds < 4
    assert not alive(program.pids)


def test_a_host_s_own_handler_runs_when_all_is_over():
    own = "signal.signal(15, lambda *_: print('own handler', flush=True))"
    program = Program(in_host=own)
    program.signal(signal.SIGTERM)
    status, out, err, _ = program.end()
    assert status == 1
    assert "own handler" in out
    assert "RunFailedError: the run was stopped: this process received SIGTERM" in err


def test_nohup_is_respected():
    program = Program(in_host="signal.signal(1, signal.SIG_IGN)")
    program.signal(signal.SIGHUP)
    program.signal(signal.SIGTERM)
    assert program.end()[0] == -signal.SIGTERM


@pytest.mark.parametrize("moment", range(12))
def test_a_signal_at_any_moment_of_the_start_leaves_nothing(moment):
    """From the start of the first rank until the last one is ready. An environment variable marks all processes of the run."""
    code = (
        "import os, sys, threading, time, mpwatch\n"
        "from support import failing\n"
        "os.write(1, b'go\\n')\n"
        "mpwatch.run(failing.wait_to_be_stopped, 3, grace_period=2)\n"
    )
    tag = f"moment-{os.getpid()}-{moment}"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
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


def test_ctrl_c_while_a_value_is_rebuilt_here():
    code = (
        "import os, signal, mpwatch\n"
        "def wait(): os.write(1, b'rebuilding\\n'); signal.pause()\n"
        "class Slow:\n"
        "    def __reduce__(self): return wait, ()\n"
        "mpwatch.run(Slow, 1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "rebuilding\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert err.endswith("KeyboardInterrupt\n")


def test_ctrl_c_at_the_end_of_a_run_is_not_lost():
    code = (
        "import signal, mpwatch\n"
        "from support import failing\n"
        "from mpwatch.watcher.processes.guardian import Guardian\n"
        "close = Guardian.close\n"
        "Guardian.close = lambda self: (signal.raise_signal(signal.SIGINT), close(self))\n"
        "mpwatch.run(failing.rank, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.endswith("KeyboardInterrupt\n")


def test_ctrl_c_while_a_failed_run_is_stopped_keeps_the_failure(eventually):
    fail = "signal.signal(10, lambda *_: failing.raises_value_error()); signal.signal(15, signal.SIG_IGN)"
    program = Program(call=PATIENT_RUN, in_rank=fail)
    ranks = program.pids[::2]
    os.kill(ranks[0], signal.SIGUSR1)
    eventually(lambda: len(alive(ranks)) == 1)  # the failed rank has ended, and the other one ignores SIGTERM
    program.signal(signal.SIGINT)
    status, _, err, seconds = program.end()
    assert status == -signal.SIGINT
    assert "failed first: ValueError: the batch is bad" in err
    assert err.endswith("KeyboardInterrupt\n")
    assert seconds < 4


def set_event_and_wait(started):
    started.set()
    while True:  # not signal.pause(), which may begin just after the signal has come
        time.sleep(0.01)


def test_a_child_that_the_host_forks_during_a_run_has_its_own_signals(barrier):
    import multiprocessing
    import threading

    from watcher import interrupting_functions

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


def test_every_signal_is_delivered():
    code = (
        "import os, signal, mpwatch\n"
        "from support import failing\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('the handler', flush=True))\n"
        "from mpwatch.watcher.processes.guardian import Guardian\n"
        "close = Guardian.close\n"
        "Guardian.close = lambda self: (signal.raise_signal(2), signal.raise_signal(15), close(self))\n"
        "mpwatch.run(failing.rank, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "the handler\n"


def test_other_code_may_close_the_processes(barrier):
    import multiprocessing
    import threading

    from support import failing

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
    from watcher import interrupting_functions

    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        start = time.monotonic()
        with pytest.raises(mpwatch.RunFailedError, match="rank 0 failed first"):
            mpwatch.run(interrupting_functions.only_rank_0_raises, 4, grace_period=60)
        assert time.monotonic() - start < 20
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_sigpipe_at_its_default_does_not_end_the_host():
    code = (
        "import os, signal, mpwatch\n"
        "from support import failing\n"
        "from mpwatch.watcher.processes.guardian import Guardian\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "guard = Guardian.guard\n"
        "def kill_it_first(self, pid):\n"
        "    self._process.kill(); self._process.wait(); guard(self, pid)\n"
        "Guardian.guard = kill_it_first\n"
        "print(list(mpwatch.run(failing.rank, 2)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=False)
    assert done.stdout == "[0, 1]\n", done
    assert "the guardian is gone" in done.stderr


def test_a_rank_that_has_gone_to_another_group_does_not_outlive_a_killed_watcher(eventually):
    program = Program(in_rank="os.setpgid(0, os.getpgid(os.getppid()))")
    program.signal(signal.SIGKILL)
    program.process.wait()
    ranks, helpers = program.pids[::2], program.pids[1::2]
    try:
        eventually(lambda: not alive(ranks), seconds=1.0)
    finally:
        for pid in helpers:
            os.kill(
                pid, signal.SIGKILL
            )  # they are in the host's process group, like their ranks, so mpwatch does not kill them
    program.end()


def test_an_error_in_mpwatch_leaves_nothing(monkeypatch):
    """The leak check after each test looks for what is left."""
    from mpwatch.watcher import event_loop

    def fail(*_):
        raise ZeroDivisionError("a bug in mpwatch")

    from support import failing

    monkeypatch.setattr(event_loop.EventLoop, "_handle_message", fail)
    with pytest.raises(ZeroDivisionError):
        mpwatch.run(failing.wait_to_be_stopped, 2)


@pytest.mark.parametrize(
    ("what", "stride", "chaos_stride"),
    [
        ("run", 211, 53),
        pytest.param("run", 53, 1, marks=pytest.mark.slow),
        pytest.param("group", 211, 1, marks=pytest.mark.slow),
        pytest.param("printing", 1499, 29, marks=pytest.mark.slow),
    ],
)
def test_an_exception_at_any_bytecode_leaves_nothing(what, stride, chaos_stride):
    """Throw at some bytecodes. `tox -e chaos` throws at all, except with captured output, which is slow to trace."""
    stride = chaos_stride if "MPWATCH_TEST_THOROUGHLY" in os.environ else stride
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).parent / "exception_at_any_bytecode.py"),
            what,
            "1",
            str(stride),
        ],
        env=ENV,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    thrown, of = (int(word) for word in line.split() if word.isdigit())
    assert thrown > 0.5 * (of // stride), line  # a run that is done sooner than the first one has fewer bytecodes

"""How a WorkerGroup ends: with its program, in a fork of the program, with its last reference; and the effect of Ctrl-C."""

import os
import signal
import threading
import time

import pytest

import mpwatch
from mpwatch import WorkerGroup
from mpwatch.watcher.run import QUICK_CALL_SECONDS
from support import functions
from support.process_state import is_alive
from support.programs import python


def pids_of(group):
    return list(group.run(os.getpid))


def test_a_fork_of_the_program_cannot_use_the_group():
    with WorkerGroup(1) as group:
        before = pids_of(group)
        pid = os.fork()
        if pid == 0:
            try:
                group.run(functions.rank)
            except RuntimeError as error:
                os._exit(7 if "fork of the process" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert pids_of(group) == before


def test_a_group_that_is_forgotten_ends(eventually):
    groups = [WorkerGroup(2)]
    pids = pids_of(groups[0])
    with pytest.warns(ResourceWarning, match="a WorkerGroup was not closed"):
        groups.clear()
    eventually(lambda: not any(thread.name == "mpwatch" for thread in threading.enumerate()))
    assert not any(is_alive(pid) for pid in pids)


PROGRAM = """
import atexit, logging, os, signal, sys, threading, time
{first}
import mpwatch
from support import functions
from mpwatch import WorkerGroup
from mpwatch.watcher.run import QUICK_CALL_SECONDS
def note(path): atexit.register(lambda: open(path, "w").write("ended"))
"""


def program(text, *, first="", **more):
    return python("-c", PROGRAM.format(first=first) + text, **more)


@pytest.mark.parametrize("first", ["", "import weakref; weakref.finalize(sys, print, 'finalised')"], ids=["", "hook"])
def test_a_program_may_end_without_closing_its_group(first, tmp_path):
    path = tmp_path / "ended"
    program(f"group = WorkerGroup(1)\ngroup.run(note, ({str(path)!r},))\n", first=first)
    assert path.read_text() == "ended"


def test_a_program_may_end_during_another_thread_s_call():
    began = time.monotonic()
    program(
        "group = WorkerGroup(1, grace_period=60)\n"
        "group.run(functions.rank)\n"
        "threading.excepthook = lambda *_: None\n"  # Python may die of a daemon thread that prints while it ends
        "thread = threading.Thread(target=group.run, args=(time.sleep, (1000,)), daemon=True)\n"
        "thread.start()\n"
        "while not group._call_lock.locked(): os.sched_yield()\n"
    )
    assert time.monotonic() - began < 30


def test_globals_have_their_values_at_the_time_of_the_call():
    output = program(
        "n = 1\n"
        "def get(): return n\n"
        "class Thing: pass\n"
        "def make(): return Thing()\n"
        "with WorkerGroup(2) as group:\n"
        "    print(list(group.run(get)))\n"
        "    n = 2\n"
        "    print(list(group.run(get)))\n"
        "    def get(): return -n\n"
        "    print(list(group.run(get)))\n"
        "    print({type(thing) is Thing for _ in range(2) for thing in group.run(make)})\n"
    ).stdout
    assert output == "[1, 1]\n[2, 2]\n[-2, -2]\n{True}\n"


INTERRUPTED = """
def interrupt():
    try:
        time.sleep({after})
        os.kill(os.getppid(), signal.{signal})
        while True: time.sleep(0.01)
    except KeyboardInterrupt:
        if {ignores}: signal.pause()
        raise
def pids(): return os.getpid()
logging.basicConfig(format="%(message)s", stream=sys.stdout)
if __name__ == "__main__":
    with WorkerGroup(1, grace_period=0.5) as group:
        before = list(group.run(pids))
        try: group.run(interrupt)
        except KeyboardInterrupt: print("interrupted")
        print(list(group.run(pids)) == before)
"""


@pytest.mark.parametrize("after", [0, 10 * QUICK_CALL_SECONDS])  # before and after the signals have been taken over
@pytest.mark.parametrize("ignores", [False, True])
def test_ranks_that_answer_to_ctrl_c_stay(ignores, after):
    output = program(INTERRUPTED.format(signal="SIGINT", ignores=ignores, after=after)).stdout
    if ignores:
        late, early = "not all of them survived the last call: the run was stopped", "the last call was aborted"
        reasons = (late,) if after else (early, late)  # on a busy machine the signal may come after QUICK_CALL_SECONDS
        assert output.startswith(tuple(f"interrupted\nall ranks are restarted: {reason}" for reason in reasons))
        assert output.endswith("\nFalse\n")
    else:
        assert output == "interrupted\nTrue\n"


AT_EACH_LINE = """
import itertools
from mpwatch import RunTimeoutError
from support.signal_at_line import SignalAtLine
def wait():
    while True: time.sleep(0.01)
def pids(): return os.getpid()
if __name__ == "__main__":
    with WorkerGroup(1) as group:
        before = list(group.run(pids))
        for n in itertools.count(1):
            with SignalAtLine(signal.SIGINT, "HostSignals.take_over", n) as interrupt:
                try: group.run(wait, timeout=2.0)
                except KeyboardInterrupt: pass
                except RunTimeoutError: break  # there are no more lines
            assert interrupt.was_sent
            assert list(group.run(pids)) == before, n
    print("tried all lines:", n > 5)
"""


def test_ranks_stay_if_ctrl_c_comes_while_the_signals_are_taken_over():
    assert program(AT_EACH_LINE).stdout == "tried all lines: True\n"


def test_sigterm_ends_the_program_and_its_group():
    done = program(INTERRUPTED.format(signal="SIGTERM", ignores=False, after=0), check=False)
    assert done.returncode == -signal.SIGTERM


def test_ctrl_c_during_the_start_leaves_no_rank():
    output = program(
        "from mpwatch.watcher.processes import process_pool\n"
        "start = process_pool.ProcessPool.start\n"
        "def slowly(self, worker, env):\n"
        "    start(self, worker, env)\n"
        "    if worker.rank == 0: os.kill(os.getpid(), signal.SIGINT)\n"
        "process_pool.ProcessPool.start = slowly\n"
        "try: WorkerGroup(3)\n"
        "except KeyboardInterrupt: print(threading.active_count(), open('/proc/self/task/%d/children' % os.getpid()).read().split()[1:])\n"
    ).stdout
    assert output == "1 []\n"  # except the resource tracker


def test_a_forgotten_group_ends_even_if_warnings_are_errors():
    output = program(
        "group = WorkerGroup(1)\n"
        "thread, = (thread for thread in threading.enumerate() if thread.name == 'mpwatch')\n"
        "del group\n"
        "thread.join(30)\n"
        "print(thread.is_alive())\n"
    )
    assert output.stdout == "False\n"
    assert "ResourceWarning: a WorkerGroup was not closed" in output.stderr


def use_a_group(close):
    group = WorkerGroup(1)
    mpwatch.current_worker().state["group"] = group
    assert list(group.run(functions.rank)) == [0]
    if close:
        group.close()


@pytest.mark.parametrize("close", [True, False])
def test_a_rank_may_have_a_group_of_its_own(close, caplog):
    """At the end of a process multiprocessing waits for its children, even if nothing has asked them to end."""
    with WorkerGroup(1, grace_period=60) as group:
        group.run(use_a_group, (close,))
    assert not caplog.records


def test_a_group_that_is_used_when_the_program_ends():
    output = program(
        "import multiprocessing.util\n"
        "@atexit.register\n"
        "def late(): print(list(group.run(functions.rank)), group.workers[0].restart_count)\n"
        "group = WorkerGroup(2)\n"
    ).stdout
    assert output == "[0, 1] 0\n"


def test_a_fork_may_leave_the_block():
    output = program(
        "with WorkerGroup(1) as group:\n"
        "    pid = os.fork()\n"
        "    if pid == 0: sys.exit(7)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), list(group.run(functions.rank)))\n",
        first="import warnings; warnings.simplefilter('ignore', DeprecationWarning)",  # of 3.12, about forks
    )
    assert output.stdout == "7 [0]\n"
    assert not output.stderr


def test_an_interrupt_does_not_reach_a_later_call():
    """A signal may arrive when the call that it was sent for has just returned."""
    with WorkerGroup(1) as group:
        (pid,) = pids_of(group)
        for _ in range(3):
            os.kill(pid, signal.SIGINT)
            assert pids_of(group) == [pid]


def test_an_interrupt_reaches_a_call_that_the_rank_has_not_read_yet():
    events = []

    def interrupt(event):
        events.append(event.name)
        if events.count("call_started") == 2 and event.name == "call_started":
            os.kill(os.getpid(), signal.SIGINT)

    with WorkerGroup(1, on_event=interrupt) as group:
        (pid,) = pids_of(group)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(KeyboardInterrupt):
            group.run(signal.pause)
        assert pids_of(group) == [pid]

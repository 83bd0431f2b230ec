"""How a WorkerGroup ends: with its program, in a fork of the program, with its last reference; and the effect of Ctrl-C."""

import atexit
import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
import weakref
from multiprocessing import spawn
from multiprocessing.util import Finalize
from pathlib import Path

import pytest

import mpwatch
from mpwatch import WorkerGroup
from support import functions
from support.process_state import SPAWN, children, is_alive
from support.programs import call, in_own_process


@in_own_process
def test_a_fork_of_the_program_cannot_use_the_group_and_may_leave_its_block():
    warnings.simplefilter("ignore", DeprecationWarning)  # of 3.12, about forks
    with WorkerGroup(1) as group:
        pid = os.fork()
        if pid == 0:
            try:
                group.run(functions.rank)
            except RuntimeError as error:
                sys.exit(7 if "fork of the process" in str(error) else 8)  # leaves the block
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert list(group.run(functions.rank)) == [0]


def test_a_group_that_is_forgotten_ends(eventually):
    groups = [WorkerGroup(2)]
    pids = list(groups[0].run(os.getpid))
    with pytest.warns(ResourceWarning, match="a WorkerGroup was not closed"):
        groups.clear()
    eventually(lambda: not any(thread.name == "mpwatch" for thread in threading.enumerate()))
    assert not any(is_alive(pid) for pid in pids)


def keep_a_group_open(path):
    global group  # lives until the program ends
    group = WorkerGroup(1)
    group.run(lambda: atexit.register(lambda: Path(path).write_text("ended")) and None)


def test_a_program_may_end_without_closing_its_group(tmp_path):
    call(keep_a_group_open, str(tmp_path / "ended"))
    assert (tmp_path / "ended").read_text() == "ended"


def set_and_wait(event):
    event.set()
    time.sleep(1000)


def end_during_a_call():
    def run():
        try:
            group.run(set_and_wait, (has_begun,))
        except mpwatch.RunFailedError as error:
            os.write(1, error.result.verdict.encode())
        finally:
            has_ended.set()

    has_begun, has_ended = SPAWN.Event(), threading.Event()
    Finalize(None, has_ended.wait, exitpriority=-1000)  # after the end of the group, which has a higher priority
    group = WorkerGroup(1, grace_period=60)
    threading.Thread(target=run, daemon=True).start()
    has_begun.wait()


def test_a_program_may_end_during_another_threads_call():
    began = time.monotonic()
    assert call(end_during_a_call).stdout == "the run was stopped: the program ended"
    assert time.monotonic() - began < 30


def sleep_until_interrupted():
    while True:  # not signal.pause(), which may begin just after the signal has come
        time.sleep(0.01)


@in_own_process
def test_a_rank_that_does_not_answer_to_ctrl_c_is_replaced():
    def interrupt():
        try:
            time.sleep(0.02)  # until the thread of the caller waits
            os.kill(os.getppid(), signal.SIGINT)
            sleep_until_interrupted()
        except KeyboardInterrupt:
            signal.pause()

    with WorkerGroup(1, grace_period=0.5) as group:
        before = list(group.run(os.getpid))
        with pytest.raises(KeyboardInterrupt):
            group.run(interrupt)
        assert list(group.run(os.getpid)) != before


@in_own_process
def test_ranks_stay_if_ctrl_c_comes_at_any_instant_of_a_call():
    rng = random.Random(1)
    with WorkerGroup(1) as group:
        before = list(group.run(os.getpid))
        group.run(callable, (sleep_until_interrupted,))  # an interrupted import may leave broken modules
        for _ in range(30):
            with pytest.raises(KeyboardInterrupt):
                threading.Timer(rng.uniform(0, 0.005), os.kill, (os.getpid(), signal.SIGINT)).start()
                group.run(sleep_until_interrupted)
            assert list(group.run(os.getpid)) == before


@in_own_process
def test_ctrl_c_during_the_start_leaves_no_rank():
    with pytest.raises(KeyboardInterrupt):
        WorkerGroup(3, on_event=lambda event: event.name == "worker_started" and os.kill(os.getpid(), signal.SIGINT))
    assert threading.active_count() == 1
    assert len(children()) == 1  # the resource tracker


def test_a_group_whose_restart_has_failed_is_deleted():
    group, executable = WorkerGroup(1, check=False), spawn.get_executable()
    group.run(os.kill, (0, signal.SIGKILL))
    spawn.set_executable("/nonexistent")
    try:
        with pytest.raises(mpwatch.LaunchError):
            group.run(functions.rank)
    finally:
        spawn.set_executable(executable)
    deleted = weakref.ref(group)
    with pytest.warns(ResourceWarning, match="a WorkerGroup was not closed"):  # noqa: PT031  only one of them deletes it
        del group
        gc.collect()
    assert deleted() is None

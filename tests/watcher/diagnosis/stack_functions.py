"""Functions for ranks whose stacks the watcher reads."""

import atexit
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import threading
import time

from mpwatch.os_support.signals import NATIVE_DUMP_SIGNAL, PYTHON_DUMP_SIGNAL
from support.failing import is_killed, rank, state_of, wait_in_a_thread, wait_to_be_stopped


def fails_while_rank_0_sleeps(wait, pid):
    """Raise on rank 1 once rank 0 has stored its pid and sleeps."""
    if rank() == 0:
        return wait(pid)
    while state_of(pid.value) != "S":
        os.sched_yield()
    raise ValueError("the batch is bad")


def shares_its_pid_and_waits(pid):
    pid.value = os.getpid()
    wait_to_be_stopped()


def forks_a_child_that_crashes():
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV


def forks_a_child_that_crashes_and_waits(pid):
    forks_a_child_that_crashes()
    shares_its_pid_and_waits(pid)


def forks_a_child_that_crashes_and_is_killed():
    forks_a_child_that_crashes()
    is_killed()


def crashes_with_faulthandler_enabled(**options):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if "file" in options:
        options["file"] = open(options["file"], "w")
    faulthandler.enable(**options)
    ctypes.string_at(0)


def dumps_its_own_stack():
    for signum in (PYTHON_DUMP_SIGNAL, NATIVE_DUMP_SIGNAL):
        signal.raise_signal(signum)
        atexit.register(signal.raise_signal, signum)
    return rank()


def waits_without_faulthandler(pid):
    faulthandler.unregister(NATIVE_DUMP_SIGNAL)
    shares_its_pid_and_waits(pid)


def waits_with_120_threads(pid):
    for _ in range(120):
        threading.Thread(target=wait_in_a_thread, daemon=True).start()
    shares_its_pid_and_waits(pid)


def pauses_once(pid):
    pid.value = os.getpid()
    signal.pause()


def holds_the_gil(pid):
    pid.value = os.getpid()
    ctypes.PyDLL(None).usleep(60_000_000)


def takes_no_signal_in_its_main_thread(pid):
    threading.Thread(target=wait_in_a_thread, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {NATIVE_DUMP_SIGNAL})
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    pid.value = os.getpid()
    libc.pthread_mutex_lock(mutex)  # waits for itself, and no signal ends this wait


def waits_with_a_thread(pid):
    threading.Thread(target=wait_in_a_thread, daemon=True).start()
    shares_its_pid_and_waits(pid)


def recurses_then_waits(depth, barrier):
    if depth:
        recurses_then_waits(depth - 1, barrier)
    barrier.wait()
    wait_to_be_stopped()


def fails_beside_a_deep_stack(barrier, failed_at):
    if rank() == 0:
        recurses_then_waits(200, barrier)
    barrier.wait()
    failed_at.value = time.monotonic()
    raise ValueError("the batch is bad")


def replaces_descriptors_and_waits(folder):
    if rank() == 0:
        os.closerange(3, 4096)
        for _ in range(60):
            os.open(f"{folder}/0", os.O_RDWR | os.O_CREAT)
        open(f"{folder}/1", "w").close()
        wait_to_be_stopped()
    while not os.path.exists(f"{folder}/1"):
        os.sched_yield()
    raise ValueError("the batch is bad")


PROGRAM_THAT_EXITS_AT_SIGTERM = """
import signal, sys
def end(*_):
    with open(sys.argv[1], "w") as file:
        file.write("by SIGTERM")
    sys.exit()
signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "w").close()
while True:
    signal.pause()
"""


def execs_a_program_that_exits_at_sigterm(path):
    if rank() == 0:
        os.execv(sys.executable, [sys.executable, "-S", "-c", PROGRAM_THAT_EXITS_AT_SIGTERM, path])
    while not os.path.exists(path):
        os.sched_yield()
    raise ValueError("the batch is bad")


class ResumesTheWatcherError(Exception):
    """An exception that resumes the watcher when it is pickled, which is after its failure was reported."""

    def __reduce__(self):
        os.kill(os.getppid(), signal.SIGCONT)
        return type(self), self.args


def two_fail_while_the_watcher_is_suspended(order, pids, turn):
    """Fail on ranks 0 and 2 while the watcher is suspended. The last event resumes the watcher."""
    me, watcher = rank(), os.getppid()
    pids[me] = os.getpid()
    while not all(pids):
        os.sched_yield()
    if me == 1:
        os.kill(watcher, signal.SIGSTOP)
        while state_of(watcher) != "T":
            os.sched_yield()
        turn.value = 1
        if order == "exception first":
            while state_of(pids[2]) != "Z":
                os.sched_yield()
            os.kill(watcher, signal.SIGCONT)
        wait_to_be_stopped()
    while not turn.value:
        os.sched_yield()
    if me == 2:
        while order == "exception first" and turn.value != 2:
            os.sched_yield()
        is_killed()
    while order == "death first" and state_of(pids[2]) != "Z":
        os.sched_yield()
    raise (ResumesTheWatcherError if order == "death first" else LetsRank2DieWhenPickledError(turn))


class LetsRank2DieWhenPickledError(Exception):
    def __init__(self, turn):
        super().__init__("first")
        self.turn = turn

    def __reduce__(self):
        self.turn.value = 2
        return ValueError, ()


def three_fail_while_the_watcher_is_suspended(pids):
    """End rank 2, then rank 1, then raise on rank 0, while the watcher is suspended. Then resume the watcher."""
    me, watcher = rank(), os.getppid()
    pids[me] = os.getpid()
    while not all(pids):
        os.sched_yield()
    if me == 2:
        os.kill(watcher, signal.SIGSTOP)
        while state_of(watcher) != "T":
            os.sched_yield()
        os._exit(3)
    while state_of(pids[2]) != "Z":
        os.sched_yield()
    if me == 1:
        os._exit(4)
    while state_of(pids[1]) != "Z":
        os.sched_yield()
    raise ResumesTheWatcherError

"""Functions for ranks that fail, hang or fall silent. A rank imports this module, so it imports little."""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time

import mpwatch
from support.acts import hold_the_gil, suspend_itself
from support.failing import is_killed, rank, state_of, wait_in_a_thread, wait_to_be_stopped


def wait_until(condition):
    while not condition():
        os.sched_yield()


def call_on_rank_1_when_others_sleep(action, pids, *args, prepare=tuple, others=wait_to_be_stopped):
    """Call `action` on rank 1 once the other ranks have prepared and sleep in `others`."""
    me = rank()
    if me != 1:
        prepare()
        pids[me] = os.getpid()
        return others()
    wait_until(lambda: all(pid and state_of(pid) == "S" for other, pid in enumerate(pids) if other != 1))
    return action(*args)


# --- exceptions


class HangsWhenUnpickledError(Exception):
    def __reduce__(self):
        return wait_to_be_stopped, ()


class HangsInStrError(Exception):
    def __str__(self):
        return str(wait_to_be_stopped())


def raises(error_class):
    raise error_class("the batch is bad")


# --- signals


def ends_at_sigterm(pids, action):
    """End at SIGTERM, as a training loop that saves a checkpoint when a scheduler stops it: each rank in its own way."""

    def end(*_):
        os.write(1, b"received SIGTERM\n")
        if rank() == 0:
            raise InterruptedError("received SIGTERM")
        sys.exit(rank() - 2)

    signal.signal(signal.SIGTERM, end)
    return call_on_rank_1_when_others_sleep(action, pids)


# --- who failed first


def suspend_the_watcher():
    os.kill(os.getppid(), signal.SIGSTOP)
    wait_until(lambda: state_of(os.getppid()) == "T")


def kill_two_while_the_watcher_is_suspended(pids):
    suspend_the_watcher()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: [state_of(pid) for pid in pids] == ["Z", "Z"])
    os.kill(os.getppid(), signal.SIGCONT)


def two_fail_while_the_watcher_is_suspended(pids):
    pids[rank()] = os.getpid()
    wait_until(lambda: all(pids))
    if rank() == 1:
        suspend_the_watcher()
        wait_to_be_stopped()
    wait_until(lambda: state_of(os.getppid()) == "T")
    if rank() == 2:
        is_killed()
    wait_until(lambda: state_of(pids[2]) == "Z")
    sys.excepthook = lambda *_: os.kill(os.getppid(), signal.SIGCONT)  # a rank calls it when it has sent the exception
    raise ValueError("later")


# --- stacks


def starts_many_threads():
    for _ in range(120):
        threading.Thread(target=wait_in_a_thread, daemon=True).start()


def recurses_then_waits(depth=200):
    if depth:
        recurses_then_waits(depth - 1)
    wait_to_be_stopped()


def crashes_with_faulthandler_enabled(path=None):
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(**({"file": open(path, "w")} if path else {}))
    ctypes.string_at(0)


# --- heartbeats


def beat_forever():
    while True:
        mpwatch.heartbeat()
        time.sleep(0.01)


def stop_heartbeats_in_three_ways(barrier):
    mpwatch.heartbeat()
    barrier.wait()
    (beat_forever, wait_to_be_stopped, hold_the_gil, suspend_itself)[rank()]()

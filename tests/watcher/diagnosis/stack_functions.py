"""Functions for ranks whose stacks the watcher reads. A rank imports this module, so it imports little."""

import ctypes
import faulthandler
import os
import resource
import threading
import time

from support.failing import rank, state_of, wait_in_a_thread, wait_to_be_stopped


def fails_while_rank_0_sleeps(wait, pid):
    """Raise on rank 1 once rank 0 has stored its pid and sleeps."""
    if rank() == 0:
        return wait(pid)
    while state_of(pid.value) != "S":
        os.sched_yield()
    raise ValueError("the batch is bad")


def waits_with_many_threads(pid):
    for _ in range(120):
        threading.Thread(target=wait_in_a_thread, daemon=True).start()
    pid.value = os.getpid()
    wait_to_be_stopped()


def holds_the_gil(pid):
    pid.value = os.getpid()
    ctypes.PyDLL(None).usleep(60_000_000)


def crashes_with_faulthandler_enabled(path=None):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(**({"file": open(path, "w")} if path else {}))
    ctypes.string_at(0)


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

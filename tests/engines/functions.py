"""Functions that the ranks of jobs on clusters run, as the tests of each engine need them."""

import os
import signal
import threading

import numpy as np

import mpwatch


class RankError(Exception):
    """Raised by a rank."""


def report_pid():
    worker = mpwatch.current_worker()
    return worker.rank, os.getpid(), np.full(100_000, worker.rank)


def wait():
    signal.pause()


def raise_in_rank_3():
    if mpwatch.current_worker().rank == 3:
        raise RankError("the disk is full")
    signal.pause()


def exit_in_rank_3():
    if mpwatch.current_worker().rank == 3:
        os._exit(7)
    signal.pause()


def kill_rank_3():
    if mpwatch.current_worker().rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def return_lock_in_rank_3():
    return threading.Lock() if mpwatch.current_worker().rank == 3 else None


def make_closure_over_lock():
    lock = threading.Lock()
    return lambda: lock


def wait_for_second_start():
    if mpwatch.current_worker().restart_count == 0:
        signal.pause()
    return mpwatch.current_worker().rank, mpwatch.current_worker().restart_count


def return_bytes(size):
    return np.full(size, mpwatch.current_worker().rank, dtype=np.uint8)


def wait_for_world_size(size):
    if mpwatch.current_worker().world_size != size:
        signal.pause()
    return mpwatch.current_worker().rank


def report_steps(steps):
    for step in range(steps):
        mpwatch.report(step=step + 1, total=steps)
    return steps


def read_environment(name):
    return os.environ[name]

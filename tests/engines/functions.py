"""Functions that the ranks of jobs on clusters run, as the tests of each engine need them."""

import os
import signal

import numpy as np

import mpwatch


class RankError(Exception):
    """Raised by a rank."""


def get_rank():
    return mpwatch.current_worker().rank


def report():
    """Return the rank, its pid, that of its watcher, and an array."""
    return get_rank(), os.getpid(), os.getppid(), np.full(100_000, get_rank())


def wait():
    signal.pause()


def raise_in_rank_3():
    if get_rank() == 3:
        raise RankError("the disk is full")
    signal.pause()


def wait_for_second_start():
    """Return the rank, the number of restarts, and the pid of the watcher."""
    if mpwatch.current_worker().restart_count == 0:
        signal.pause()
    return get_rank(), mpwatch.current_worker().restart_count, os.getppid()


def wait_for_world_size(size):
    if mpwatch.current_worker().world_size != size:
        signal.pause()
    return get_rank()


def read_environment(name):
    return os.environ[name]

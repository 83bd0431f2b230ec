"""Functions for ranks that interrupt their watcher, or wait for the host at a barrier."""

import os
import signal

from support.failing import rank, wait_to_be_stopped


def waits_at_barrier(barrier):
    barrier.wait()


def only_rank_0_raises():
    if rank() == 0:
        raise ValueError("the batch is bad")
    wait_to_be_stopped()


def terminates_its_watcher():
    if rank() == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    wait_to_be_stopped()


def waits_at_barrier_twice(barrier):
    barrier.wait()
    barrier.wait()
    return rank()

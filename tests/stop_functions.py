"""Functions of ranks that ask `should_stop`. Every rank of many tests imports this module, so it imports little."""

import os
import random
import time

import mpwatch

STEPS = 10**12  # more than any test waits for


def get_rank():
    return mpwatch.current_worker().rank


def count_steps(steps=STEPS, seconds=0.0, first_step=0):
    rng = random.Random(f"{seconds} {get_rank()}")
    for step in range(first_step, steps):
        if mpwatch.should_stop(step):
            return step
        time.sleep(rng.uniform(0, seconds))
    return steps


def stop_itself(rank=0, at_step=0):
    """Request a stop on this rank at this step. Return the step at which this rank stops."""
    for step in range(STEPS):
        if mpwatch.should_stop(step):
            return step
        if (get_rank(), step) == (rank, at_step):
            assert mpwatch.request_stop()
    return None


def fail_first():
    if mpwatch.current_worker().restart_count == 0:
        raise RuntimeError("the first start")
    return stop_itself()


def hold_on(event, signum=None):
    """Send the signal to the watcher, and wait for the event instead of the next step."""
    mpwatch.should_stop(0)
    if signum is not None and get_rank() == 0:
        os.kill(os.getppid(), signum)
    event.wait()

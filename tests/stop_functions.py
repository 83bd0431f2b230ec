"""Functions of ranks that ask `should_stop`. Every rank of many tests imports this module, so it imports little."""

import itertools
import os
import random
import signal
import time

import mpwatch

STEPS = 10**12  # more than any test waits for


def count_steps(steps=STEPS, seconds=0.0, first_step=0):
    rng = random.Random(f"{seconds} {get_rank()}")
    for step in range(first_step, steps):
        if mpwatch.should_stop(step):
            return step
        time.sleep(rng.uniform(0, seconds))
    return steps


def get_rank():
    return mpwatch.current_worker().rank


def stop_itself(rank, at_step):
    for step in range(STEPS):
        if mpwatch.should_stop(step):
            return step
        if get_rank() == rank and step == at_step:
            assert mpwatch.request_stop()
    return None


def train_epochs(barrier, agreed):
    """Do epochs of ten steps. Rank 0 requests a stop in its third one, when rank 1 is in its fourth. Return where it stops."""
    for epoch, step in itertools.product(range(6), range(10)):
        if mpwatch.should_stop(step):
            return epoch, step
        if (epoch, step) == (2 + get_rank(), 5):
            barrier.wait()
            assert get_rank() == 1 or mpwatch.request_stop()
            assert agreed.wait(60)
    return None


def end_early(barrier):
    """Rank 0 is at step 7 when rank 1 has done its last step, which is step 11. Return the step at which rank 0 stops."""
    if get_rank() == 1:
        asked = [mpwatch.should_stop(step) for step in range(12)]
        barrier.wait()
        return asked
    asked = [mpwatch.should_stop(step) for step in range(7)]
    barrier.wait()
    assert mpwatch.request_stop()
    first = 7
    while not mpwatch.should_stop(first):
        first += 1
    return first


def hold_on(event, signum=None):
    mpwatch.should_stop(0)
    if signum is not None and get_rank() == 0:
        os.kill(os.getppid(), signum)
    event.wait()


def fail_after_request(is_killed):
    for step in range(STEPS):
        if mpwatch.should_stop(step):
            if get_rank() == 0:
                if is_killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError("the disk is full")
            return step
        if get_rank() == 0:
            mpwatch.request_stop()
    return None


def never_ask(barrier):
    barrier.wait()
    return count_steps() if get_rank() == 0 else None


def fail_first(message="the first start"):
    if mpwatch.current_worker().restart_count == 0:
        raise RuntimeError(message)
    if get_rank() == 0:
        mpwatch.request_stop()
    return count_steps()


def ask(step):
    return mpwatch.should_stop(step)

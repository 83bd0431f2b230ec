"""Ranks that stop together while each step has a collective, and that go on later from what they have saved."""

import os
import random
import signal
import threading
import time

import pytest

import mpwatch
from support.thoroughness import choose

STEPS = 150


def add_up(step, total):
    """Do the steps that are left, each with a collective. Return the next step and a total, which depends on all steps."""
    import torch
    import torch.distributed as dist

    rng = random.Random(f"{dist.get_rank()} {step}")
    while step < STEPS and not mpwatch.should_stop(step):
        time.sleep(rng.uniform(0, 2e-4))
        summand = torch.tensor(float(step * (dist.get_rank() + 1)))
        dist.all_reduce(summand)
        step, total = step + 1, 0.5 * total + float(summand)
    return step, total


def train(group, states):
    """Go on from what the ranks have saved. Return what they have saved now, and whether they were stopped."""
    steps, totals = zip(*states, strict=True)
    assert len(set(steps)) == 1
    result = group.run(add_up, (steps[0], mpwatch.PerRank(totals)))
    assert {step for step, _ in result} == {STEPS if result.stopped_at is None else result.stopped_at}
    return list(result), result.stopped_at is not None


@pytest.mark.parametrize(("nprocs", "instants"), [(2, 5), pytest.param(4, choose(200, 1000), marks=pytest.mark.slow)])
def test_training_that_stops_at_any_instant_goes_on_to_the_same_result(nprocs, instants):
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    rng = random.Random(instants)
    try:
        with mpwatch.WorkerGroup(nprocs, backend="gloo", stop=[signal.SIGUSR1], timeout=100) as group:
            states = new = [(0, 0.0)] * nprocs
            undisturbed, _ = train(group, new)
            while instants:
                timer = threading.Timer(rng.uniform(0, 0.1), os.kill, (os.getpid(), signal.SIGUSR1))
                timer.start()
                states, was_stopped = train(group, states)
                timer.join()
                instants -= was_stopped
                if not was_stopped:
                    assert states == undisturbed
                    states = new
    finally:
        signal.signal(signal.SIGUSR1, before)

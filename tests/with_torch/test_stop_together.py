"""Ranks that stop together while each step has a collective, and that go on later from what they have saved."""

import os
import random
import signal
import threading

import pytest

import stop_functions
from mpwatch import PerRank, WorkerGroup
from support.thoroughness import choose

STEPS = 150


def train(group, states):
    """Do the steps that are left. Return what each rank has saved."""
    steps, totals = zip(*states, strict=True)
    assert len(set(steps)) == 1
    arguments = {"seconds": 2e-4, "steps": STEPS, "first_step": steps[0], "total": PerRank(totals)}
    return group.run(stop_functions.add_up, kwargs=arguments)


@pytest.mark.parametrize("instants", [10, pytest.param(choose(200, 1000), marks=pytest.mark.slow)])
def test_training_that_stops_at_any_instant_goes_on_to_the_same_result(instants):
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    rng = random.Random(instants)
    try:
        with WorkerGroup(4, backend="gloo", preload=["torch"], stop=[signal.SIGUSR1], timeout=100) as group:
            new = [(0, 0.0)] * 4
            undisturbed = list(train(group, new))
            states, done = new, 0
            while done < instants:
                timer = threading.Timer(rng.uniform(0, 0.1), os.kill, (os.getpid(), signal.SIGUSR1))
                timer.start()
                result = train(group, states)
                timer.join()
                states = list(result)
                assert {step for step, _ in states} == {STEPS if result.stopped_at is None else result.stopped_at}
                done += result.stopped_at is not None
                if result.stopped_at is None:
                    assert states == undisturbed
                    states = new
    finally:
        signal.signal(signal.SIGUSR1, before)

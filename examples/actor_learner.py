"""One learner and three actors: while the learner learns from one batch, the actors already make the next one.

A slot machine has three arms. The actors try the arms, and the learner raises the weights of the arms that win.
In the middle an actor is killed. The caller has the weights, so the program goes on with new ranks.
"""

import math
import os
import random
import signal

import mpwatch

LEARNER, ACTORS = 0, [1, 2, 3]
WINNING = (0.2, 0.5, 0.8)  # how often each arm wins
STEPS = 1000

Try = tuple[int, int]  # an arm, and whether it won: 1 or 0


def compute_chances(weights: list[float]) -> list[float]:
    """Return how often each arm is tried."""
    powers = [math.exp(weight) for weight in weights]
    return [power / sum(powers) for power in powers]


def act(weights: list[float], step: int) -> list[Try]:
    """Try ten arms. An actor calls this."""
    me = mpwatch.current_worker()
    if (me.rank, step, me.restart_count) == (2, STEPS // 2, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    dice = random.Random(f"{me.rank} {step}")
    arms = dice.choices(range(len(WINNING)), compute_chances(weights), k=10)
    return [(arm, int(dice.random() < WINNING[arm])) for arm in arms]


def learn(weights: list[float], tries: list[Try]) -> list[float]:
    """Return better weights. The learner calls this."""
    chances = compute_chances(weights)
    average = sum(won for _, won in tries) / len(tries)
    for tried, won in tries:
        for arm, chance in enumerate(chances):
            weights[arm] += 0.02 * (won - average) * ((arm == tried) - chance)
    return weights


weights = [0.0] * len(WINNING)
with mpwatch.WorkerGroup(nprocs=4) as group:
    step = 0
    acting = group.submit(act, (weights, step), ranks=ACTORS)
    while step < STEPS:
        try:
            tries = [one_try for of_actor in acting.result().values() for one_try in of_actor]
            learning = group.submit(learn, (weights, tries), ranks=LEARNER)
            acting = group.submit(act, (weights, step + 1), ranks=ACTORS)
            weights = learning.result()[LEARNER]
            step += 1
        except mpwatch.RunFailedError as error:
            print(f"step {step}: {str(error).splitlines()[0]}")
            acting = group.submit(act, (weights, step), ranks=ACTORS)
    restarts = group.workers[LEARNER].restart_count
print("restarts:", restarts)
print("chances of the arms:", *(f"{chance:.2f}" for chance in compute_chances(weights)))

"""`mpwatch.map` whose ranks are killed at random: each item is done once, or reported."""

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import mpwatch
from mpwatch import ItemFailure
from support.thoroughness import choose

ITEMS, KILLS, SEED = choose(3_000, 10_000), choose(30, 100), 1


def append_line(folder, number):
    """Write the number into the file of this process."""
    with open(folder / str(os.getpid()), "a") as file:
        file.write(f"{number}\n")
    time.sleep(0.003)
    return number


def kill_at_random(folder, is_over, kills):
    """Kill one of the ranks that have begun an item at a random time, again and again."""
    rng = random.Random(SEED)
    while len(kills) < KILLS and not is_over.wait(rng.uniform(0, 0.1)):
        pids = sorted({int(path.name) for path in folder.iterdir()} - set(kills))
        if pids:
            kills.append(rng.choice(pids))
            os.kill(kills[-1], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
def test_ranks_are_killed_at_random(ordered, tmp_path: Path):
    is_over, kills = threading.Event(), []
    killer = threading.Thread(target=kill_at_random, args=(tmp_path, is_over, kills))
    killer.start()
    outcomes = {}
    try:
        values = mpwatch.map(
            partial(append_line, tmp_path), range(ITEMS), 4, ordered=ordered, on_error="yield", progress=False
        )
        for index, outcome in enumerate(values) if ordered else values:
            assert index not in outcomes
            outcomes[index] = outcome
    finally:
        is_over.set()
        killer.join()
    assert outcomes.keys() == set(range(ITEMS))
    failed = {index for index, outcome in outcomes.items() if isinstance(outcome, ItemFailure)}
    assert all(outcomes[index] == index for index in outcomes.keys() - failed)
    assert all(outcomes[index].failure.signal == signal.SIGKILL for index in failed)
    done = sorted(int(line) for path in tmp_path.iterdir() for line in path.read_text().split())
    assert len(done) == len(set(done))  # no item was begun twice
    assert set(range(ITEMS)) - failed <= set(done)
    assert len(kills) == KILLS

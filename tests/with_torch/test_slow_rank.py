"""A rank for which the others wait in the collectives of a training is named while the run goes on."""

import json
import random
import re
import time

import pytest
import torch
import torch.distributed as dist

import mpwatch
from mpwatch.events import SlowRank

STEPS = 60


def of_kind(kind, events):
    return [event for event in events if isinstance(event, kind)]


def list_warnings(caplog):
    return [text for text in caplog.messages if "waiting" in text]


def load(seconds):
    time.sleep(seconds)


def train(slow_rank, slow_steps, jitter):
    rng = random.Random(dist.get_rank())
    for step in range(STEPS):
        is_slow = dist.get_rank() == slow_rank and step < slow_steps
        load(0.01 + rng.uniform(0.0, jitter) + (0.05 if is_slow else 0.0))
        dist.all_reduce(torch.ones(16))


def run(nprocs, *args, stall_after=0.4, **options):
    return mpwatch.run(train, nprocs, args=args, backend=mpwatch.Backend("gloo", stall_after=stall_after), **options)


@pytest.mark.parametrize("nprocs", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_slow_rank_is_named_once(nprocs, caplog):
    result = run(nprocs, 1, STEPS, 0.01)
    late = result.slow_rank
    assert late.rank == 1
    assert 0.2 < late.share < 1
    assert late.place.endswith(" in load")
    assert re.match(r'  File ".*test_slow_rank.py", line \d+ in load\n  File .*, line \d+ in train\n', late.stack)
    (event,) = of_kind(SlowRank, result.events)
    assert event.ranks == (1,)
    assert event.lateness.place == late.place
    (warning,) = list_warnings(caplog)
    assert re.search(r": rank 1 kept the others waiting for \d+ % of the time \(.* in load\)$", warning)
    assert json.loads(result.to_json())["slow_rank"]["rank"] == 1


def fail_at_the_end(*args):
    train(*args)
    raise ValueError(dist.get_rank())


def test_the_report_of_a_failure_has_the_slow_rank():
    with pytest.raises(
        mpwatch.RunFailedError, match=r"\n  before that, rank 1 kept the others waiting for \d+ % of the time"
    ):
        mpwatch.run(fail_at_the_end, 2, args=(1, STEPS, 0.01), backend=mpwatch.Backend("gloo", stall_after=0.4))


@pytest.mark.parametrize(
    ("slow_steps", "options"),
    [(0, {}), (5, {}), pytest.param(STEPS, {"stall_after": None}, marks=pytest.mark.slow)],
    ids=["sound", "slow at the beginning", "not checked"],
)
def test_nobody_is_named(slow_steps, options, caplog):
    result = run(2, 1, slow_steps, 0.03, **options)
    assert result.slow_rank is None
    assert not of_kind(SlowRank, result.events)
    assert not list_warnings(caplog)

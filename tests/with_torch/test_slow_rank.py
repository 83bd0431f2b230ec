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

STEPS = 40


def load(seconds):
    time.sleep(seconds)


def train(slow_rank, slow_steps, *, fails=False):
    rng = random.Random(dist.get_rank())
    for step in range(STEPS):
        is_slow = dist.get_rank() == slow_rank and step < slow_steps
        load(0.01 + rng.uniform(0.0, 0.02) + (0.05 if is_slow else 0.0))
        dist.all_reduce(torch.ones(16))
    if fails:
        raise ValueError(dist.get_rank())


def run(nprocs, *args, stall_after=0.4, **kwargs):
    return mpwatch.run(train, nprocs, args=args, kwargs=kwargs, backend=mpwatch.Backend("gloo", stall_after=stall_after))


def list_slow_ranks(result):
    return [event for event in result.events if isinstance(event, SlowRank)]


def list_warnings(caplog):
    return [text for text in caplog.messages if "waiting" in text]


@pytest.mark.parametrize("nprocs", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_slow_rank_is_named_once_while_the_run_goes_on_and_in_the_report_of_its_failure(nprocs, caplog):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        run(nprocs, 1, STEPS, fails=True)
    result = caught.value.result
    late = result.slow_rank
    assert late.rank == 1
    assert 0.2 < late.share < 1
    assert late.place.endswith(" in load")
    assert re.match(r'  File ".*test_slow_rank.py", line \d+ in load\n  File .*, line \d+ in train\n', late.stack)
    (event,) = list_slow_ranks(result)
    assert (event.ranks, event.lateness.place) == ((1,), late.place)
    assert all(event.time >= result.events[0].time for event in result.events)  # also of CollectivesRecorded
    sentence = r"rank 1 kept the others waiting for \d+ % of the time \(.* in load\)"
    (warning,) = list_warnings(caplog)
    assert re.search(rf": {sentence}$", warning)
    assert re.search(rf"^  before that, {sentence}$", str(caught.value), re.MULTILINE)
    assert json.loads(result.to_json())["slow_rank"]["rank"] == 1


@pytest.mark.parametrize("stall_after", [0.4, pytest.param(None, marks=pytest.mark.slow)], ids=["checked", "not checked"])
def test_nobody_is_named_for_a_slow_beginning_or_without_checks(stall_after, caplog):
    result = run(2, 1, 5 if stall_after else STEPS, stall_after=stall_after)
    assert (result.slow_rank, list_slow_ranks(result), list_warnings(caplog)) == (None, [], [])

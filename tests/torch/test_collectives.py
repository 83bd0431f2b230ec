"""Real ranks that hang in real collectives: the one that is not there is to blame."""

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import mpwatch
from mpwatch import FailureKind

pytestmark = pytest.mark.usefixtures("_wait_for_all_stacks")


def is_not_there():
    time.sleep(60)


def is_in_another_one():
    dist.broadcast(torch.ones(1), src=0)


def validates_in_peace():
    while True:
        mpwatch.heartbeat()
        time.sleep(0.01)


def train(diversion):
    for step in range(10):
        mpwatch.report(step=step, total=10)
        if dist.get_rank() == 1 and step == 3:
            diversion()
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("diversion", "words"),
    [
        (
            is_not_there,
            r"was silent for [\d.]+ s \(heartbeat_timeout=1\), at step 3 of 10: still at work \(.* in is_not_there",
        ),
        (is_in_another_one, r"was silent .*: still at work in broadcast \(.* in is_in_another_one"),
        (validates_in_peace, r"kept its peers waiting: still at work \(.* in validates_in_peace"),
    ],
)
def test_the_rank_that_is_missing_is_blamed(diversion, words):
    with pytest.raises(mpwatch.RunFailedError, match=f"^rank 1 {words}") as failed:
        mpwatch.run(train, 3, args=(diversion,), backend="gloo", heartbeat_timeout=1.0, grace_period=0.5)
    assert {rank: failure.kind for rank, failure in failed.value.failures.items()} == dict.fromkeys(
        range(3), FailureKind.HANG
    )
    assert [failure.is_secondary for _, failure in sorted(failed.value.failures.items())] == [True, False, True]
    assert "  ranks 0, 2: a victim of rank 1: was silent for " in str(failed.value)
    assert "still at work in all_reduce (test_collectives.py" in str(failed.value)


def train_in_parallel():
    """The others wait for its gradients, or for its buffers, in C++ that autograd or DistributedDataParallel calls."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for step in range(10):
        mpwatch.report(step=step)
        if dist.get_rank() == 1 and step == 3:
            is_not_there()
        model(torch.ones(2, 4)).sum().backward()


def test_the_rank_whose_gradients_do_not_come_is_blamed():
    with pytest.raises(mpwatch.RunFailedError, match=r"^rank 1 was silent for .* in is_not_there") as failed:
        mpwatch.run(train_in_parallel, 3, backend="gloo", heartbeat_timeout=1.0, grace_period=0.5)
    assert [failure.is_secondary for _, failure in sorted(failed.value.failures.items())] == [True, False, True]

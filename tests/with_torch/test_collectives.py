"""Ranks hang in real collectives. The rank that is missing from the collective is the root cause."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpwatch
from mpwatch import FailureKind

pytestmark = pytest.mark.usefixtures("_wait_for_all_stacks")


def sleeps():
    time.sleep(60)


def joins_another_collective():
    dist.broadcast(torch.ones(1), src=0)


def sends_heartbeats_only():
    while True:
        mpwatch.heartbeat()
        time.sleep(0.01)


def train(diversion):
    for step in range(10):
        mpwatch.report(step=step, total=10)
        if dist.get_rank() == 1 and step == 3:
            diversion()
        dist.all_reduce(torch.ones(1))


HAS_NOT_JOINED = (
    r"has not joined all_reduce #4 \(float32\[1\], default group\), in which ranks 0, 2 wait \(.* in train\); its "
    r"last collective was all_reduce #3: still at work "
)


@pytest.mark.parametrize(
    ("diversion", "text"),
    [
        pytest.param(
            sleeps,
            rf"was silent for [\d.]+ s \(heartbeat_timeout=1\), at step 3 of 10; it {HAS_NOT_JOINED}\(.* in sleeps",
            marks=pytest.mark.slow,
        ),
        (sends_heartbeats_only, rf"{HAS_NOT_JOINED}\(.* in sends_heartbeats_only"),
    ],
)
def test_the_rank_that_is_missing_from_a_collective_is_the_root_cause(diversion, text):
    with pytest.raises(mpwatch.RunFailedError, match=f"^rank 1 {text}") as failed:
        mpwatch.run(train, 3, args=(diversion,), backend="gloo", heartbeat_timeout=1.0, grace_period=0.5)
    assert {rank: failure.kind for rank, failure in failed.value.result.failures.items()} == dict.fromkeys(
        range(3), FailureKind.HANG
    )
    assert [failure.is_secondary for _, failure in sorted(failed.value.result.failures.items())] == [True, False, True]
    others = r"ranks 0, 2: victims of rank 1: waited in all_reduce \(test_collectives.py:.*\), silent for [\d.]+ s at step 3 of 10"
    assert re.fullmatch(others, "\n".join(failed.value.result.fates))


@pytest.mark.slow
def test_a_rank_in_another_collective_does_not_fit():
    with pytest.raises(mpwatch.RunFailedError, match=r"^rank 1 called broadcast #4 with float32\[1\] ") as failed:
        mpwatch.run(train, 3, args=(joins_another_collective,), backend="gloo", heartbeat_timeout=1.0, grace_period=0.5)
    assert (failed.value.root_cause.kind, failed.value.root_cause.exit_code) == (FailureKind.MISMATCH, 1)
    assert "  ranks 0, 2: stopped by the watcher in all_reduce (test_collectives.py" in str(failed.value)


def train_in_parallel():
    """Let ranks 0 and 2 wait for gradients or buffers of rank 1, in C++ that autograd or DistributedDataParallel calls."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for step in range(10):
        mpwatch.report(step=step)
        if dist.get_rank() == 1 and step == 3:
            sleeps()
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.slow
def test_the_rank_that_sends_no_gradients_is_the_root_cause():
    with pytest.raises(mpwatch.RunFailedError, match=r"^rank 1 was silent for .* in sleeps") as failed:
        mpwatch.run(train_in_parallel, 3, backend="gloo", heartbeat_timeout=1.0, grace_period=0.5)
    assert [failure.is_secondary for _, failure in sorted(failed.value.result.failures.items())] == [True, False, True]

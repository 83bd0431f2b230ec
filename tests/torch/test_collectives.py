"""Real ranks that hang in real collectives: the one that is not there is to blame."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import mpwatch
from mpwatch import FailureKind

pytestmark = pytest.mark.usefixtures("_patient")


def is_not_there():
    time.sleep(60)


def is_suspended():
    os.kill(os.getpid(), signal.SIGSTOP)


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
            r"was silent for [\d.]+ s \(heartbeat_timeout=0.5\), at step 3 of 10: still at work \(.* in is_not_there",
        ),
        (is_suspended, r"was silent .*: still at work \(suspended, by SIGSTOP or SIGTSTP\)"),
        (is_in_another_one, r"was silent .*: still at work in broadcast \(.* in is_in_another_one"),
        (validates_in_peace, r"kept its peers waiting: still at work \(.* in validates_in_peace"),
    ],
)
def test_the_rank_that_is_missing_is_blamed(diversion, words):
    with pytest.raises(mpwatch.RunFailedError, match=f"^rank 1 {words}") as failed:
        mpwatch.run(train, 3, args=(diversion,), backend="gloo", heartbeat_timeout=0.5, grace_period=0.5)
    assert {rank: failure.kind for rank, failure in failed.value.failures.items()} == dict.fromkeys(
        range(3), FailureKind.HANG
    )
    assert [failure.is_secondary for _, failure in sorted(failed.value.failures.items())] == [True, False, True]
    assert "a victim of rank 1: was silent for 0.5" in str(failed.value)
    assert "still at work in all_reduce (test_collectives.py" in str(failed.value)

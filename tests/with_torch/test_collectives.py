"""Ranks hang or crash in real collectives. The rank that is missing from the collective is the root cause."""

import datetime
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import mpwatch
from mpwatch import CollectiveState, FailureKind


def wait_without_end():
    threading.Event().wait()


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
            wait_without_end,
            rf"was silent for [\d.]+ s \(.*=1\), at step 3 of 10; it {HAS_NOT_JOINED}in wait",
            marks=pytest.mark.slow,
        ),
        (sends_heartbeats_only, rf"{HAS_NOT_JOINED}\(.* in sends_heartbeats_only"),
    ],
)
def test_the_rank_that_is_missing_from_a_collective_is_the_root_cause(diversion, text):
    with pytest.raises(mpwatch.RunFailedError, match=f"^rank 1 {text}") as failed:
        mpwatch.run(train, 3, args=(diversion,), backend="gloo", heartbeat_timeout=1.0, grace_period=0.5)
    failures = [failure for _, failure in sorted(failed.value.result.failures.items())]
    assert [failure.kind for failure in failures] == [FailureKind.HANG] * 3
    assert [failure.is_secondary for failure in failures] == [True, False, True]
    others = r"ranks 0, 2: victims of rank 1: waited in all_reduce \(test_collectives.py:.*\), silent for [\d.]+ s at step 3 of 10"
    assert re.fullmatch(others, "\n".join(failed.value.result.fates))


def hangs_on_rank_1():
    dist.init_process_group("gloo")
    dist.barrier()  # all ranks have joined before the timeout is set: that may take long on a busy machine
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1.5), None)
    if dist.get_rank() == 1:
        wait_without_end()
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_the_rank_that_keeps_its_peers_waiting_until_gloo_gives_up_is_the_root_cause():
    verdict = r"has not joined all_reduce #2 \(.*; its last collective was barrier #1: still at work in wait \("
    with pytest.raises(mpwatch.RunFailedError, match=f"^rank 1 {verdict}") as caught:
        mpwatch.run(hangs_on_rank_1, 2)
    root = caught.value.root_cause
    assert (root.rank, root.kind, root.is_secondary) == (1, FailureKind.HANG, False)
    _, other = str(caught.value).splitlines()
    assert " of rank 1: RuntimeError" in other or "stopped by the watcher" in other


# ---- What is known of the collectives


def wait_in_calls():
    """Rank 0 broadcasts from rank 2, and the others reduce to rank 1. They wait until the timeout."""
    pair = dist.new_group([0, 1], group_desc="pair")
    rank = dist.get_rank()
    if rank == 2:
        wait_without_end()
    if rank == 0:
        dist.broadcast(torch.ones(2, 3, dtype=torch.int64), src=2)
    else:
        dist.reduce(torch.ones(4), 0, dist.ReduceOp.MAX, group=pair)


FIRST_VERDICT = "rank 2 has not joined broadcast #1 (int64[2, 3], default group), in which rank 0 waits"


def wait_for_verdict(group):
    """Return the first stacks that come with the verdict."""
    while True:
        stacks = group.stacks()
        if FIRST_VERDICT in stacks.verdict and len(stacks) == 3:
            return stacks


def test_the_result_and_stacks_have_the_collectives():
    with mpwatch.WorkerGroup(3, backend="gloo", grace_period=0.5) as group:
        group.run(dist.get_rank)
        with ThreadPoolExecutor(1) as thread, pytest.raises(mpwatch.RunTimeoutError) as failed:
            stacks = thread.submit(wait_for_verdict, group)
            group.run(wait_in_calls, timeout=4.0)
    found = failed.value.result.collectives
    first, second = found[0], found[1]
    assert (first.name, first.sequence, first.group, first.ranks, first.root) == ("broadcast", 1, "default", (0, 1, 2), 2)
    assert (first.input_shapes, first.input_dtypes) == (((2, 3),), ("int64",))
    assert re.fullmatch(r"test_collectives\.py:\d+ in wait_in_calls", first.place)
    assert (second.name, second.group, second.ranks) == ("reduce", "1 (pair)", (0, 1))
    assert (second.root, second.reduce_op) == (0, "MAX")
    assert {first.state, second.state} == {CollectiveState.WAITING}
    assert 2 not in found
    assert FIRST_VERDICT in str(failed.value)
    assert stacks.result().collectives[0] == first
    assert str(stacks.result()).splitlines()[-1] == stacks.result().verdict

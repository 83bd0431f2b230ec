"""The process group of a WorkerGroup whose ranks fail, and of calls of some ranks. See also test_torch.py."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

import mpwatch
from mpwatch import WorkerGroup


def sum_over_ranks(value=1):
    """Return a sum over all ranks, and whether the process group is that of the previous call."""
    tensor = torch.tensor([float(value * (dist.get_rank() + 1))])
    dist.all_reduce(tensor)
    state = mpwatch.current_worker().state
    previous, state["group"] = state.get("group"), dist.group.WORLD
    return int(tensor.item()), previous is dist.group.WORLD


def raise_on_rank_1(*, others_wait=False):
    if dist.get_rank() == 1:
        raise ValueError("bad")
    if others_wait:
        dist.barrier()


@pytest.mark.slow
def test_ranks_that_wait_in_a_collective_for_one_that_raises_are_restarted_with_a_new_process_group():
    with WorkerGroup(2, backend="gloo") as group:
        assert list(group.run(sum_over_ranks)) == [(3, False)] * 2
        with pytest.raises(mpwatch.RunFailedError) as caught:
            group.run(raise_on_rank_1, kwargs={"others_wait": True})
        assert str(caught.value.__cause__) == "bad"
        assert list(group.run(sum_over_ranks)) == [(3, False)] * 2
        assert [worker.restart_count for worker in group.workers] == [1, 1]


def get_size_and_rank():
    return dist.get_world_size(), dist.get_rank()


def send_to_1():
    dist.send(torch.ones(1), 1)


def receive_from_0():
    tensor = torch.zeros(1)
    dist.recv(tensor, 0)
    return tensor.item()


@pytest.mark.slow
def test_some_ranks_have_the_process_group_of_all():
    """All ranks make it before the first call of some ranks, and again if a rank was lost."""
    with WorkerGroup(2, backend="gloo") as group:
        sender, receiver = group.submit(send_to_1, ranks=0), group.submit(receive_from_0, ranks=1)  # at the same time
        assert dict(receiver.result(60).return_values) == {1: 1.0}
        assert dict(sender.result(60).return_values) == {0: None}
        assert dict(group.run(get_size_and_rank, ranks=1).return_values) == {1: (2, 1)}
        failing, *handles = [
            group.submit(raise_on_rank_1, ranks=1),
            *(group.submit(get_size_and_rank, ranks=rank) for rank in (0, 1, 0)),
        ]
        with pytest.raises(mpwatch.RunFailedError, match="bad"):
            failing.result(60)
        assert [list(handle.result(60).values()) for handle in handles] == [[(2, 0)], [(2, 1)], [(2, 0)]]
        assert list(group.run(sum_over_ranks)) == [(3, False)] * 2
        with pytest.raises(mpwatch.RunFailedError, match="bad"):
            group.run(raise_on_rank_1, ranks=1)
        assert list(group.run(sum_over_ranks)) == [(3, True)] * 2
        with pytest.raises(mpwatch.RunFailedError, match="SIGKILL"):
            group.run(lambda: os.kill(os.getpid(), signal.SIGKILL), ranks=1)
        assert dict(group.run(get_size_and_rank, ranks=0).return_values) == {0: (2, 0)}

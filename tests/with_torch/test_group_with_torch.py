"""The ranks of a WorkerGroup keep their torch process group from call to call."""

import pytest

import mpwatch
from mpwatch import WorkerGroup
from support import functions


def sum_over_ranks(value=1):
    """Return a sum over all ranks, and whether the process group is that of the previous call."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([float(value * (functions.rank() + 1))])
    dist.all_reduce(tensor)
    state = mpwatch.current_worker().state
    previous, state["group"] = state.get("group"), dist.group.WORLD
    return int(tensor.item()), previous is dist.group.WORLD


def raise_on_rank_1():
    if functions.rank() == 1:
        raise ValueError("bad")


def destroy_group():
    import torch.distributed as dist

    dist.destroy_process_group()


def raise_while_rank_0_is_in_a_collective():
    import torch.distributed as dist

    if functions.rank() == 1:
        raise ValueError("the others wait")
    dist.barrier()


def test_the_process_group_is_kept_and_replaced_after_a_failure():
    """Ranks that return or raise stay. Ranks that wait in a collective are restarted."""
    with WorkerGroup(2, backend="gloo") as group:
        assert list(group.run(sum_over_ranks)) == [(3, False)] * 2
        assert list(group.run(sum_over_ranks, (2,))) == [(6, True)] * 2
        with pytest.raises(mpwatch.RunFailedError, match="bad"):
            group.run(raise_on_rank_1)
        assert list(group.run(sum_over_ranks)) == [(3, False)] * 2
        for _ in range(10):  # each call makes a new process group. A rank that leaves it at once disturbs no other rank
            group.run(destroy_group)
        assert list(group.run(sum_over_ranks)) == [(3, False)] * 2
        assert [worker.restart_count for worker in group.workers] == [0, 0]

        with pytest.raises(mpwatch.RunFailedError) as caught:
            group.run(raise_while_rank_0_is_in_a_collective)
        assert str(caught.value.__cause__) == "the others wait"
        assert list(group.run(sum_over_ranks)) == [(3, False)] * 2
        assert [worker.restart_count for worker in group.workers] == [1, 1]

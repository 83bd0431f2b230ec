"""A WorkerGroup whose ranks keep a process group of torch from call to call."""

import functions
import pytest

import mpwatch
from mpwatch import WorkerGroup


def total(value=1):
    """Also whether the process group is that of the call before."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([float(value * (functions.rank() + 1))])
    dist.all_reduce(tensor)
    state = mpwatch.current_worker().state
    before, state["group"] = state.get("group"), dist.group.WORLD
    return int(tensor.item()), before is dist.group.WORLD


def raise_in_rank_1():
    if functions.rank() == 1:
        raise ValueError("bad")


def leave_it():
    import torch.distributed as dist

    dist.destroy_process_group()


def test_the_process_group_is_kept_and_made_anew_after_a_failure():
    with WorkerGroup(2, backend="gloo") as group:
        assert list(group.run(total)) == [(3, False)] * 2
        assert list(group.run(total, (2,))) == [(6, True)] * 2
        with pytest.raises(mpwatch.RunFailedError, match="bad"):
            group.run(raise_in_rank_1)
        assert list(group.run(total)) == [(3, False)] * 2
        group.run(leave_it)
        assert list(group.run(total)) == [(3, False)] * 2
        assert [worker.restart_count for worker in group.workers] == [0, 0]


def raise_beside_a_collective():
    import torch.distributed as dist

    if functions.rank() == 1:
        raise ValueError("the others wait")
    dist.barrier()


def test_ranks_that_wait_for_one_that_has_raised_are_started_anew():
    with WorkerGroup(2, backend="gloo") as group:
        with pytest.raises(mpwatch.RunFailedError) as caught:
            group.run(raise_beside_a_collective)
        assert str(caught.value.__cause__) == "the others wait"
        assert list(group.run(total)) == [(3, False)] * 2
        assert [worker.restart_count for worker in group.workers] == [1, 1]

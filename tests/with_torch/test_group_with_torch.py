"""The ranks of a WorkerGroup keep their torch process group from call to call."""

import os
import signal
import threading

import pytest

import mpwatch
from mpwatch import WorkerGroup
from support import functions
from support.process_state import SPAWN


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


class PickledAfterCancel:
    """An object whose pickling ends when its call was cancelled."""

    is_pickling, is_cancelled = threading.Event(), threading.Event()

    def __reduce__(self):
        self.is_pickling.set()
        assert self.is_cancelled.wait(60)
        return str, ()


def test_a_call_that_is_cancelled_while_it_is_pickled_keeps_the_process_group():
    with WorkerGroup(2, backend="gloo") as group:
        assert list(group.run(sum_over_ranks)) == [(3, False)] * 2
        handle = group.submit(len, (PickledAfterCancel(),))
        assert PickledAfterCancel.is_pickling.wait(60)
        assert handle.cancel()
        PickledAfterCancel.is_cancelled.set()
        handle._thread.join(60)
        assert list(group.run(sum_over_ranks, (2,))) == [(6, True)] * 2


def get_process_group_size():
    import torch.distributed as dist

    return dist.get_world_size(), dist.get_rank()


def sum_over_two(ranks):
    """Return a sum over these ranks, with a process group that the ranks keep."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([float(functions.rank())])
    dist.all_reduce(tensor, group=mpwatch.current_worker().state["pairs"][ranks])
    return int(tensor.item())


def make_pairs():
    import torch.distributed as dist

    mpwatch.current_worker().state["pairs"] = {pair: dist.new_group(pair) for pair in ((0, 1), (2, 3))}


def kill_own_process():
    os.kill(os.getpid(), signal.SIGKILL)


def test_some_ranks_have_the_process_group_of_all():
    """All ranks make it before the first call of some ranks, and again if a rank was lost."""
    with WorkerGroup(2, backend="gloo") as group:
        assert dict(group.run(get_process_group_size, ranks=1).return_values) == {1: (2, 1)}
        handles = [
            group.submit(raise_on_rank_1, ranks=1),
            *(group.submit(get_process_group_size, ranks=r) for r in (0, 1, 0)),
        ]
        with pytest.raises(mpwatch.RunFailedError, match="bad"):
            handles[0].result(60)
        assert [list(handle.result(60).values()) for handle in handles[1:]] == [[(2, 0)], [(2, 1)], [(2, 0)]]
        assert list(group.run(sum_over_ranks)) == [(3, False)] * 2
        with pytest.raises(mpwatch.RunFailedError, match="bad"):
            group.run(raise_on_rank_1, ranks=1)
        assert list(group.run(sum_over_ranks)) == [(3, True)] * 2
        with pytest.raises(mpwatch.RunFailedError, match="SIGKILL"):
            group.run(kill_own_process, ranks=1)
        assert dict(group.run(get_process_group_size, ranks=0).return_values) == {0: (2, 0)}


def meet(barrier):
    barrier.wait(60)


def test_calls_that_wait_for_the_process_group_run_at_the_same_time():
    barrier = SPAWN.Barrier(2)
    with WorkerGroup(2, backend="gloo") as group:
        handles = [group.submit(meet, (barrier,), ranks=rank) for rank in range(2)]
        assert [list(handle.result(60).values()) for handle in handles] == [[None], [None]]


@pytest.mark.slow
def test_collectives_of_different_ranks_at_the_same_time():
    with WorkerGroup(4, backend="gloo") as group:
        group.run(make_pairs)
        handles = [group.submit(sum_over_two, (pair,), ranks=pair) for _ in range(25) for pair in ((0, 1), (2, 3))]
        assert [list(handle.result(60).values()) for handle in handles] == [[1, 1], [5, 5]] * 25


def test_a_call_that_lacks_a_rank_in_a_collective_names_it(caplog, eventually):
    with WorkerGroup(3, backend=mpwatch.Backend("gloo", stall_after=0.5)) as group:
        group.run(sum_over_ranks)
        waiting = group.submit(sum_over_ranks, ranks=[0, 1])
        eventually(lambda: "rank 2 has not joined all_reduce #2" in caplog.text, 60)
        group.run(sum_over_ranks, ranks=2)  # late, but it comes
        assert [value for value, _ in waiting.result(60).values()] == [6, 6]

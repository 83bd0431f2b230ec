"""Restarted ranks get a new process group at another port, made by mpwatch or by the function itself."""

import os
from itertools import pairwise
from pathlib import Path

import pytest

import mpwatch
from mpwatch import FailureKind


def fails_twice(folder, *, makes_group):
    """Kill rank 1 in a collective in attempt 0, raise on rank 0 in attempt 1, and return in attempt 2."""
    import torch
    import torch.distributed as dist

    me = mpwatch.current_worker()
    if makes_group:
        dist.init_process_group("gloo", init_method="env://")
    Path(folder, f"{me.restart_count}-{me.rank}").write_text(str(me.master_port))
    pids = [None] * me.world_size
    dist.all_gather_object(pids, os.getpid())
    if (me.restart_count, me.rank) == (0, 0):
        os.kill(pids[1], 9)
    if (me.restart_count, me.rank) == (1, 0):
        raise ValueError("the batch is bad")
    total = torch.tensor(float(me.rank + 1))
    dist.all_reduce(total)
    if makes_group:  # after a failure the group is left open
        dist.destroy_process_group()
    return me.restart_count, float(total)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", None])
def test_collectives_work_after_restarts(backend, tmp_path):
    options = {"backend": backend, "kwargs": {"makes_group": backend is None}, "max_restarts": 2}
    result = mpwatch.run(fails_twice, 2, args=(str(tmp_path),), **options)
    assert list(result) == [(2, 3.0)] * 2
    killed, raised, last = (attempt.root_cause for attempt in result.attempts)
    assert (killed.rank, killed.kind, killed.signal) == (1, FailureKind.SIGNAL, 9)
    assert (raised.rank, raised.summary) == (0, "ValueError: the batch is bad")
    assert last is None
    ports = [{(tmp_path / f"{attempt}-{rank}").read_text() for rank in range(2)} for attempt in range(3)]
    assert [len(of_attempt) for of_attempt in ports] == [1, 1, 1]
    assert all(before != after for before, after in pairwise(ports))


def test_a_rank_that_is_killed_before_it_joins_is_the_root_cause_in_each_attempt():
    def join_without_rank_1():
        if mpwatch.current_worker().rank == 1:
            os.kill(os.getpid(), 9)
        import torch.distributed  # here, since rank 1 does not need it

        torch.distributed.init_process_group("gloo")  # waits for rank 1 in the store

    with pytest.raises(mpwatch.RunFailedError, match=r"^rank 1 was killed by SIGKILL") as caught:
        mpwatch.run(join_without_rank_1, 2, max_restarts=1)
    assert [attempt.root_cause.rank for attempt in caught.value.result.attempts] == [1, 1]

"""Tests of PyTorch-Ignite's `idist` in ranks of mpwatch: in its own process group, and in that of `backend`."""

import pytest

import mpwatch


def in_parallel(backend):
    """Return the arguments that `idist.Parallel` passes to a function, with the data of `idist` there."""
    import ignite.distributed as idist

    calls = []

    def training(local_rank, x, *, y):
        calls.append((local_rank, x, y, *get_idist_info()))

    with idist.Parallel(backend=backend) as parallel:
        parallel.run(training, 1, y=2)
    return calls


def get_idist_info():
    import ignite.distributed as idist

    return idist.get_rank(), idist.get_world_size(), idist.backend(), idist.all_gather(idist.get_rank() * 10)


@pytest.mark.slow
def test_parallel_makes_a_process_group():
    assert list(mpwatch.run(in_parallel, 2, args=("gloo",))) == [
        [(rank, 1, 2, rank, 2, "gloo", [0, 10])] for rank in range(2)
    ]


@pytest.mark.slow
def test_idist_finds_the_process_group_of_backend():
    def use_idist_in_all_ways():
        found = get_idist_info(), in_parallel(None)
        with pytest.raises(ValueError, match="initialize the default process group twice"):
            in_parallel("gloo")
        return found, get_idist_info()

    for rank, found in enumerate(mpwatch.run(use_idist_in_all_ways, 2, backend="gloo")):
        me = (rank, 2, "gloo", [0, 10])
        assert found == ((me, [(rank, 1, 2, *me)]), me)

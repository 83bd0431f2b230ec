"""PyTorch-Ignite's `idist` in ranks of mpwatch: in a process group of its own, and in that of `backend`."""

import pytest

import mpwatch


def in_parallel(backend):
    """What a function hears that `idist.Parallel` calls."""
    import ignite.distributed as idist

    heard = []

    def training(local_rank, x, *, y):
        heard.append((local_rank, x, y, *who_idist_is()))

    with idist.Parallel(backend=backend) as parallel:
        parallel.run(training, 1, y=2)
    return heard


def who_idist_is():
    import ignite.distributed as idist

    return idist.get_rank(), idist.get_world_size(), idist.backend(), idist.all_gather(idist.get_rank() * 10)


def test_parallel_makes_a_process_group():
    assert list(mpwatch.run(in_parallel, 2, args=("gloo",))) == [
        [(rank, 1, 2, rank, 2, "gloo", [0, 10])] for rank in range(2)
    ]


def test_idist_finds_the_process_group_of_backend():
    def all_ways():
        found = who_idist_is(), in_parallel(None)
        with pytest.raises(ValueError, match="initialize the default process group twice"):
            in_parallel("gloo")
        return found, who_idist_is()

    for rank, found in enumerate(mpwatch.run(all_ways, 2, backend="gloo")):
        me = (rank, 2, "gloo", [0, 10])
        assert found == ((me, [(rank, 1, 2, *me)]), me)

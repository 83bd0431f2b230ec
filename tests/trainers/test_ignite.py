"""PyTorch-Ignite's `idist` in ranks of mpwatch: in a process group of its own, and in that of `backend`."""

import pytest

import mpwatch


def run_in_parallel(backend):
    """Return the arguments that `idist.Parallel` passes to a function, with the data of `idist` there."""
    import ignite.distributed as idist

    calls = []

    def training(local_rank, x, *, y):
        ranks = idist.all_gather(idist.get_rank() * 10)
        calls.append((local_rank, x, y, idist.get_rank(), idist.get_world_size(), idist.backend(), ranks))

    with idist.Parallel(backend=backend) as parallel:
        parallel.run(training, 1, y=2)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(("own", "backend"), [("gloo", None), (None, "gloo")])
def test_parallel_makes_a_process_group_or_finds_that_of_backend(own, backend):
    expected = [[(rank, 1, 2, rank, 2, "gloo", [0, 10])] for rank in range(2)]
    assert list(mpwatch.run(run_in_parallel, 2, args=(own,), backend=backend)) == expected

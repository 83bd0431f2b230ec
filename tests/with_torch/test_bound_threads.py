"""The thread pools of torch and NumPy have the size that OMP_NUM_THREADS gives them, and torch compiles with few processes."""

import os

import pytest

import mpwatch

ALLOWED = sorted(os.sched_getaffinity(0))


def get_thread_counts():
    """Return how many threads torch and NumPy use."""
    import numpy  # noqa: F401  it loads its pool
    import threadpoolctl
    import torch

    return torch.get_num_threads(), {pool["num_threads"] for pool in threadpoolctl.threadpool_info()}


def get_compile_threads():
    """Return how many processes torch would start to compile."""
    from torch._inductor import config

    return config.compile_threads


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch):
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_thread_pools_follow_the_cpus_of_the_rank():
    assert mpwatch.run(get_thread_counts, 1, placement=lambda _: ALLOWED[:1])[0] == (1, {1})


@pytest.mark.slow
def test_torch_compiles_with_the_cpus_of_the_rank():
    share = max(1, len(ALLOWED) // 2)
    assert list(mpwatch.run(get_compile_threads, 2)) == [min(32, share)] * 2
    assert list(mpwatch.run(get_compile_threads, 1, placement=lambda _: ALLOWED[:1])) == [1]

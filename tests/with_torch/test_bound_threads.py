"""The thread pools of torch and NumPy have the size that OMP_NUM_THREADS gives them, and torch compiles with few processes."""

import os

import pytest

import mpwatch

ALLOWED = sorted(os.sched_getaffinity(0))


def get_thread_counts():
    """Return how many threads torch and NumPy use, and how many processes torch would start to compile."""
    import numpy  # noqa: F401  it loads its pool
    import threadpoolctl
    import torch
    from torch._inductor import config

    return torch.get_num_threads(), {pool["num_threads"] for pool in threadpoolctl.threadpool_info()}, config.compile_threads


@pytest.mark.slow
def test_thread_pools_and_compilers_follow_the_cpus_of_the_rank(monkeypatch):
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert mpwatch.run(get_thread_counts, 1, placement=lambda _: ALLOWED[:1])[0] == (1, {1}, 1)
    share = max(1, len(ALLOWED) // 2)
    assert [processes for *_, processes in mpwatch.run(get_thread_counts, 2)] == [min(32, share)] * 2

"""Tests on four ranks: `pytest examples/test_shards.py`. The second test has a mistake, and fails in rank 3."""

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpwatch(nprocs=4, backend="gloo")


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(dist.get_rank())
    weights = torch.randn(3)
    dist.broadcast(weights, src=0)
    return weights


def test_ranks_begin_with_the_same_weights(weights):
    found = [torch.empty(3) for _ in range(4)]
    dist.all_gather(found, weights)
    assert all(torch.equal(each, weights) for each in found)


@pytest.mark.parametrize("samples", [1000, 1001])
def test_shards_are_of_one_size(samples):
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = range(samples)[samples * rank // size : samples * (rank + 1) // size]
    print("rank", rank, "has", shard)
    assert len(shard) == samples // size
    total = torch.tensor(len(shard))
    dist.all_reduce(total)
    assert total == samples

"""What a failure looks like: rank 2 meets a bad shard, the others wait for it in a collective."""

import time

import torch
import torch.distributed as dist

import mpwatch


def load(shard: int) -> torch.Tensor:
    """The data of a shard; one of them takes long to read, and is broken."""
    if shard == 2:
        time.sleep(1)
        raise ValueError(f"shard {shard} has 17 columns, not 16")
    return torch.ones(16)


def train() -> float:
    """Sum everybody's data."""
    data = load(dist.get_rank())
    dist.all_reduce(data)
    return float(data.sum())


if __name__ == "__main__":
    mpwatch.main(train, nprocs=4, backend="gloo")

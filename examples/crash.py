"""Show the report of a failure: rank 2 reads a bad shard while the others wait for it in a collective."""

import time

import torch
import torch.distributed as dist

import mpwatch


def load(shard: int) -> torch.Tensor:
    """Return the data of a shard. Shard 2 takes long to read, and is broken."""
    if shard == 2:
        time.sleep(1)
        raise ValueError(f"shard {shard} has 17 columns, not 16")
    return torch.ones(16)


def train() -> float:
    """Return the sum of the data of all ranks."""
    data = load(dist.get_rank())
    dist.all_reduce(data)
    return float(data.sum())


if __name__ == "__main__":
    mpwatch.main(train, nprocs=4, backend="gloo")

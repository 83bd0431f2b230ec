"""A program for a terminal: ranks with gloo that come to breakpoints."""

import torch
import torch.distributed as dist

import mpwatch


def train(steps):
    rank = mpwatch.current_worker().rank
    total = torch.zeros(1)
    for step in range(steps):
        gradient = torch.full((1,), float(rank + step))
        if rank == 2 and step == 3:
            breakpoint()
        dist.all_reduce(gradient)
        total += gradient
    return total.item()


def train_with_torchs_breakpoint():
    weights = torch.ones(2) * mpwatch.current_worker().rank
    dist.breakpoint(rank=1)
    dist.all_reduce(weights)
    return weights.tolist()


if __name__ == "__main__":
    with mpwatch.WorkerGroup(4, backend="gloo") as group:
        print("values:", list(group.run(train, args=(10,))), flush=True)
        print("values:", list(group.run(train_with_torchs_breakpoint)), flush=True)

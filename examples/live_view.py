"""Show the live view: four ranks learn to classify points of two spirals, and report their progress. One is slow."""

import math
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpwatch

TURNS = 3
SLOW_RANK, SLOW_LOADING = 2, 0.02  # seconds


def spirals(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of two interleaved spirals, and for each point the number of its spiral."""
    labels = torch.randint(0, 2, (count,), generator=generator)
    turn = torch.rand(count, generator=generator).sqrt() * TURNS * 2 * math.pi
    angle = turn + labels * math.pi
    noise = 0.2 * torch.randn(count, 2, generator=generator)
    return (torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) + noise) / TURNS, labels


def load(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch. One rank takes long for it, and makes the others wait in each step."""
    if dist.get_rank() == SLOW_RANK:
        time.sleep(SLOW_LOADING)
    return spirals(256, generator)


def train(steps: int) -> float:
    """Train in each rank on random points of its own. Return the last loss."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    net = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        points, labels = load(generator)
        optimizer.zero_grad()
        scores = model(points)
        loss = nn.functional.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        mpwatch.report(step=step + 1, total=steps, loss=loss)
        if rank == 0 and (step + 1) % (steps // 8) == 0:
            accuracy = (scores.argmax(1) == labels).float().mean()
            print(f"after {step + 1} steps {accuracy:.1%} of the points are told apart", flush=True)
    return loss.item()


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    backend = mpwatch.Backend("gloo", stall_after=4)  # so the ranks are compared every second
    mpwatch.run(train, nprocs=4, args=(steps,), backend=backend, progress=True)

"""What ranks do that need torch. Most of it is training: scikit-learn's digits, data-parallel, with a checkpoint after each step. Every rank imports torch.

A step takes the same images whatever the number of ranks is, each rank every so-manieth of them. So the losses of a run are
those of any other, but for rounding where gradients are summed by another number of ranks, or in another order.
"""

import hashlib
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpwatch

from . import tasks

__all__ = [
    "BEAT_SECONDS",
    "HALF",
    "STEPS",
    "keep_digits",
    "meets_all_but_one",
    "trains",
    "trains_and_shows_itself",
    "waits_for_one_that_beats",
]

STEPS = 60
HALF = STEPS // 2
IMAGES = 1500
WAITS_SECONDS = 1.0  # for its peers
BEAT_SECONDS = 0.1
BATCH = 60  # images of all ranks together: 1, 2, 3, 4, 5 and 6 ranks get as many each


def keep_digits(folder):
    """The images for `trains`, in a file: ranks that are given them need not import scikit-learn."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    kept = {"images": torch.tensor(images[:IMAGES], dtype=torch.float32) / 16, "labels": torch.tensor(labels[:IMAGES])}
    torch.save(kept, Path(folder, "digits.pt"))


def trains_and_shows_itself(folder):
    """As `trains`; half-way, and in the first attempt alone, each rank appears on the job's board and waits for its order."""
    return trains(folder, half_way=tasks.obeys)


def trains(folder, half_way=int):
    """From the checkpoint on, if there is one. Returns where it began, the loss of each step, and the weights' digest."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    checkpoint, losses = Path(folder, "checkpoint.pt"), []
    if checkpoint.exists():
        kept = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(kept["net"])
        optimizer.load_state_dict(kept["optimizer"])
        losses = kept["losses"]
    began = len(losses)
    model = DistributedDataParallel(net)
    data = torch.load(Path(folder, "digits.pt"), weights_only=True)
    for step in range(began, STEPS):
        if step == HALF and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            half_way()
        mine = images_of(step)[rank::ranks]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data["images"][mine]), data["labels"][mine])
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
        if rank == 0:
            keep({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, checkpoint)
    return {"began": began, "losses": losses, "weights": digest_of(net)}


def meets_all_but_one(missing):
    """In a collective that gives up soon, to which one rank does not come; in the first attempt alone."""
    impatient = dist.new_group(timeout=timedelta(seconds=WAITS_SECONDS))
    dist.barrier()
    if dist.get_rank() == missing and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        dawdle()
    dist.all_reduce(torch.ones(1), group=impatient)


def waits_for_one_that_beats():
    """Rank 0 does, in a collective; the other one gives signs of life, and does not come."""
    mpwatch.heartbeat()
    if dist.get_rank() == 0:
        dist.barrier()
    while True:
        mpwatch.heartbeat()
        time.sleep(BEAT_SECONDS)


def dawdle():
    while True:
        signal.pause()


def images_of(step):
    """The numbers of a step's images, in an order that is another in each epoch."""
    epoch, batch = divmod(step, IMAGES // BATCH)
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch))
    return order[batch * BATCH : (batch + 1) * BATCH]


def keep(checkpoint, path):
    """All of it or nothing: whoever is killed meanwhile leaves the last one as it was."""
    unfinished = path.with_suffix(".new")
    torch.save(checkpoint, unfinished)
    os.replace(unfinished, path)


def digest_of(net):
    weights = nn.utils.parameters_to_vector(net.parameters()).detach()
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()

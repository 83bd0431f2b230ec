"""The functions of ranks that need torch. Most of them train a model on scikit-learn's digits, data-parallel.

A checkpoint is written after each step. The images of a step do not depend on the number of ranks. So all runs have the same
losses, except for rounding if gradients are summed by another number of ranks or in another order.
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
from nodes import tasks

__all__ = [
    "HALF",
    "HEARTBEAT_SECONDS",
    "STEPS",
    "all_reduce_with_other_shape",
    "all_reduce_without_one",
    "leave_others_waiting",
    "save_digits",
    "train",
    "train_with_order",
    "wait_in_barrier",
]

STEPS = 60
HALF = STEPS // 2
IMAGES = 1500
COLLECTIVE_TIMEOUT = 1.0  # seconds
HEARTBEAT_SECONDS = 0.1
BATCH = 60  # images of all ranks together: 1, 2, 3, 4, 5 and 6 ranks get as many each


def save_digits(folder):
    """Write the images for `train` to a file, so that the ranks need not import scikit-learn."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    saved = {"images": torch.tensor(images[:IMAGES], dtype=torch.float32) / 16, "labels": torch.tensor(labels[:IMAGES])}
    torch.save(saved, Path(folder, "digits.pt"))


def train_with_order(folder):
    """Do as `train`. Half-way through the first attempt, each rank connects to the test and waits for its order."""
    return train(folder, half_way=tasks.follow_order)


def train(folder, half_way=int):
    """Train from the checkpoint on, if there is one. Return the first step, the loss of each step, and a digest of the weights."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    checkpoint, losses = Path(folder, "checkpoint.pt"), []
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        losses = saved["losses"]
    first_step = len(losses)
    model = DistributedDataParallel(net)
    data = torch.load(Path(folder, "digits.pt"), weights_only=True)
    for step in range(first_step, STEPS):
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
            save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, checkpoint)
    return {"first_step": first_step, "losses": losses, "weights": digest_of(net)}


def all_reduce_without_one(missing):
    """Enter a collective with a short timeout. In the first attempt one rank does not enter it."""
    group = dist.new_group(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT))
    dist.barrier()
    if dist.get_rank() == missing and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        hang()
    dist.all_reduce(torch.ones(1), group=group)


def all_reduce_with_other_shape(odd):
    """Let one rank call an all_reduce with another number of elements than the others."""
    dist.barrier()
    dist.all_reduce(torch.ones(17 if dist.get_rank() == odd else 16))
    hang()


def leave_others_waiting(returns):
    """Let rank 0 wait in an all_reduce for rank 1, which returns or works on."""
    dist.broadcast(torch.ones(4), src=0)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(16))
    elif not returns:
        hang()


def wait_in_barrier():
    """Let rank 0 wait in a barrier. The other rank sends heartbeats, and does not enter it."""
    mpwatch.heartbeat()
    if dist.get_rank() == 0:
        dist.barrier()
    while True:
        mpwatch.heartbeat()
        time.sleep(HEARTBEAT_SECONDS)


def hang():
    while True:
        signal.pause()


def images_of(step):
    """Return the indices of a step's images. Each epoch has another order."""
    epoch, batch = divmod(step, IMAGES // BATCH)
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch))
    return order[batch * BATCH : (batch + 1) * BATCH]


def save(checkpoint, path):
    """Replace the checkpoint atomically, so that a killed rank leaves the last one as it was."""
    unfinished = path.with_suffix(".new")
    torch.save(checkpoint, unfinished)
    os.replace(unfinished, path)


def digest_of(net):
    weights = nn.utils.parameters_to_vector(net.parameters()).detach()
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()

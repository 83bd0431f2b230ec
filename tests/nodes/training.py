"""The functions of ranks that need torch."""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

import mpwatch
from nodes import tasks

STEPS = 60
HALF = STEPS // 2


def train(checkpoint):
    """Add the number of ranks in each step. Begin at the checkpoint, and write it after each step.

    Half-way through the first attempt, each rank connects to the test and waits for its order.
    """
    begin, total = torch.load(checkpoint) if os.path.exists(checkpoint) else (0, 0.0)
    for step in range(begin, STEPS):
        if step == HALF and mpwatch.current_worker().restart_count == 0:
            tasks.follow_order()
        one = torch.ones(1)
        dist.all_reduce(one)
        total += float(one)
        if dist.get_rank() == 0:
            torch.save((step + 1, total), f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)  # a killed rank leaves the last one as it was
    return begin, total


def all_reduce_without_one(missing):
    """Enter a collective with a short timeout. In the first attempt one rank does not enter it."""
    group = dist.new_group(timeout=timedelta(seconds=1.0))
    dist.barrier()
    if dist.get_rank() == missing and mpwatch.current_worker().restart_count == 0:
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


def hang():
    while True:
        signal.pause()

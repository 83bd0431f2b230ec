"""Faults in the collectives of one rank, and the functions that run them. Rank 1 is the odd one."""

import random
import time

import torch
import torch.distributed as dist
from torch import nn

ODD_RANK = 1


def other_shape(is_odd):
    dist.all_reduce(torch.ones(17 if is_odd else 16))


def other_operation(is_odd):
    if is_odd:
        dist.broadcast(torch.ones(16), 0)
    else:
        dist.all_reduce(torch.ones(16))


def missing_call(is_odd):
    if not is_odd:
        dist.all_reduce(torch.ones(16))
    dist.broadcast(torch.ones(8), 0)


def other_group(is_odd):
    group = dist.new_group([0, ODD_RANK])
    dist.all_reduce(torch.ones(16), group=group if is_odd else None)


def wrong_root(is_odd):
    dist.broadcast(torch.ones(16), ODD_RANK if is_odd else 0)
    dist.barrier()


def early_return(is_odd):
    if not is_odd:
        dist.all_reduce(torch.ones(16))


def uneven_inputs_of_ddp(is_odd):
    """The odd rank has one batch fewer, and returns while the others reduce their gradients."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    for _ in range(2 if is_odd else 3):
        model(torch.ones(2, 4)).sum().backward()


def uneven_inputs_of_fsdp(is_odd):
    """The odd rank has one batch fewer, and returns while the others gather parameters."""
    from torch.distributed.fsdp import fully_shard  # as long as torch itself: most faults do without

    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    for _ in range(2 if is_odd else 3):
        model(torch.ones(2, 4)).sum().backward()


def run_fault(fault):
    """Run a fault in all ranks, after two collectives without one."""
    for _ in range(2):
        dist.all_reduce(torch.ones(16))
    fault(dist.get_rank() == ODD_RANK)


# --- Sound programs


def load_slowly(seconds):
    """Let one rank come late to a collective."""
    for step in range(3):
        if dist.get_rank() == ODD_RANK and step == 1:
            time.sleep(seconds)
        dist.all_reduce(torch.ones(16))
    return dist.get_rank()


def train_with_delays(seed, longest):
    """Each rank pauses at random. Return the number of ranks that each step has seen."""
    delays = random.Random(seed * 100 + dist.get_rank())
    counts = []
    for _ in range(4):
        time.sleep(delays.uniform(0, longest))
        count = torch.ones(1)
        dist.all_reduce(count)
        counts.append(int(count))
    return counts

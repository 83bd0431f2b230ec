"""Functions whose ranks crash, wait or fork after they have made a process group."""

import ctypes
import faulthandler
import os
import signal
import threading

import torch
import torch.distributed as dist

import mpwatch
from mpwatch.worker import collectives


def rank():
    return mpwatch.current_worker().rank


def join():
    dist.init_process_group("gloo")
    dist.barrier()


def crash(signum):
    """End rank 1 by a signal, with the GIL held, while rank 0 waits for it."""
    join()
    if rank() == 1:
        if signum == signal.SIGSEGV:
            ctypes.pythonapi.PyLong_AsLong(ctypes.c_void_p(1))
        os.abort()
    dist.barrier()


def crash_into(path):
    """Crash with the user's own file for faulthandler."""
    with open(path, "w") as file:
        faulthandler.enable(file)
        join()
        if rank() == 1:
            os.abort()
        dist.barrier()


def crash_in_a_fork():
    """Fork a child that crashes. That is no crash of the rank."""
    join()
    child = os.fork()
    if child == 0:
        os.abort()
    _, status = os.waitpid(child, 0)
    dist.barrier()
    return os.waitstatus_to_exitcode(status)


def get_threads(makes_group):
    if makes_group:
        join()
    return [thread.name for thread in threading.enumerate()], os.environ.get("TORCH_FR_BUFFER_SIZE")


def wait_in_calls():
    """Rank 0 broadcasts from rank 2, and the others reduce to rank 1. They wait until the timeout."""
    pair = dist.new_group([0, 1], group_desc="pair")
    if rank() == 2:
        threading.Event().wait()
    if rank() == 0:
        dist.broadcast(torch.ones(2, 3, dtype=torch.int64), src=2)
    else:
        dist.reduce(torch.ones(4), 0, dist.ReduceOp.MAX, group=pair)


def hold_the_gil():
    """Rank 1 holds the GIL, and cannot answer."""
    join()
    if rank() == 1:
        libc = ctypes.PyDLL(None)
        mutex = ctypes.create_string_buffer(64)
        libc.pthread_mutex_init(mutex, None)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    dist.barrier()


def get_calls_of_two_groups():
    """Return what is known after the first call of a second default group: the calls, the world and the rank in it."""
    dist.all_reduce(torch.ones(2))
    before = collectives.describe_rank()
    dist.destroy_process_group()
    destroyed = collectives.describe_rank()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.broadcast(torch.ones(3), 0)
    answers = before, destroyed, collectives.describe_rank()
    return [
        (answer.world, answer.rank_in_world, [(call.title, call.ranks) for call in answer.collectives]) for answer in answers
    ]


def get_calls_of_groups_with_one_name():
    """Return the calls that are known after a group was made, used, destroyed and made again."""
    join()
    answers = []
    for _ in range(2):
        group = dist.new_group([0], use_local_synchronization=True)
        dist.all_reduce(torch.ones(4), group=group)
        answers.append(collectives.describe_rank())
        dist.destroy_process_group(group)
    return [[(call.title, call.group, call.group_number) for call in answer.collectives] for answer in answers]


def get_calls_of_groups():
    return get_calls_of_groups_with_one_name(), get_calls_of_two_groups()


def close_all():
    """Close the sockets over which this rank answers. gloo's own thread must have ended: it aborts without its descriptors."""
    join()
    dist.barrier()
    dist.destroy_process_group()
    os.closerange(3, 200)
    return rank()

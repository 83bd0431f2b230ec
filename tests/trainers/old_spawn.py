"""A program of a user with torch.multiprocessing: `python old_spawn.py PORT`. It prints its results as JSON."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def fn(rank, a, shared):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", sys.argv[1]
    dist.init_process_group("gloo", rank=rank, world_size=2)
    total = torch.tensor(a * (rank + 1))
    dist.all_reduce(total)
    shared[rank] = rank, a, int(total)
    dist.destroy_process_group()


def fail(rank, what):
    if rank == 1:
        what()
    time.sleep(100)  # until it is stopped


def raise_key_error():
    raise KeyError("lr")


def exit_with_3():
    os._exit(3)


if __name__ == "__main__":
    with mp.Manager() as manager:
        shared = manager.dict()
        context = mp.spawn(fn, args=(5, shared), nprocs=2, join=False)
        while not context.join():
            pass
        results = {"values": list(dict(sorted(shared.items())).values())}
    try:
        mp.start_processes(fail, args=(raise_key_error,), nprocs=2, start_method="fork")
    except mp.ProcessRaisedException as error:
        results["raised"] = str(error), str(error.__cause__)
    try:
        mp.start_processes(fail, args=(exit_with_3,), nprocs=2, start_method="fork")
    except mp.ProcessExitedException as error:
        results["exited"] = error.exit_code
    print(json.dumps(results))

"""Programs that are short of shared memory or of descriptors, for test_shared_memory.py. They print what became of a run."""

import os
from contextlib import suppress

from support.one_run import attempt, leave_descriptors


def fill():
    """Fill /dev/shm. Return a function that empties it: torch does not delete a file that it could not fill."""
    with open("/dev/shm/full", "wb", 0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return empty


def empty():
    for name in os.listdir("/dev/shm"):
        os.unlink(f"/dev/shm/{name}")


def add(tensor):
    tensor += 1
    return float(tensor.sum())


def share_another_tensor():
    import torch

    return torch.zeros(1 << 16).share_memory_()


def use_full_shared_memory():
    import torch

    shared, plain = torch.zeros(1000).share_memory_(), torch.zeros(1 << 18)
    print(attempt(add, 1, args=(shared,), short=fill), float(shared.sum()))
    print(attempt(add, args=(plain,), short=fill))
    print(attempt(share_another_tensor, 1, short=fill))


def pass_thirty_shared_tensors():
    import torch

    tensors = [torch.zeros(1).share_memory_() for _ in range(30)]
    print(attempt(len, args=(tensors,)))
    print(attempt(len, args=(tensors,), short=lambda: leave_descriptors(20)))

"""Programs whose ranks use /dev/shm, for test_shared_memory.py. They print what became of a run, and what is left."""

import os
import resource
import signal
import subprocess
from contextlib import suppress

import mpwatch
from support.one_run import attempt, leave_descriptors

SIZE = 1 << 20


def list_files():
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith("torch_"))


# ---- Workers, such as those of a DataLoader, are killed while they share a tensor


def print_outcome(fn, *args, **options):
    """Run a function in one rank. Print what it returns or raises, and the files that torch has left."""
    try:
        outcome = mpwatch.run(fn, 1, args=args, **options)[0]
    except mpwatch.RunFailedError as error:
        outcome = str(error)
    print(repr((outcome, list_files())))


def die_when_sharing(_=0):
    """Let the kernel kill this process when torch sets the size of a file: it has made the file, and not unlinked it yet."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, SIZE // 2))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it


def die_while_sharing():
    import torch

    die_when_sharing()
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    torch.ones(SIZE, dtype=torch.uint8).share_memory_()


def load_batches(context):
    """Load batches with two DataLoaders whose workers are killed. Return how many files they have left."""
    import torch
    from torch.utils.data import DataLoader

    data = torch.zeros(2, SIZE, dtype=torch.uint8)
    torch.multiprocessing.set_start_method(context, force=True)
    for _ in range(2):
        with suppress(RuntimeError):
            next(iter(DataLoader(data, batch_size=1, num_workers=1, worker_init_fn=die_when_sharing)))
    return len(list_files())


def die_after_worker():
    """Be killed before the dead worker is reaped."""
    import torch

    worker = torch.multiprocessing.get_context("fork").Process(target=die_while_sharing)
    worker.start()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert list_files()
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_first():
    """Be killed, and return the files that are left after the restart."""
    if mpwatch.current_worker().restart_count == 0:
        die_while_sharing()
    return list_files()


def make_files(*pids):
    """Make files as these processes would have left them. Return their names."""
    names = [f"torch_{pid}_1_0" for pid in pids]
    for name in names:
        open(f"/dev/shm/{name}", "xb").close()
    return sorted(names)


def kill_workers(context):
    print_outcome(load_batches, context)


def kill_rank_and_worker():
    print_outcome(die_after_worker)


def restart_a_killed_rank():
    print_outcome(die_at_first, max_restarts=1)


def make_files_of_other_programs():
    """One of the programs runs, and one has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as running:
        print_outcome(make_files, running.pid, ended.pid)


# ---- The host is short of shared memory or of descriptors


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

"""Ranks whose workers are killed while they share a tensor. `watch` runs a function and prints what is left in /dev/shm."""

import os
import resource
import signal
import sys
from contextlib import suppress

import mpwatch

SIZE = 1 << 20
PROGRAMS = []


def watch(name, *args, **options):
    """Run a function of this module in one rank. Print what it returns or raises, and the files that torch has left."""
    try:
        outcome = mpwatch.run(globals()[name], 1, args=args, **options)[0]
    except mpwatch.RunFailedError as error:
        outcome = str(error)
    print(repr((outcome, list_files())))


def watch_with_other_programs():
    """Run a function that makes files in the names of another program that runs, and of one that has ended."""
    import subprocess

    ended = subprocess.Popen(["true"])
    ended.wait()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as running:
        watch("make_files", running.pid, ended.pid)


def list_files(pid=""):
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{pid}"))


def die_when_sharing(_=0):
    """Let the kernel kill this process when torch sets the size of a file: it has made the file, and not unlinked it yet."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, SIZE // 2))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it


def share(strategy="file_descriptor"):
    import torch

    torch.multiprocessing.set_sharing_strategy(strategy)
    torch.ones(SIZE, dtype=torch.uint8).share_memory_()


def die_while_sharing(strategy="file_descriptor"):
    die_when_sharing()
    share(strategy)


def load_batch(context="fork"):
    """Load a batch with a DataLoader whose worker is killed while it shares the batch. Raises RuntimeError."""
    import torch
    from torch.utils.data import DataLoader

    data = torch.zeros(2, SIZE, dtype=torch.uint8)
    torch.multiprocessing.set_start_method(context, force=True)
    for _ in DataLoader(data, batch_size=1, num_workers=1, worker_init_fn=die_when_sharing):
        raise AssertionError("the worker has survived")


def load_batches(count, context="fork"):
    """Survive the deaths of this number of workers. Return how many files they have left so far."""
    for _ in range(count):
        with suppress(RuntimeError):
            load_batch(context)
    return len(list_files())


def die_once():
    """Be killed, and return the files that are left after the restart."""
    if mpwatch.current_worker().restart_count == 0:
        die_while_sharing()
    return list_files()


def watch_restart():
    watch("die_once", max_restarts=1)


def die_after_worker():
    """Be killed before the dead worker is reaped."""
    import torch

    worker = torch.multiprocessing.get_context("fork").Process(target=die_while_sharing)
    worker.start()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert list_files(worker.pid)
    os.kill(os.getpid(), signal.SIGKILL)


def make_files(*pids):
    """Make files as these processes would have left them. Return their names."""
    names = [f"torch_{pid}_1_0" for pid in pids]
    for name in names:
        open(f"/dev/shm/{name}", "xb").close()
    return sorted(names)


def start_program():
    """Start a program that has opened such a file when this returns, and still runs."""
    import subprocess

    code = "import os\nfile = open(f'/dev/shm/torch_{os.getpid()}_1_0', 'xb')\nprint(flush=True)\ninput()"
    PROGRAMS.append(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    PROGRAMS[0].stdout.readline()
    return len(list_files())


def wait_for_torch():
    """Print whether a process has left a file with the strategy file_system, and then those left when torch has removed it."""
    import subprocess

    done = subprocess.run([sys.executable, "-c", f"from {__name__} import *; die_while_sharing('file_system')"], check=False)
    was_left = len(list_files())
    while list_files():
        os.sched_yield()  # torch_shm_manager removes it after two seconds
    print(repr((done.returncode, was_left)))

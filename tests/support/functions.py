"""Functions for ranks that succeed. It must import little: every rank of many tests imports it."""

import os
import signal
import sys
import threading

import mpwatch

VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)


def double(x, plus=0):
    return 2 * x + plus


def rank():
    return mpwatch.current_worker().rank


def get_environment():
    return {name: os.environ.get(name) for name in VARIABLES}


class Adder:
    """A callable object, which has no __name__; its method is a bound method."""

    def __init__(self, term):
        self.term = term

    def __call__(self, x):
        return self.term + x

    def add(self, x):
        return self.term + x


def list_modules():
    return sorted(sys.modules)


def write_rank(array, barrier):
    """Return the array's values, the inodes of its memory, and the descriptors that are open for that memory."""
    array[:] = rank()
    barrier.wait()
    with open("/proc/self/maps") as lines:
        inodes = {line.split()[4] for line in lines if "mpwatch-call" in line}
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return set(array.tolist()), inodes, [link for link in paths if "mpwatch-call" in os.path.realpath(link)]


def exits_with_0():
    sys.exit(0)


def exits_with_none():
    sys.exit()


def leaves_a_thread():
    threading.Thread(target=threading.Event().wait, name="endless prefetcher").start()
    return rank()


def forks_and_both_return():
    return os.fork() == 0


def wait_unless_restarted(restarts):
    if mpwatch.current_worker().restart_count < restarts:
        signal.pause()
    return mpwatch.current_worker().rank, mpwatch.current_worker().restart_count

"""Functions for ranks that succeed. It must import little: every rank of many tests imports it."""

import signal
import sys

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


def wait_unless_restarted(restarts):
    if mpwatch.current_worker().restart_count < restarts:
        signal.pause()
    return mpwatch.current_worker().rank, mpwatch.current_worker().restart_count

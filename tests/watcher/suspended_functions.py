"""Programs for tests that suspend them, and the functions of their ranks. A rank imports this module, so it imports little."""

import os
import signal
import sys

import mpwatch

SPIN = "while True: pass"


def spin(gate):
    """Print the pids of this rank and of a helper. Use a CPU, as the helper does, until the file `gate` exists."""
    helper = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", SPIN], os.environ)
    os.write(1, f"running {os.getpid()} {helper}\n".encode())
    while not os.path.exists(gate):
        mpwatch.report(step=3)
    return mpwatch.current_worker().rank, mpwatch.current_worker().restart_count


# What follows runs in the host program.


def run(gate, options):
    print(*mpwatch.run(spin, 2, args=(gate,), **options), flush=True)


def run_with_own_handler(gate):
    signal.signal(signal.SIGTSTP, lambda *_: print("own handler", flush=True))
    run(gate, {})


def run_that_ignores_ctrl_z(gate):
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    run(gate, {})


def call(gate, options):
    with mpwatch.WorkerGroup(2, **options) as group:
        group.run(os.getpid)
        print(*group.run(spin, (gate,)), flush=True)

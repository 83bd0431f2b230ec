"""Programs for tests that suspend them, and the functions of their ranks. A rank imports this module, so it imports little."""

import os
import signal
import sys
import threading
from functools import partial

import mpwatch

SPIN = "while True: pass"


def spin(gate):
    """Print the pids of this rank and of a helper. Use a CPU, as the helper does, until the file `gate` exists."""
    helper = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", SPIN], os.environ)
    os.write(1, f"running {os.getpid()} {helper}\n".encode())
    while not os.path.exists(gate):
        mpwatch.report(step=3)
    return mpwatch.current_worker().rank, mpwatch.current_worker().restart_count


def spin_when_terminated(gate):
    """As `spin`. At SIGTERM, spin until the file `gate` exists, and then end with status 0."""

    def save(*_):
        os.write(1, b"saving\n")
        while not os.path.exists(gate):
            pass
        os.write(1, b"saved\n")
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    spin(f"{gate} that never exists")


def fail_once_then_spin(gate, failing):
    worker = mpwatch.current_worker()
    if worker.rank in failing and not worker.restart_count:
        raise ConnectionError
    return spin(gate)


def spin_then_fail_once(gate):
    spin(gate)
    if not mpwatch.current_worker().restart_count:
        raise ConnectionError
    return mpwatch.current_worker().rank, mpwatch.current_worker().restart_count


def announce(name, event):
    """An observer: print the name of the event, if it is this one."""
    if event.name == name:
        os.write(1, f"{name}\n".encode())


class SuspendAt:
    """An observer: it suspends this program once, when this event comes."""

    def __init__(self, name):
        self.name = name

    def __call__(self, event):
        if event.name == self.name:
            self.name = ""
            os.kill(os.getpid(), signal.SIGTSTP)


# What follows runs in the host program.


def run(gate, options):
    print(*mpwatch.run(spin, 2, args=(gate,), **options), flush=True)


def run_that_is_terminated(gate, options):
    mpwatch.run(spin_when_terminated, 2, args=(gate,), **options)


def run_that_suspends_itself(gate, event):
    print(*mpwatch.run(spin, 2, args=(gate,), on_event=SuspendAt(event)), flush=True)


def run_with_a_restart(gate, failing, options):
    policy = mpwatch.RestartPolicy(1, **options)
    observer = partial(announce, "restarting")
    result = mpwatch.run(fail_once_then_spin, 2, args=(gate, failing), max_restarts=policy, on_event=observer)
    print(*result, flush=True)


def run_that_fails_later(gate, timeout):
    print(*mpwatch.run(spin_then_fail_once, 2, args=(gate,), timeout=timeout, max_restarts=1), flush=True)


def run_in_a_thread(gate, options):
    thread = threading.Thread(target=run, args=(gate, options))
    thread.start()
    thread.join()


def run_with_own_handler(gate, options):
    signal.signal(signal.SIGTSTP, lambda *_: print("own handler", flush=True))
    run(gate, options)


def run_that_ignores_ctrl_z(gate, options):
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    run(gate, options)


def call(gate, options):
    with mpwatch.WorkerGroup(2, **options) as group:
        group.run(os.getpid)
        print(*group.run(spin, (gate,)), flush=True)

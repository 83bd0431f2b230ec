"""What ranks do that are watched live. A light module: every rank imports it."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import mpwatch


def rank():
    return mpwatch.current_worker().rank


def one_step_then_wait(event, **metrics):
    """Each has come one step further than the one before it."""
    mpwatch.report(step=rank() + 1, total=10, **metrics)
    event.wait()
    mpwatch.report(step=10, total=10, **metrics)
    return rank()


def raises_when_seen(event):
    mpwatch.report(step=1)
    event.wait()
    if rank() == 1:
        raise ValueError("seen")
    threading.Event().wait()


def dies_once_when_seen(event):
    mpwatch.report(step=5 + mpwatch.current_worker().restart_count)
    event.wait()
    if not mpwatch.current_worker().restart_count:
        os.kill(os.getpid(), signal.SIGKILL)


def is_silent_until_seen(event):
    mpwatch.heartbeat()
    event.wait()


def prints_while_it_reports(gate, width):
    """Lines of many lengths, until the gate is closed. Returns how many."""
    count = 0
    with through(gate) as door:
        while is_open(door):
            print(f"<{rank()} {count} {'=' * (count % width)}>", flush=True)
            count += 1
            mpwatch.report(step=count, total=1_000_000, loss=1 / count)
            time.sleep(0.001)  # an emulator of terminals in Python reads no faster
    return count


def waits_at_the_gate(gate, step):
    with through(gate) as door:
        mpwatch.report(step=step, total=8, loss=0.5)
        os.set_blocking(door, True)
        os.read(door, 1)
    mpwatch.report(step=8, total=8, loss=0.25)


@contextmanager
def through(gate):
    """A pipe with a name, or a file: there is nothing to be read, and no end, until it is closed."""
    door = os.open(gate, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield door
    finally:
        os.close(door)


def is_open(door):
    try:
        return bool(os.read(door, 1))
    except BlockingIOError:
        return True

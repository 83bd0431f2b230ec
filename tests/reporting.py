"""What ranks do that are watched live. A light module: every rank imports it."""

import os
import signal
import threading
import time

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
    with open(gate) as door:
        os.set_blocking(door.fileno(), False)
        while is_open(door.fileno()):
            print(f"<{rank()} {count} {'=' * (count % width)}>", flush=True)
            count += 1
            mpwatch.report(step=count, total=1_000_000, loss=1 / count)
            time.sleep(0.001)  # an emulator of terminals in Python reads no faster
    return count


def waits_at_the_gate(gate, step):
    with open(gate) as door:
        mpwatch.report(step=step, total=8, loss=0.5)
        door.read()
    mpwatch.report(step=8, total=8, loss=0.25)


def is_open(fd):
    try:
        return bool(os.read(fd, 1))
    except BlockingIOError:
        return True

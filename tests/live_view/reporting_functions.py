"""Functions for ranks in tests of the live view, and a program that calls them. A light module: every rank imports it."""

import os
import time
from contextlib import contextmanager

import mpwatch
from support.failing import is_killed, rank, wait_to_be_stopped


def report_steps(total):
    for step in range(1, total + 1):
        mpwatch.report(step=step, total=total, loss=0.5)


def report_and_raise():
    mpwatch.report(step=1)
    if rank() == 1:
        raise ValueError("seen")
    wait_to_be_stopped()


def report_and_die_once():
    attempt = mpwatch.current_worker().restart_count
    mpwatch.report(step=5 + attempt)
    if not attempt:
        is_killed()


def print_and_report(fifo, width):
    """Print lines of different lengths until the FIFO is closed. Return how many."""
    count = 0
    with open_fifo(fifo) as fd:
        while has_writer(fd):
            print(f"<{rank()} {count} {'=' * (count % width)}>", flush=True)
            count += 1
            mpwatch.report(step=count, total=1_000_000, loss=1 / count)
            time.sleep(0.001)  # the terminal emulator of the tests reads no faster
    return count


def report_and_wait_for_fifo(fifo, step):
    mpwatch.report(step=step, total=8, loss=0.5)
    wait_for_fifo(fifo)
    mpwatch.report(step=8, total=8, loss=0.25)


@contextmanager
def open_fifo(fifo):
    """Open a FIFO for reading. Reading it blocks until the test closes the FIFO's writing end. A file ends at once."""
    fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def wait_for_fifo(fifo):
    with open_fifo(fifo) as fd:
        os.set_blocking(fd, True)
        os.read(fd, 1)


def has_writer(fd):
    try:
        return bool(os.read(fd, 1))
    except BlockingIOError:
        return True


def main(function, args, options):
    print("before")
    print("after", *mpwatch.run(globals()[function], 2, args=args, grace_period=5, **options))

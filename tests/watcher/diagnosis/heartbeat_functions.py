"""Functions for ranks that report, send heartbeats, and stop sending them. A rank imports this module, so it imports little."""

import ctypes
import os
import signal
import time

import mpwatch
from support.failing import is_killed, rank, wait_to_be_stopped


def report_steps(has_reported):
    for step in range(3):
        mpwatch.report(step=step, total=3, loss=1 / (step + 1), ready=True)
    if rank() == 0:
        has_reported.set()
        wait_to_be_stopped()
    mpwatch.report(step=7)
    has_reported.wait()
    is_killed()


def beat_until(condition):
    while not condition():
        mpwatch.heartbeat()
        time.sleep(0.01)


def stop_heartbeats_in_three_ways(barrier):
    """Send a heartbeat from each rank. Then only rank 0 goes on with heartbeats."""
    mpwatch.heartbeat()
    barrier.wait()
    {0: beat_forever, 1: wait_to_be_stopped, 2: hold_the_gil, 3: lambda: os.kill(os.getpid(), signal.SIGSTOP)}[rank()]()


def beat_forever():
    beat_until(lambda: False)


def hold_the_gil():
    ctypes.PyDLL(None).usleep(60_000_000)


class SlowToPickle:
    def __reduce__(self):
        signal.sigtimedwait([], 0.6)  # longer than the limit; no heartbeat is sent here
        return str, ("at last",)


def have_no_limit():
    """Rank 0 has returned when it is silent, and rank 1 has never sent a heartbeat."""
    if rank() == 0:
        mpwatch.heartbeat()
        return SlowToPickle()
    signal.sigtimedwait([], 0.6)
    return "never"


def beat_in_a_fork():
    mpwatch.heartbeat()
    if os.fork() == 0:
        beat_forever()
    wait_to_be_stopped()


def beat_until_sigusr1():
    received = []
    signal.signal(signal.SIGUSR1, lambda *_: received.append(True))
    mpwatch.heartbeat()
    os.write(1, f"{os.getpid()}\n".encode())
    beat_until(lambda: received)
    return True


def run_until_sigusr1():
    print(list(mpwatch.run(beat_until_sigusr1, 2, heartbeat_timeout=1.0)))

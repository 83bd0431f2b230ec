"""Functions for ranks that send heartbeats, and stop sending them."""

import ctypes
import os
import signal
import time

import mpwatch
from support.failing import rank, wait_to_be_stopped


def sends_heartbeats_except_rank_1(saboteur, barrier):
    """Send a heartbeat from each rank. Then rank 1 calls `saboteur`, and the others go on with heartbeats."""
    mpwatch.heartbeat()
    barrier.wait()
    if rank() == 1:
        saboteur()
    while True:
        mpwatch.heartbeat()
        time.sleep(0.01)


def sends_one_heartbeat(barrier):
    mpwatch.heartbeat()
    barrier.wait()
    wait_to_be_stopped()


def stops_its_heartbeats():
    wait_to_be_stopped()


def stops_its_heartbeats_and_holds_the_gil():
    ctypes.PyDLL(None).usleep(60_000_000)


def suspends_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def sends_heartbeats_from_a_fork():
    mpwatch.heartbeat()
    if os.fork() == 0:
        while True:
            mpwatch.heartbeat()
            time.sleep(0.01)
    wait_to_be_stopped()


def sends_heartbeats_until_sigusr1():
    received = []
    signal.signal(signal.SIGUSR1, lambda *_: received.append(True))
    mpwatch.heartbeat()
    os.write(1, f"{os.getpid()}\n".encode())
    while not received:
        mpwatch.heartbeat()
        time.sleep(0.01)
    return True

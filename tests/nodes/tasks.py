"""The functions that ranks run. Every rank imports this module, so it does not import torch.

A rank that runs `follow_order` connects to the test (harness.py), introduces itself, and carries out one order.
"""

import json
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from multiprocessing import connection

import mpwatch
import stop_functions

RANK_SOCKET = "MPWATCH_NODES_BOARD"  # variable with the path of the socket that the test listens on
NODE = "MPWATCH_NODES_NODE"  # and with the name of the node
WORKER_FIELDS = (
    *("rank", "local_rank", "world_size", "local_world_size", "group_rank", "group_world_size"),
    *("role", "role_rank", "role_world_size", "restart_count", "run_id", "master_addr", "master_port"),
)


class RankError(Exception):
    """Raised by a rank whose order is to raise."""


def get_worker_info():
    worker = mpwatch.current_worker()
    known = {name: getattr(worker, name) for name in WORKER_FIELDS}
    return {**known, "node": os.environ[NODE], "environment": dict(os.environ)}


def print_rank():
    print("rank", mpwatch.current_worker().rank)


def follow_order():
    """Connect to the test, and carry out its first order."""
    with socket.socket(socket.AF_UNIX) as rank_socket:
        rank_socket.connect(os.environ[RANK_SOCKET])
        rank_socket.sendall(json.dumps({**get_worker_info(), "pid": os.getpid(), "at": time.monotonic()}).encode() + b"\n")
        with rank_socket.makefile() as orders:
            order, *args = json.loads(orders.readline() or '["abandon"]')
        return ORDERS[order](*args)


def ignore_sigterm(*ranks):
    """Follow an order. These ranks ignore SIGTERM, like a rank that writes a long checkpoint when it comes."""
    if mpwatch.current_worker().rank in ranks:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return follow_order()


def connect_to(address):
    """Connect to rank 0 as soon as it listens."""
    while True:
        try:
            return socket.create_connection(address, timeout=10.0)
        except ConnectionRefusedError:
            os.sched_yield()


def wait_for_rank_0(until=lambda _: signal.pause()):
    """Let all ranks wait for rank 0, each with a connection. They lose it when rank 0 ends. Rank 0 calls `until(links)`."""
    worker = mpwatch.current_worker()
    address = worker.master_addr, worker.master_port
    while worker.rank:
        with suppress(ConnectionRefusedError), connection.Client(address) as link:  # it is about to listen
            link.recv()
        os.sched_yield()
    with connection.Listener(address, backlog=worker.world_size) as listener, ExitStack() as stack:
        until([stack.enter_context(listener.accept()) for _ in range(1, worker.world_size)])


def fail_when_all_have_lost_it(links):
    """Raise on rank 0 when all other ranks have found that their connection is lost."""
    for link in links:
        with socket.socket(fileno=os.dup(link.fileno())) as end:
            end.shutdown(socket.SHUT_WR)
    for link in links:
        with suppress(EOFError):
            link.recv()
    raise_error("failed while connected")


def lose_connection():
    """Let rank 1 be killed, and rank 0 find that the connection between them is lost."""
    worker = mpwatch.current_worker()
    if worker.rank == 1:
        with connect_to((worker.master_addr, worker.master_port)):
            be_killed()
    with socket.create_server(("", worker.master_port)) as server, server.accept()[0] as peer:
        peer.sendall(b"what rank 1 does not read")
        while True:
            peer.recv(1)
            peer.sendall(b"more of it")


def failing_env(worker):
    """For `env`: raise."""
    raise RankError(f"rank {worker.rank} cannot be")


def request_stop():
    """Request a stop from a rank, and stop with the others."""
    assert mpwatch.request_stop()
    return count_steps()


def count_steps(seconds=0.001):
    """Do steps until all ranks stop together. Return the next step."""
    return stop_functions.count_steps(seconds=seconds)


def ignore_stop():
    """Ask once, and do not return when all ranks stop."""
    mpwatch.should_stop(0)
    signal.pause()


def raise_error(text):
    raise RankError(text)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


ORDERS = {
    "return": lambda value=None: value,
    "raise": raise_error,
    "count_steps": count_steps,
    "request_stop": request_stop,
    "ignore_stop": ignore_stop,
    "exit": sys.exit,
    "wait_for_rank_0": wait_for_rank_0,
    "fail_while_connected": lambda: wait_for_rank_0(until=fail_when_all_have_lost_it),
    "be_killed": be_killed,
    "abandon": lambda: sys.exit("the test has ended without an order for this rank"),
}

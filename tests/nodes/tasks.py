"""What ranks do. A light module: every rank imports it, and none of it needs torch.

A rank that `obeys` appears on the job's board (see harness.py), says who it is, and does what it is told there.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing import connection

import mpwatch

BOARD = "MPWATCH_NODES_BOARD"  # variable with the path of the socket that the test listens on
NODE = "MPWATCH_NODES_NODE"  # and with the name of the node
VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
)
WHO = (
    *("rank", "local_rank", "world_size", "local_world_size", "group_rank", "group_world_size"),
    *("role", "role_rank", "role_world_size", "restart_count", "run_id", "master_addr", "master_port"),
)


class BrokenDownError(Exception):
    """What a rank raises that was told to."""


def who():
    """This rank, as it knows itself, and as its environment says."""
    worker = mpwatch.current_worker()
    known = {name: getattr(worker, name) for name in WHO}
    return {**known, "node": os.environ[NODE], "environment": {name: os.environ.get(name) for name in VARIABLES}}


def obeys():
    """Appear, and do the first thing that the test orders."""
    with socket.socket(socket.AF_UNIX) as board:
        board.connect(os.environ[BOARD])
        board.sendall(json.dumps({**who(), "pid": os.getpid(), "at": time.monotonic()}).encode() + b"\n")
        with board.makefile() as orders:
            order, *args = json.loads(orders.readline() or '["abandon"]')
        return ORDERS[order](*args)


def serves_as_master(of=None):
    """Appear; and rank 0 is where MASTER_ADDR and MASTER_PORT say: the others get through to it, so many or all."""
    worker = mpwatch.current_worker()
    address = worker.master_addr, worker.master_port
    if worker.rank == 0:
        with socket.create_server(("", worker.master_port)) as server:
            for _ in range(1, of or worker.world_size):
                server.accept()[0].close()
        return address
    connection_to(address).close()
    return address


def connection_to(address):
    """To rank 0, as soon as it listens."""
    while True:
        try:
            return socket.create_connection(address, timeout=10.0)
        except ConnectionRefusedError:
            os.sched_yield()


def hold_hands(until=signal.pause):
    """Rank 0 is connected to all others, which wait for it, and have nothing more to wait for when it ends."""
    worker = mpwatch.current_worker()
    address = worker.master_addr, worker.master_port
    while worker.rank:
        with suppress(ConnectionRefusedError), connection.Client(address) as hand:  # it is about to listen
            hand.recv()
        os.sched_yield()
    with connection.Listener(address, backlog=worker.world_size) as listener, ExitStack() as hands:
        for _ in range(1, worker.world_size):
            hands.enter_context(listener.accept())
        until()


def loses_its_peer():
    """Rank 1 is killed, and rank 0 finds that the connection between them is lost."""
    worker = mpwatch.current_worker()
    address = worker.master_addr, worker.master_port
    if worker.rank == 1:
        with connection_to(address):
            be_killed()
    with socket.create_server(("", address[1])) as server, server.accept()[0] as peer:
        peer.sendall(b"what rank 1 does not read")
        while True:
            peer.recv(1)
            peer.sendall(b"more of it")


def reports(step):
    """And returns."""
    mpwatch.report(step=step)


def takes_its_time(worker):
    """As `env`: for as long as what has begun meanwhile resists its end, at the first start alone."""
    if not worker.restart_count:
        time.sleep(1.0)
    return {}


def takes_its_time_again(worker):
    """As `env`: at the second start."""
    if worker.restart_count:
        time.sleep(1.0)
    return {}


def breaks_down_again(worker):
    """As `env`: at the second start."""
    return breaks_down(worker) if worker.restart_count else {}


def breaks_down(worker):
    """As `env`."""
    raise BrokenDownError(f"rank {worker.rank} cannot be")


def fails_first_time():
    """Rank 1 does, as soon as rank 0 resists its end."""
    worker = mpwatch.current_worker()
    if worker.restart_count or worker.rank > 1:
        return
    if worker.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serves_as_master(of=2)
    if worker.rank == 1:
        raise BrokenDownError("once")
    while True:
        signal.pause()


def another():
    """For a node that is told to call something else than the others."""
    return obeys()


def leaves_a_daemon():
    """In a session of its own, where no watcher looks. Returns its pid."""
    lasting = [sys.executable, "-c", "import signal; signal.pause()"]
    return os.posix_spawn(sys.executable, lasting, os.environ, setsid=True)


def leaves_a_thread():
    """In the node's own process."""
    threading.Thread(target=signal.pause, name="forgotten", daemon=True).start()


def break_down(text):
    raise BrokenDownError(text)


def be_killed(number=signal.SIGKILL):
    os.kill(os.getpid(), number)


ORDERS = {
    "return": lambda value=None: value,
    "raise": break_down,
    "exit": sys.exit,
    "hold_hands": hold_hands,
    "let_go": lambda: hold_hands(until=lambda: break_down("let go")),
    "be_killed": be_killed,
    "abandon": lambda: sys.exit("the test has ended without an order for this rank"),
}

"""Strangers at the port of the coordinator, while a job begins and runs: they change nothing but lines in the log."""

import json
import os
import socket
from contextlib import ExitStack, closing, suppress

from nodes.harness import NODE_TIMEOUT

MANY = 300  # connections; each of them is a descriptor of the node, too
GREETING = b"mpwatch/1 " + b"0" * 32 + b" --------\n"
MAX_STRANGERS = 64  # as docs/explanation/security.md says
NODE_OF_ANOTHER_JOB = {
    "kind": "NodeInfo",
    **dict.fromkeys(("run_id", "hostname", "address", "role"), "other"),
    **dict.fromkeys(("port", "nprocs"), 1),
    **dict.fromkeys(("grace_period", "join_timeout"), 1.0),
    **dict.fromkeys(("rank", "seconds_left")),
    "is_host": False,
    "options": {},
}


def send(job, *pieces):
    """Connect, send each piece, and return the connection."""
    connection = socket.create_connection(("127.0.0.1", job.port), NODE_TIMEOUT)
    with suppress(ConnectionError):
        for piece in pieces:
            connection.sendall(piece)
    return connection


def attack(job, stack):
    """The first one is read before the others push it out."""
    with closing(send(job, b"GET / HTTP/1.1\r\n\r\n")) as connection, suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    keep = lambda *pieces: stack.enter_context(closing(send(job, *pieces)))  # noqa: E731
    keep(GREETING, b"\xff" * 100)
    keep(GREETING, b"\0\0\x10\0half a frame")
    keep(GREETING, b"\0\0\0\x02{}", b"\0\0\0\x02[]", b"\0\0\0\x0enot JSON at all")
    keep(GREETING[:20])  # and no more
    keep(b"\0" * (1 << 20))
    send(job).close()
    for _ in range(MANY):
        keep()


def test_strangers_change_nothing(job):
    job.rendezvous |= {"secret": "of the job", "node_timeout": NODE_TIMEOUT}
    first = job.start()
    with ExitStack() as stack:
        job.await_coordinator()
        attack(job, stack)
        job.start()
        world = job.await_world(2)
        attack(job, stack)
        job.watch_for(1.5 * NODE_TIMEOUT)
        assert [process.ended_at for process in world] == [None, None]
        world.order("return")
        job.results()
    assert "Traceback" not in first.log
    assert "a connection from 127.0.0.1 was refused: " in first.log


def test_refused_nodes_stay_strangers(job):
    """They keep their connections open, but only few of them are kept."""
    job.rendezvous["nnodes"] = 1
    node = job.start()
    world = job.await_world(1)
    body = json.dumps(NODE_OF_ANOTHER_JOB).encode()
    before = len(os.listdir(f"/proc/{node.pid}/fd"))
    with ExitStack() as stack:
        for _ in range(2 * MAX_STRANGERS):
            connection = stack.enter_context(closing(send(job, GREETING, len(body).to_bytes(4) + body)))
            assert b"Refused" in b"".join(iter(lambda: connection.recv(1 << 16), b""))  # noqa: B023  called here
        assert len(os.listdir(f"/proc/{node.pid}/fd")) - before < 1.5 * MAX_STRANGERS
    world.order("return")
    job.results()

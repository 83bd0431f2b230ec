"""What is a complaint about a peer and what is not: real errors of sockets and connections, and texts of libraries."""

import asyncio
import multiprocessing
import os
import socket

import pytest

from mpwatch.watcher.signatures import Complaint, complaint_in
from mpwatch.wire.telling import Telling

GONE, LATE = Complaint.GONE, Complaint.LATE


def complaint_of(fail):
    with pytest.raises(BaseException) as caught:
        fail()
    return complaint_in(Telling(caught.value).plain())


def multiprocessing_peer_is_gone():
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with ours:
        ours.recv()


def multiprocessing_peer_does_not_read():
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with ours:
        ours.send("x")


def socket_is_reset():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        client.sendall(b"unread")
        peer.recv(1)
        peer.close()
        client.recv(1)


def socket_is_broken():
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        ours.sendall(b"x")


def stream_ends():
    async def read():
        reader = asyncio.StreamReader()
        reader.feed_eof()
        await reader.readexactly(1)

    asyncio.run(read())


@pytest.mark.parametrize(
    "fail",
    [multiprocessing_peer_is_gone, multiprocessing_peer_does_not_read, socket_is_reset, socket_is_broken, stream_ends],
    ids=lambda fail: fail.__name__,
)
def test_a_peer_that_has_gone(fail):
    assert complaint_of(fail) is GONE


def input_ends():
    with open(os.devnull) as nothing:
        raise EOFError(nothing.read())


def connection_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    socket.create_connection(address).close()


@pytest.mark.parametrize("fail", [input_ends, connection_is_refused], ids=lambda fail: fail.__name__)
def test_what_is_nobody_else_s_fault(fail):
    assert complaint_of(fail) is None


class DistBackendError(RuntimeError):
    """As torch's; its texts are those of NCCL, which needs GPUs."""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("NCCL error in: x.cpp:77, remote process exited or there was a network error, NCCL version 2.26.2", GONE),
        ("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.", GONE),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST) ran for ...", LATE),
        ("[0] is setting up NCCL communicator ... store->get('0') got error: wait timeout after 600000ms, keys: ...", LATE),
        ("NCCL error in: x.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.26.2", None),
    ],
)
def test_texts_of_nccl(text, complaint):
    def fail():
        raise DistBackendError(text)

    assert complaint_of(fail) is complaint

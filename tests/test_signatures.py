"""What is a complaint about a peer and what is not: real errors of sockets and connections, and texts of libraries."""

import asyncio
import multiprocessing
import os
import socket
import threading

import pytest

from mpwatch.watcher.diagnosis.peer_errors import PeerErrorKind, classify_exception
from mpwatch.wire.exceptions.encoder import ExceptionEncoder

GONE, LATE, MAYBE = PeerErrorKind.CONNECTION_LOST, PeerErrorKind.PEER_TIMEOUT, PeerErrorKind.POSSIBLY_PEER


def complaint_of(fail):
    with pytest.raises(BaseException) as caught:
        fail()
    return classify_exception(ExceptionEncoder(caught.value).plain())


def multiprocessing_peer_is_gone():
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with ours:
        ours.recv()


def multiprocessing_peer_does_not_read():
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with ours:
        ours.send_bytes(b"x")


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


def barrier_is_broken():
    barrier = threading.Barrier(2)
    barrier.abort()
    barrier.wait()


@pytest.mark.parametrize(
    ("fail", "complaint"),
    [
        (multiprocessing_peer_is_gone, GONE),
        (multiprocessing_peer_does_not_read, GONE),
        (socket_is_reset, MAYBE),
        (socket_is_broken, MAYBE),
        (stream_ends, MAYBE),
        (barrier_is_broken, LATE),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_peer_that_has_gone(fail, complaint):
    assert complaint_of(fail) is complaint
    assert complaint.should_wait_for_cause


def input_ends():
    with open(os.devnull) as nothing:
        raise EOFError(nothing.read())


def connection_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    socket.create_connection(address).close()


@pytest.mark.parametrize("fail", [input_ends, connection_is_refused], ids=lambda fail: fail.__name__)
def test_what_nobody_is_to_wait_for(fail):
    complaint = complaint_of(fail)
    assert complaint is None or not complaint.should_wait_for_cause


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


@pytest.mark.parametrize("text", ["cannot pickle (TypeError: a lock)", "the pipeline has 3 stages", "presets", "typeof x"])
def test_a_word_within_another_is_no_hint(text):
    assert classify_exception(ExceptionEncoder(ValueError(text)).plain()) is None


@pytest.mark.parametrize(
    "text", ["lost my peer", "Broken pipe", "BrokenPipeError", "EOFError: ", "ConnectionResetError", "peers gone"]
)
def test_words_that_one_may_use_of_a_peer_are_hints(text):
    assert classify_exception(ExceptionEncoder(ValueError(text)).plain()) is PeerErrorKind.HINT

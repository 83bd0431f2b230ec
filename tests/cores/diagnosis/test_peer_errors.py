"""Which exceptions are peer errors: real errors of sockets and connections, and texts of libraries."""

import asyncio
import multiprocessing
import socket
import threading

import pytest

from mpwatch.watcher.diagnosis.peer_errors import PeerErrorKind, classify_death, classify_exception
from mpwatch.wire.exceptions.encoder import ExceptionEncoder

LOST, TIMEOUT, POSSIBLY = PeerErrorKind.CONNECTION_LOST, PeerErrorKind.PEER_TIMEOUT, PeerErrorKind.POSSIBLY_PEER


def classify(error):
    return classify_exception(ExceptionEncoder(error).plain())


def use_after_the_peer_has_closed(make_pair, use):
    ours, theirs = make_pair()
    theirs.close()
    with ours:
        use(ours)


def read_from_reset_socket():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        client.sendall(b"unread")
        peer.recv(1)
        peer.close()
        client.recv(1)


def connect_to_closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    socket.create_connection(address).close()


async def read_from_ended_stream():
    reader = asyncio.StreamReader()
    reader.feed_eof()
    await reader.readexactly(1)


REAL_ERRORS = {
    "pipe, read": (lambda: use_after_the_peer_has_closed(multiprocessing.Pipe, lambda pipe: pipe.recv()), LOST),
    "pipe, write": (lambda: use_after_the_peer_has_closed(multiprocessing.Pipe, lambda pipe: pipe.send(1)), LOST),
    "socket": (lambda: use_after_the_peer_has_closed(socket.socketpair, lambda ours: ours.sendall(b"x")), POSSIBLY),
    "reset socket": (read_from_reset_socket, POSSIBLY),
    "stream": (lambda: asyncio.run(read_from_ended_stream()), POSSIBLY),
    "barrier": (lambda: threading.Barrier(2, timeout=0).wait(), TIMEOUT),
    "input": (lambda: exec("raise EOFError"), None),
    "closed port": (connect_to_closed_port, PeerErrorKind.HINT),
}


@pytest.mark.parametrize(("fail", "kind"), REAL_ERRORS.values(), ids=REAL_ERRORS)
def test_real_errors(fail, kind):
    with pytest.raises(Exception) as caught:
        fail()
    assert classify(caught.value) is kind


class DistBackendError(RuntimeError):
    """Has the name of torch's class. Its texts are those of NCCL, which needs GPUs."""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("NCCL error in: x.cpp:77, remote process exited or there was a network error, NCCL version 2.26.2", LOST),
        ("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.", LOST),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST) ran for ...", TIMEOUT),
        ("[0] is setting up NCCL communicator ... got error: wait timeout after 600000ms, keys: ...", TIMEOUT),
    ],
)
def test_texts_of_nccl(text, kind):
    assert classify(DistBackendError(text)) is kind


@pytest.mark.parametrize("text", ["lost my peer", "Broken pipe", "EOFError: "])
def test_words_about_peers_are_hints(text):
    assert classify(ValueError(text)) is PeerErrorKind.HINT


WITHOUT_FRAMES = "Fatal Python error: Aborted\n\n\nExtension modules: torch._C (total: 1)"
WITH_FRAMES = 'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "a.py", line 1 in f'
GLOO_TEXT = "what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 12 vs 8."


@pytest.mark.parametrize(
    ("exit_code", "stderr", "crash_stack", "backend", "kind"),
    [
        (-6, GLOO_TEXT, "", "", PeerErrorKind.OTHER_SIZE),
        (-6, "", WITHOUT_FRAMES, "gloo", PeerErrorKind.OTHER_SIZE),
        (-6, "", WITH_FRAMES, "gloo", None),
        (-6, "", WITHOUT_FRAMES, "nccl", None),
        (-11, GLOO_TEXT, WITHOUT_FRAMES, "gloo", None),
        (-6, "Watchdog caught collective operation timeout", "", "nccl", TIMEOUT),
    ],
)
def test_deaths_because_of_a_peer(exit_code, stderr, crash_stack, backend, kind):
    assert classify_death(exit_code, stderr, crash_stack, backend) is kind

"""Recognises failures that a peer has probably caused: a lost connection, or a timeout in a wait for a peer. Pure.

Such a failure is secondary, even if the peer fails later: a rank that closes its connections before it raises lets its peers
fail first. The patterns for gloo, TCPStore and sockets are from real runs, those for NCCL from its source code.
"""

import re
import signal
from enum import Enum, auto
from typing import NamedTuple

from mpwatch.wire.exceptions import decoder


class PeerErrorKind(Enum):
    CONNECTION_LOST = auto()  # a connection to a peer broke
    PEER_TIMEOUT = auto()  # a peer did not come in time; that peer may hang
    POSSIBLY_PEER = auto()  # a connection broke, to a peer or to another program; secondary only if another rank failed
    OTHER_SIZE = auto()  # a peer sent more bytes than expected; either of the two may be wrong
    HINT = auto()  # the text has words that are used of peers; secondary only if another rank died at the same moment


class PeerErrorPattern(NamedTuple):
    """Regular expressions: for the end of the class name, for what the text contains, in lower case, and what else."""

    kind: PeerErrorKind
    type_name: str
    text: str = ""
    second_text: str = ""
    raised_in: str = ""  # the file of the innermost frame ends with this


LOST, TIMEOUT, POSSIBLY = PeerErrorKind.CONNECTION_LOST, PeerErrorKind.PEER_TIMEOUT, PeerErrorKind.POSSIBLY_PEER
GLOO = "gloo/transport/"
CLOSED = "connection (closed by peer|reset by peer|refused)|broken pipe|socket closed"
PATTERNS = (
    # gloo. TIMEOUT comes first: gloo also reports connections that timed out as closed.
    PeerErrorPattern(TIMEOUT, "RuntimeError", GLOO, "timed out waiting|timeout"),
    PeerErrorPattern(LOST, "RuntimeError", GLOO, CLOSED),
    PeerErrorPattern(TIMEOUT, "RuntimeError", "connectfullmesh failed", "timed out"),
    PeerErrorPattern(LOST, "RuntimeError", "connectfullmesh failed"),
    PeerErrorPattern(TIMEOUT, "RuntimeError", "(failed to pass|successfully reached) monitoredbarrier"),
    # TCPStore
    PeerErrorPattern(TIMEOUT, "DistStoreError", "(wait timeout|timed out) after"),
    PeerErrorPattern(TIMEOUT, "DistNetworkError", "has timed out after"),
    PeerErrorPattern(LOST, "DistNetworkError", "(recvvalue|sendbytes) failed|connection|broken pipe|failed to connect"),
    # NCCL
    PeerErrorPattern(TIMEOUT, "DistBackendError", "watchdog caught collective operation timeout|socket timeout"),
    PeerErrorPattern(TIMEOUT, "DistBackendError", "wait timeout after"),
    PeerErrorPattern(LOST, "DistBackendError", "remote process exit(ed or there was a network error|ing prematurely)"),
    PeerErrorPattern(LOST, "DistBackendError", "unexpected exit of a remote peer|connection closed by"),
    PeerErrorPattern(LOST, "DistBackendError", "nccl communicator was aborted"),
    # connections and barriers of multiprocessing, streams of asyncio, and sockets
    PeerErrorPattern(LOST, "(EOF|BrokenPipe|ConnectionReset)Error", raised_in="multiprocessing/connection.py"),
    PeerErrorPattern(TIMEOUT, "BrokenBarrierError"),
    PeerErrorPattern(POSSIBLY, "IncompleteReadError", raised_in="asyncio/streams.py"),
    PeerErrorPattern(POSSIBLY, "(BrokenPipe|ConnectionReset|ConnectionAborted)Error"),
)
# The thread of NCCL's watchdog prints this, and then ends the process with SIGABRT.
NCCL_WATCHDOG_TEXT = "watchdog caught collective operation timeout"
# A thread of gloo, which has no Python frame, ends the process with SIGABRT if a peer has sent more bytes than expected. It
# prints this.
GLOO_SIZE_TEXT = "op.preamble.length <= op.nbytes"
PYTHON_FRAME = '  File "'  # in a stack by faulthandler
# Whole words only: "peer" occurs in "TypeError", and "pipe" in "pipeline".
HINT_WORDS = re.compile(
    r"\bpeers?\b|connection|connect\b|disconnect|socket|\b(broken)?pipe(error)?\b|\beof(error)?\b|end of file|"
    r"\breset\b|\blost\b|\bclosed\b|unreachable"
)


def classify_exception(encoded: bytes) -> PeerErrorKind | None:
    """Look for a peer error in an exception and its causes, without unpickling. A certain kind is preferred."""
    kinds = [kind for node in decoder.read_cause_chain(encoded) if (kind := _classify_node(node)) is not None]
    return min(kinds, key=lambda kind: kind in (PeerErrorKind.POSSIBLY_PEER, PeerErrorKind.HINT), default=None)


def classify_death(exit_code: int | None, stderr: str, crash_stack: str, backend: str) -> PeerErrorKind | None:
    """Return the kind if a backend of torch.distributed has ended the rank by abort(), while it waited in a collective."""
    if exit_code != -signal.SIGABRT:
        return None
    if NCCL_WATCHDOG_TEXT in stderr.lower():
        return PeerErrorKind.PEER_TIMEOUT
    is_in_thread_of_gloo = backend == "gloo" and bool(crash_stack) and PYTHON_FRAME not in crash_stack
    return PeerErrorKind.OTHER_SIZE if GLOO_SIZE_TEXT in stderr or is_in_thread_of_gloo else None


def _classify_node(node: decoder.ExceptionNode) -> PeerErrorKind | None:
    text = node["text"].lower()
    raised_in = node["frames"][-1]["file"] if node["frames"] else ""
    for kind, type_name, first, second, file in PATTERNS:
        is_of_type = re.search(f"{type_name}$", node["name"]) and raised_in.endswith(file)
        if is_of_type and re.search(first, text) and re.search(second, text):
            return kind
    return PeerErrorKind.HINT if HINT_WORDS.search(text) else None

"""What it looks like when a rank only says that a peer has gone, or has not come: the signatures, as data in one place.

Such a failure is a consequence, whatever its time: a rank that is about to fail often closes its connections first. Texts
of gloo, TCPStore and sockets were seen in runs, those of NCCL read in sources; those of UCC and MPI have not been tried.
"""

import re
import signal
from enum import Enum, auto
from typing import NamedTuple

from mpwatch.wire.exceptions import decoder


class PeerErrorKind(Enum):
    """What a rank says of its peers, from the certain to the vague."""

    CONNECTION_LOST = auto()  # a connection broke
    PEER_TIMEOUT = auto()  # a peer did not come in time: the one that is missing may hang
    POSSIBLY_PEER = auto()  # a connection broke, to whomever: a peer if one has gone, else it is a failure like any other
    HINT = auto()  # words that one may use of a peer; worth something only beside a death in the same moment

    @property
    def is_worth_waiting(self) -> bool:
        """Whether the cause may be heard of later, and the ranks are not to be stopped before."""
        return self is not PeerErrorKind.HINT


class Signature(NamedTuple):
    """What an exception of that kind looks like; all that is given must fit."""

    says: PeerErrorKind
    type_name: str  # the end of its class's name
    text: str = ""  # a part of its text, in lower case
    also: str = ""  # another part
    raised_in: str = ""  # the end of the file that the innermost frame is in


GONE, LATE, MAYBE = PeerErrorKind.CONNECTION_LOST, PeerErrorKind.PEER_TIMEOUT, PeerErrorKind.POSSIBLY_PEER
GLOO = "gloo/transport/"
SIGNATURES = (
    # gloo; LATE first, since pairs that timed out are also reported as closed
    Signature(LATE, "RuntimeError", GLOO, "timed out waiting"),
    Signature(LATE, "RuntimeError", GLOO, "timeout"),
    Signature(GONE, "RuntimeError", GLOO, "connection closed by peer"),
    Signature(GONE, "RuntimeError", GLOO, "connection reset by peer"),
    Signature(GONE, "RuntimeError", GLOO, "connection refused"),
    Signature(GONE, "RuntimeError", GLOO, "broken pipe"),
    Signature(GONE, "RuntimeError", GLOO, "socket closed"),
    Signature(LATE, "RuntimeError", "connectfullmesh failed", "timed out"),
    Signature(GONE, "RuntimeError", "connectfullmesh failed"),
    Signature(LATE, "RuntimeError", "failed to pass monitoredbarrier"),
    Signature(LATE, "RuntimeError", "successfully reached monitoredbarrier"),
    # TCPStore
    Signature(LATE, "DistStoreError", "wait timeout after"),
    Signature(LATE, "DistStoreError", "timed out after"),
    Signature(LATE, "DistNetworkError", "has timed out after"),
    Signature(GONE, "DistNetworkError", "recvvalue failed"),
    Signature(GONE, "DistNetworkError", "sendbytes failed"),
    Signature(GONE, "DistNetworkError", "connection"),
    Signature(GONE, "DistNetworkError", "broken pipe"),
    Signature(GONE, "DistNetworkError", "failed to connect"),
    # NCCL
    Signature(LATE, "DistBackendError", "watchdog caught collective operation timeout"),
    Signature(LATE, "DistBackendError", "socket timeout"),
    Signature(LATE, "DistBackendError", "wait timeout after"),
    Signature(GONE, "DistBackendError", "remote process exited or there was a network error"),
    Signature(GONE, "DistBackendError", "remote process exiting prematurely"),
    Signature(GONE, "DistBackendError", "unexpected exit of a remote peer"),
    Signature(GONE, "DistBackendError", "nccl communicator was aborted"),
    Signature(GONE, "DistBackendError", "connection closed by"),
    # UCC over UCX
    Signature(GONE, "Error", "ucc", "connection reset by remote peer"),
    Signature(GONE, "Error", "ucc", "endpoint timeout"),
    # MPI with fault tolerance (ULFM); without it the launcher kills everybody
    Signature(GONE, "", "mpi_err_proc_failed"),
    Signature(GONE, "", "mpi_err_revoked"),
    # multiprocessing's connections and barriers, asyncio's streams, and plain sockets
    Signature(GONE, "EOFError", raised_in="multiprocessing/connection.py"),
    Signature(GONE, "BrokenPipeError", raised_in="multiprocessing/connection.py"),
    Signature(GONE, "ConnectionResetError", raised_in="multiprocessing/connection.py"),
    Signature(LATE, "BrokenBarrierError"),
    Signature(MAYBE, "IncompleteReadError", raised_in="asyncio/streams.py"),
    Signature(MAYBE, "BrokenPipeError"),
    Signature(MAYBE, "ConnectionResetError"),
    Signature(MAYBE, "ConnectionAbortedError"),
)
WATCHDOG = (
    "watchdog caught collective operation timeout"  # NCCL's, in a thread of its own, which ends the process by SIGABRT
)
HINTS = re.compile(
    r"\bpeers?\b|connection|connect\b|disconnect|socket|\b(broken)?pipe(error)?\b|\beof(error)?\b|end of file|"
    r"\breset\b|\blost\b|\bclosed\b|unreachable"  # as words: there is a peer in every TypeError, a pipe in a pipeline
)


def complaint_in(told: bytes) -> PeerErrorKind | None:
    """What a reported exception, or one that it was raised from, says of a peer. Looks at names and texts alone."""
    found = [complaint for link in decoder.outline(told) if (complaint := _complaint_of(link)) is not None]
    return min(found, key=lambda complaint: complaint in (PeerErrorKind.POSSIBLY_PEER, PeerErrorKind.HINT), default=None)


def complaint_of_death(exit_code: int | None, stderr: str) -> PeerErrorKind | None:
    """What a rank that died said of its peers on its stderr, as far as that was captured."""
    return LATE if exit_code == -signal.SIGABRT and WATCHDOG in stderr.lower() else None


def _complaint_of(link: decoder.ExceptionHeader) -> PeerErrorKind | None:
    text = link.text.lower()
    for signature in SIGNATURES:
        if (
            link.name.endswith(signature.type_name)
            and signature.text in text
            and signature.also in text
            and link.raised_in.endswith(signature.raised_in)
        ):
            return signature.says
    return PeerErrorKind.HINT if HINTS.search(text) else None

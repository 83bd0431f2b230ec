"""Opens the store of a rendezvous: serves it, or waits for it to be served, and connects to it.

May take until its deadline, since the node that serves the store may come later than the others, and its name be known
later still. Imports torch.
"""

import time
from dataclasses import dataclass
from socket import create_connection, gaierror
from typing import Any

from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from mpwatch.errors import LaunchError
from mpwatch.multinode.rendezvous.cancellable_wait import Deadline
from mpwatch.multinode.rendezvous.endpoint import (
    ANSWER_SECONDS,
    Address,
    Endpoint,
    Listener,
    ProbeResult,
    ask,
    is_here,
    is_taken,
    listen,
    look,
    resolve,
    taken,
)
from mpwatch.multinode.rendezvous.errors import StoreLostError
from mpwatch.multinode.rendezvous.store import PrefixedStore, StoreConnection, tcp_store
from mpwatch.options.rendezvous import Rendezvous

PORT = 29400
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class OpenedStore:
    """A store, and where this node stands to it."""

    connection: StoreConnection
    endpoint: Endpoint
    is_host: bool
    local: str
    """By which name or address the other nodes reach this one, as far as can be seen from here."""
    backend: Any
    """Torch's, for the state of the rendezvous; None for a static one, which has none."""


def open_store(rendezvous: Rendezvous, limit: Deadline) -> OpenedStore:
    """Raises LaunchError, at the latest when the time is over, and CancelledError."""
    endpoint = Endpoint.of(rendezvous.endpoint, PORT)
    static = rendezvous.backend == "static"
    is_host = rendezvous.options["rank"] == 0 if static else rendezvous.is_host
    opened = _StoreOpener(endpoint, is_host, rendezvous.node_timeout / 2).open(limit)
    if static:
        return opened
    backend = C10dRendezvousBackend(PrefixedStore(opened.connection, "mpwatch"), rendezvous.run_id)
    return OpenedStore(opened.connection, endpoint, opened.is_host, opened.local, backend)


class _StoreOpener:
    def __init__(self, endpoint: Endpoint, is_host: bool | None, silence: float) -> None:
        self._endpoint = endpoint
        self._is_host = is_host
        self._silence = silence
        self._trouble = ""

    def open(self, limit: Deadline) -> OpenedStore:
        started = time.monotonic()
        while True:
            opened = self._try(limit)
            if opened:
                return opened
            if not limit.pause():
                raise _too_late(self._endpoint, self._trouble, started)

    def _try(self, limit: Deadline) -> OpenedStore | None:
        try:
            addresses = resolve(self._endpoint, limit)
        except gaierror as error:
            self._trouble = _unknown(self._endpoint, error)
            addresses = []
        here = next(filter(is_here, addresses), None)
        try:
            if self._is_host or (here and self._is_host is None):
                return self._serve(here, limit)
            return self._join(addresses, limit)
        except StoreLostError as error:  # it was there just now
            self._trouble = str(error)
            return None

    def _serve(self, here: Address | None, limit: Deadline) -> OpenedStore | None:
        endpoint = self._endpoint
        try:
            listener = listen(endpoint, here)
        except OSError as error:
            if not is_taken(error):
                raise LaunchError(
                    f"rendezvous at {endpoint}: this machine cannot listen at port {endpoint.port} ({error.strerror}): give"
                    " a port that it may use, the same one on all nodes"
                ) from error
            return self._join_neighbour(here, limit)
        with listener:
            connection = tcp_store(endpoint, here[1][0] if here else LOOPBACK, limit, self._silence, listener)
        return OpenedStore(connection, endpoint, True, endpoint.host, None)

    def _join_neighbour(self, here: Address | None, limit: Deadline) -> OpenedStore | None:
        """Somebody on this machine serves it already: another node of the job, one hopes."""
        endpoint = self._endpoint
        if self._is_host or here is None:
            raise LaunchError(
                f"rendezvous at {endpoint}: this node is to serve the store, but port {endpoint.port} is taken on this"
                " machine: is another node of the job there already, with is_host=True or rank 0? Else give another port,"
                " the same one on all nodes"
            )
        try:
            with create_connection(here[1][:2], limit.left(ANSWER_SECONDS) or ANSWER_SECONDS) as connection:
                answer = ask(connection, ANSWER_SECONDS)
        except ConnectionError:  # it was about to end
            return None
        except OSError:
            answer = ProbeResult.NOTHING
        if answer is not ProbeResult.STORE:
            raise taken(endpoint)
        return self._join([here], limit)

    def _join(self, addresses: list[Address], limit: Deadline) -> OpenedStore | None:
        found = look(self._endpoint, addresses, limit)
        if isinstance(found, Listener):
            connection = tcp_store(self._endpoint, found.host, limit, self._silence)
            return OpenedStore(connection, self._endpoint, False, found.local, None)
        self._trouble = found or self._trouble
        return None


def _too_late(endpoint: Endpoint, trouble: str, started: float) -> LaunchError:
    return LaunchError(f"rendezvous at {endpoint}: {trouble}. Tried for {time.monotonic() - started:.1f} s")


def _unknown(endpoint: Endpoint, error: gaierror) -> str:
    return (
        f"the name {endpoint.host!r} cannot be resolved ({error.strerror}): check its spelling and what this machine asks"
        " for names, or give the address instead"
    )

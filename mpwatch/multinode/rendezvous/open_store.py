"""Open the store of a rendezvous: serve the store, or connect to it as soon as another node serves it.

`open_store` tries again until the deadline, because the node that serves the store may start later than this node. If the
name of the endpoint cannot be resolved, `open_store` also tries again, because name servers do not know a new node at once.
"""

from dataclasses import dataclass
from socket import create_connection, gaierror
from typing import Any

from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from mpwatch.errors import LaunchError
from mpwatch.multinode.rendezvous.cancellable_wait import Deadline
from mpwatch.multinode.rendezvous.endpoint import (
    ANSWER_SECONDS,
    Endpoint,
    ProbeResult,
    SocketAddress,
    StoreAddress,
    find_store,
    is_local_address,
    is_port_taken,
    listen,
    make_port_taken_error,
    probe_store,
    resolve,
)
from mpwatch.multinode.rendezvous.errors import StoreLostError
from mpwatch.multinode.rendezvous.store import PrefixedStore, StoreConnection, open_tcp_store
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.os_support.clock import monotonic

DEFAULT_PORT = 29400
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class OpenedStore:
    """The connection of this node to a store, and facts about this connection."""

    connection: StoreConnection
    endpoint: Endpoint
    is_host: bool
    """Whether this process serves the store."""
    local_addr: str
    """Name or address with which the other nodes probably reach this node."""
    backend: Any
    """torch's backend for the state of a dynamic rendezvous. It is None if the rendezvous is static and so has no state."""


def open_store(rendezvous: Rendezvous, deadline: Deadline) -> OpenedStore:
    """Serve the store, or connect to it.

    Raises:
        LaunchError: the store cannot be opened.
        CancelledError: the call was cancelled.
        StoreLostError: the store has ended just after this node connected to it.
    """
    endpoint = Endpoint.parse(rendezvous.endpoint, DEFAULT_PORT)
    is_static = rendezvous.backend == "static"
    is_host = rendezvous.options["rank"] == 0 if is_static else rendezvous.is_host
    opened = _StoreOpener(endpoint, is_host, rendezvous.node_timeout / 2).open(deadline)
    if is_static:
        return opened
    try:
        backend = C10dRendezvousBackend(PrefixedStore(opened.connection, "mpwatch"), rendezvous.run_id)  # uses the store
    except BaseException:
        opened.connection.close()
        raise
    return OpenedStore(opened.connection, endpoint, opened.is_host, opened.local_addr, backend)


class _StoreOpener:
    """Tries to open the store until a try succeeds or the deadline has passed.

    Args:
        endpoint: where the store is.
        is_host: whether this node serves the store. If it is None, the node serves it if the endpoint is its own address.
        silence_timeout: seconds after which a connection without an answer is lost.
    """

    def __init__(self, endpoint: Endpoint, is_host: bool | None, silence_timeout: float) -> None:
        self._endpoint = endpoint
        self._is_host = is_host
        self._silence_timeout = silence_timeout
        self._problem = ""  # the error text of the latest try

    def open(self, deadline: Deadline) -> OpenedStore:
        started_at = monotonic()
        while True:
            opened = self._try_once(deadline)
            if opened:
                return opened
            if not deadline.wait_before_retry():
                seconds = monotonic() - started_at
                raise LaunchError(f"rendezvous at {self._endpoint}: {self._problem}. Tried for {seconds:.1f} s")

    def _try_once(self, deadline: Deadline) -> OpenedStore | None:
        try:
            addresses = resolve(self._endpoint, deadline)
        except gaierror as error:
            self._problem = (
                f"the name {self._endpoint.host!r} cannot be resolved ({error.strerror}). Check its spelling and this"
                " machine's name service, or give the address instead"
            )
            addresses = []
        local_address = next(filter(is_local_address, addresses), None)
        try:
            if self._is_host or (local_address and self._is_host is None):
                return self._serve(local_address, deadline)
            return self._connect(addresses, deadline)
        except StoreLostError as error:  # the store was there a moment ago
            self._problem = str(error)
            return None

    def _serve(self, local_address: SocketAddress | None, deadline: Deadline) -> OpenedStore | None:
        endpoint = self._endpoint
        try:
            listener = listen(endpoint, local_address)
        except OSError as error:
            if not is_port_taken(error):
                raise LaunchError(
                    f"rendezvous at {endpoint}: this machine cannot listen at port {endpoint.port} ({error.strerror}). Use a"
                    " port that it may use, the same one on all nodes"
                ) from error
            return self._connect_on_this_machine(local_address, deadline)
        host = local_address[1][0] if local_address else LOOPBACK
        with listener:
            connection = open_tcp_store(endpoint, host, deadline, self._silence_timeout, listener)
        return OpenedStore(connection, endpoint, True, endpoint.host, None)

    def _connect_on_this_machine(self, local_address: SocketAddress | None, deadline: Deadline) -> OpenedStore | None:
        """If another node on this machine serves the store at the endpoint's port, connect to that store."""
        endpoint = self._endpoint
        if self._is_host or local_address is None:
            raise LaunchError(
                f"rendezvous at {endpoint}: this node is to serve the store, but port {endpoint.port} is taken on this"
                " machine. Perhaps another node of the job runs there with is_host=True or rank 0. If not, use another port,"
                " the same one on all nodes"
            )
        try:
            timeout = deadline.seconds_left(ANSWER_SECONDS) or ANSWER_SECONDS
            with create_connection(local_address[1][:2], timeout) as connection:
                answer = probe_store(connection, ANSWER_SECONDS)
        except ConnectionError:  # the program that had the port has just ended
            return None
        except OSError:
            answer = ProbeResult.NO_ANSWER
        if answer is not ProbeResult.STORE:
            raise make_port_taken_error(endpoint)
        return self._connect([local_address], deadline)

    def _connect(self, addresses: list[SocketAddress], deadline: Deadline) -> OpenedStore | None:
        found = find_store(self._endpoint, addresses, deadline)
        if isinstance(found, StoreAddress):
            connection = open_tcp_store(self._endpoint, found.host, deadline, self._silence_timeout)
            return OpenedStore(connection, self._endpoint, False, found.local_host, None)
        self._problem = found or self._problem
        return None

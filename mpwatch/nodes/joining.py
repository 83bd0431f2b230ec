"""How a node comes to the coordinator: start its server here, if this is its place, connect, and be accepted.

Everything is tried again until the deadline, because the node with the coordinator may start later than this one, and name
servers do not know a new node at once.
"""

import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import wait

from mpwatch.errors import LaunchError
from mpwatch.nodes.address import (
    CHECK_SECONDS,
    Deadline,
    Endpoint,
    SocketAddress,
    connect,
    is_local_address,
    is_loopback,
    listen,
    resolve,
)
from mpwatch.nodes.frames import Connection, ForeignProgramError, SecretMismatchError
from mpwatch.nodes.json_codec import InvalidMessageError
from mpwatch.nodes.messages import Message, NodeInfo, Refused, decode_message, encode_message
from mpwatch.nodes.server import Server
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.os_support.clock import monotonic

ANSWER_SECONDS = 2.0  # for the program that listens there to greet
RETRY_OVER_SECONDS = 10.0  # for the end of an earlier job at the same endpoint


class Joining:
    """Connects one node, at first and after it was dismissed. `serve` starts the server on a listening socket."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        make_info: Callable[[str, bool], NodeInfo],
        serve: Callable[[socket.socket], Server],
        log_warning: Callable[[str], object],
    ) -> None:
        self._rendezvous, self._make_info, self._serve = rendezvous, make_info, serve
        self._log_warning = log_warning
        self.endpoint = Endpoint.parse(rendezvous.endpoint)
        self.server: Server | None = None
        self.cancelled = threading.Event()

    def run(self, until: float) -> tuple[Connection, list[Message]]:
        """Return a connection on which this node was accepted, and what has come on it.

        Raises LaunchError. Raises CancelledError if `cancelled` was set.
        """
        deadline = Deadline(until, self.cancelled)
        started_at = monotonic()
        where = f"rendezvous at {self.endpoint}"
        while True:
            try:
                return self._try(deadline, may_wait_for_end=monotonic() < started_at + RETRY_OVER_SECONDS)
            except SecretMismatchError as error:
                raise LaunchError(f"{where}: what the coordinator sends is {error}") from error
            except ForeignProgramError as error:
                raise LaunchError(
                    f"{where}: port {self.endpoint.port} is taken by another program ({error}). Use another port, the same"
                    " one on all nodes"
                ) from error
            except (ConnectionError, TimeoutError, InvalidMessageError) as error:
                problem = error
            if not deadline.wait_before_retry():
                raise LaunchError(f"{where}: {problem}. Tried for {monotonic() - started_at:.1f} s") from problem

    def describe(self, problem: str) -> str:
        return f"rendezvous of job {self._rendezvous.run_id!r} at {self.endpoint}: {problem}"

    def _try(self, deadline: Deadline, *, may_wait_for_end: bool) -> tuple[Connection, list[Message]]:
        connection = Connection(
            connect(self.endpoint, self._find_addresses(deadline), deadline), self._rendezvous.key, is_server=False
        )
        try:
            messages = self._introduce(connection, deadline)
            if isinstance(refusal := messages[0], Refused):
                if refusal.may_retry and self.server is None and may_wait_for_end:
                    raise ConnectionError(refusal.reason)
                raise LaunchError(self.describe(refusal.reason))
        except BaseException:
            connection.close()
            raise
        return connection, messages

    def _find_addresses(self, deadline: Deadline) -> list[SocketAddress]:
        """Raises ConnectionError. Starts the server, if this is its place."""
        endpoint, is_host = self.endpoint, self._rendezvous.is_host
        try:
            addresses = resolve(endpoint, deadline)
        except socket.gaierror as error:
            if not is_host:
                raise ConnectionError(
                    f"the name {endpoint.host!r} cannot be resolved ({error.strerror}). Check its spelling and this"
                    " machine's name service, or give the address instead"
                ) from error
            addresses = []
        local = next(filter(is_local_address, addresses), None)
        if self.server is None and (is_host or (local is not None and is_host is None)):
            listener = listen(endpoint, local, must_serve=bool(is_host))
            if listener is not None:
                self.server = self._serve(listener)
                self._warn_of_strangers(self.server.address[0])
        if self.server is None:
            return addresses
        host, port = self.server.address[:2]
        own = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(host, host)  # noqa: S104  not bound to it
        return [(socket.AF_INET6 if ":" in own else socket.AF_INET, (own, port))]

    def _introduce(self, connection: Connection, deadline: Deadline) -> list[Message]:
        """Exchange greetings, say who this node is, and return the first messages of the coordinator."""
        messages: list[Message] = []
        has_sent, answer_by = False, monotonic() + ANSWER_SECONDS
        while not messages:
            if connection.framing.is_greeted and not has_sent:
                has_sent, answer_by = True, answer_by + ANSWER_SECONDS
                own = self.endpoint.host if self.server is not None else str(connection.socket.getsockname()[0])
                info = self._make_info(self._rendezvous.local_addr or own, self.server is not None)
                connection.send(encode_message(info))
            connection.flush()
            wait([connection.socket], deadline.seconds_left(CHECK_SECONDS))
            messages = list(map(decode_message, connection.receive()))
            if connection.end and not messages:
                raise ConnectionError(f"what listens there has ended the connection ({connection.end})")
            if monotonic() >= answer_by:
                raise TimeoutError(
                    "what listens there does not answer as mpwatch. Check on that machine whether another program has taken"
                    " the port"
                )
            deadline.seconds_left(0.0)
        return messages

    def _warn_of_strangers(self, host: str) -> None:
        if not is_loopback(host) and not self._rendezvous.key:
            self._log_warning(
                f"rendezvous at {self.endpoint}: there is no secret, so whoever can reach port {self.endpoint.port} can take"
                " part in the job, and lead its ranks anywhere; set MPWATCH_SECRET to the same text on all nodes"
            )

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

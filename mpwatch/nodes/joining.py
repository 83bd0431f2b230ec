"""How a node comes to the coordinator: start its server here, if this is its place, connect, and be accepted.

Everything is tried again until the deadline, because the node with the coordinator may start later than this one, and name
servers do not know a new node at once.
"""

import asyncio
import socket
from collections.abc import Callable

from mpwatch.errors import LaunchError
from mpwatch.nodes.address import Endpoint, SocketAddress, connect, is_local_address, listen, resolve
from mpwatch.nodes.frames import Connection, ForeignProgramError, SecretMismatchError
from mpwatch.nodes.json_codec import InvalidMessageError
from mpwatch.nodes.messages import Joined, MessageToNode, NodeInfo, Refused, decode_message, encode_message
from mpwatch.nodes.server import Server
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.os_support.clock import monotonic

RETRY_SECONDS = 0.2
ANSWER_SECONDS = 4.0  # for the program that listens there to greet, and to accept this node
RETRY_OVER_SECONDS = 10.0  # for the end of an earlier job at the same endpoint


class NodeConnection(Connection):
    """A node's connection to the coordinator. `answer` is its first message, or why there is none."""

    def __init__(
        self,
        secret: bytes,
        make_info: Callable[[str], NodeInfo],
        handle: Callable[["NodeConnection", MessageToNode], object],
        lose: Callable[["NodeConnection"], object],
    ) -> None:
        super().__init__(secret, is_server=False)
        self.answer: asyncio.Future[MessageToNode | Exception] = asyncio.get_running_loop().create_future()
        self._make_info, self._handle, self._lose = make_info, handle, lose
        self._has_introduced_itself = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.framing.is_greeted and not self._has_introduced_itself:
            self._has_introduced_itself = True
            own_address = str(self.transport.get_extra_info("sockname")[0])
            self.send(encode_message(self._make_info(own_address)))

    def handle_message(self, data: bytes) -> None:
        message = decode_message(data)
        if not isinstance(message, MessageToNode):
            raise InvalidMessageError(f"{type(message).__name__} is not expected from the coordinator")
        self._set_answer(message)
        self._handle(self, message)

    def handle_invalid(self, error: InvalidMessageError) -> None:
        self._set_answer(error)
        super().handle_invalid(error)

    def handle_end(self) -> None:
        self._set_answer(ConnectionError(f"what listens there has ended the connection ({self.end})"))
        self._lose(self)

    def _set_answer(self, answer: MessageToNode | Exception) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Joining:
    """Connects one node, at first and after it was dismissed. `make_server` gets the socket that will listen."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        make_connection: Callable[[], NodeConnection],
        make_server: Callable[[socket.socket], Server],
    ) -> None:
        self._rendezvous, self._make_connection, self._make_server = rendezvous, make_connection, make_server
        self.endpoint = Endpoint.parse(rendezvous.endpoint)
        self.server: Server | None = None

    async def run(self, until: float) -> None:
        """Return when this node was accepted. Raises LaunchError."""
        started_at, problem = monotonic(), None
        where = f"rendezvous at {self.endpoint}"
        while True:
            now = monotonic()
            try:
                await self._try(until, may_wait_for_end=now < started_at + RETRY_OVER_SECONDS)
                return
            except SecretMismatchError as error:
                raise LaunchError(f"{where}: what the coordinator sends is {error}") from error
            except ForeignProgramError as error:
                raise LaunchError(
                    f"{where}: port {self.endpoint.port} is taken by another program ({error}). Use another port, the same"
                    " one on all nodes"
                ) from error
            except (ConnectionError, TimeoutError, InvalidMessageError) as error:
                if problem is None or monotonic() < until:  # else this try had no time
                    problem = error
            if monotonic() + RETRY_SECONDS >= until:
                raise LaunchError(f"{where}: {problem}. Tried for {monotonic() - started_at:.1f} s") from problem
            await asyncio.sleep(RETRY_SECONDS)

    def describe(self, problem: str) -> str:
        return f"rendezvous of job {self._rendezvous.run_id!r} at {self.endpoint}: {problem}"

    async def _try(self, until: float, *, may_wait_for_end: bool) -> None:
        connected = await connect(self.endpoint, await self._find_addresses(until))
        _, connection = await asyncio.get_running_loop().create_connection(self._make_connection, sock=connected)
        answer: MessageToNode | Exception | None = None
        try:
            async with asyncio.timeout_at(min(until, monotonic() + ANSWER_SECONDS)):
                answer = await connection.answer
        except TimeoutError:
            raise TimeoutError(
                "what listens there does not answer as mpwatch. Check on that machine whether another program has taken the"
                " port"
            ) from None
        finally:
            if not isinstance(answer, Joined):
                connection.transport.abort()
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Refused):
            if answer.may_retry and self.server is None and may_wait_for_end:
                raise ConnectionError(answer.reason)
            raise LaunchError(self.describe(answer.reason))

    async def _find_addresses(self, until: float) -> list[SocketAddress]:
        """Raises ConnectionError. Starts the server, if this is its place."""
        is_host = self._rendezvous.is_host
        try:
            addresses = [] if self.server is not None else await resolve(self.endpoint, until)
        except ConnectionError:
            if not is_host:
                raise
            addresses = []
        local = next(filter(is_local_address, addresses), None)
        if self.server is None and (is_host or (local is not None and is_host is None)):
            listener = listen(self.endpoint, local, must_serve=bool(is_host))
            if listener is not None:
                self.server = self._make_server(listener)
                await self.server.start(listener)
        if self.server is None:
            return addresses
        host, port = self.server.address[:2]
        own = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(host, host)  # noqa: S104  not bound to it
        return [(socket.AF_INET6 if ":" in own else socket.AF_INET, (own, port))]

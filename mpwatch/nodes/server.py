"""The server of a job accepts nodes, and gives what they send to the Coordinator.

    nodes --- TCP (frames.py) ---> Server --- join, handle, lose, time ---> Coordinator
          <----------------------         <--- actions --------------------

A connection is a stranger's until its first message was accepted: it has HELLO_SECONDS, may send FIRST_BYTES, and only
MAX_STRANGERS are kept, the latest ones. So strangers can cost nothing but lines in the log. The first message is NodeInfo,
or if a driver has started the nodes, LinkHello: then the driver gets the pickles that follow, and may answer. It gets them
by a queue, with all else: the kind, the number of the node, and the content.

    decided    an AttemptDecision, if it ends the job or if no node is left
    hello      the hostname of a node, and the Link to it
    sent       a pickle of this node
    closed     the Link: nothing more comes from it
"""

import asyncio
import math
import queue
import socket
from collections.abc import Callable, Iterable
from typing import Any

from mpwatch.nodes.coordinator import Coordinator, CoordinatorAction, JobStage, LogWarning
from mpwatch.nodes.frames import LINGER_SECONDS, MAX_BYTES, MAX_LINK_BYTES, Connection, close_all
from mpwatch.nodes.json_codec import InvalidMessageError
from mpwatch.nodes.messages import (
    AttemptDecision,
    Beat,
    Dismissed,
    LinkHello,
    Message,
    MessageToCoordinator,
    NodeInfo,
    Refused,
    decode_message,
    encode_message,
)
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.os_support.clock import monotonic

HELLO_SECONDS = 10.0
MAX_STRANGERS = 64
CHECKS_PER_TIMEOUT = 8  # for silent nodes
MAX_WARNINGS = 10  # about connections that are refused
ACCEPTS = 16  # in a row; asyncio takes it for the backlog of the listener, too, which is then set anew
MAX_WAITING = 1000  # messages for the driver, and what one read of a node adds; then the nodes wait
PAUSE_SECONDS = 0.05  # while the driver is behind


class _Peer(Connection):
    def __init__(self, server: "Server", number: int) -> None:
        super().__init__(server.secret, is_server=True)
        self._server, self.number, self.heard_at = server, number, monotonic()
        self.is_stranger = True
        self.link: Link | None = None
        self.has_last_message = False  # what it sends is ignored

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        address = self.transport.get_extra_info("peername")  # None if the other end is gone
        self.host = address[0] if address else "nowhere"
        self._server.add(self)

    def handle_message(self, data: bytes) -> None:
        self._server.handle(self, data)

    def handle_invalid(self, error: InvalidMessageError) -> None:
        super().handle_invalid(error)
        if self.is_stranger:
            self._server.warn(f"a connection from {self.host} was refused: {error}")

    def handle_end(self) -> None:
        self._server.remove(self)


class Link:
    """The driver's end of its connection to one node. Any thread may call the methods."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop, peer: Connection) -> None:
        self.number, self._loop, self._peer = number, loop, peer

    def send(self, data: bytes) -> None:
        self._loop.call_soon_threadsafe(self._peer.send, data)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._peer.abort, "the driver has closed it")


class Server:
    """Serves one job in the running event loop, from `start` to `close`. `finished`: all nodes know its end."""

    def __init__(
        self,
        coordinator: Coordinator,
        rendezvous: Rendezvous,
        log_warning: Callable[[str], object],
        for_driver: "queue.SimpleQueue[tuple[str, int, Any]] | None" = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._coordinator, self._log_warning, self._for_driver = coordinator, log_warning, for_driver
        self.secret, self._node_timeout = rendezvous.key, rendezvous.node_timeout
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self._peers: dict[int, _Peer] = {}
        self._numbers = 0
        self._warnings_left = MAX_WARNINGS
        self._deadline: asyncio.TimerHandle | None = None
        self._check_seconds = min(1.0, self._node_timeout / CHECKS_PER_TIMEOUT)
        self._checked_at = monotonic()
        self._loop.call_later(self._check_seconds, self._check_peers)

    async def start(self, listener: socket.socket) -> None:
        self._listener, self.address = listener, listener.getsockname()
        # This does not wait yet, so that `close` can be called if the task is cancelled in the next line.
        self._server = await self._loop.create_server(self._make_peer, sock=listener, backlog=ACCEPTS, start_serving=False)
        await self._server.start_serving()
        listener.listen(socket.SOMAXCONN)

    def _make_peer(self) -> _Peer:
        self._numbers += 1
        return _Peer(self, self._numbers)

    async def close(self) -> None:
        """All other tasks of the event loop must be those in which asyncio accepts connections."""
        self._loop.remove_reader(self._listener)
        if accepting := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(accepting)  # else asyncio would leave these connections open
        self._server.close()
        await close_all([*self._peers.values()])

    # ---- connections

    def add(self, peer: _Peer) -> None:
        strangers = [other for other in self._peers.values() if other.is_stranger and not other.transport.is_closing()]
        if len(strangers) >= MAX_STRANGERS:
            strangers[0].abort("there are too many others")
        self._peers[peer.number] = peer

    def handle(self, peer: _Peer, data: bytes) -> None:
        """Handle a message. Raises InvalidMessageError."""
        if peer.link is not None:
            self._tell_driver("sent", peer.link.number, data)
            if self._is_driver_behind() and peer.transport.is_reading():
                peer.transport.pause_reading()
                self._loop.call_later(PAUSE_SECONDS, self._resume, peer)
        elif not peer.has_last_message:
            self._handle(peer, decode_message(data))

    def _tell_driver(self, kind: str, number: int, content: object) -> None:
        if self._for_driver is not None:
            self._for_driver.put((kind, number, content))

    def _is_driver_behind(self) -> bool:
        return self._for_driver is not None and self._for_driver.qsize() >= MAX_WAITING

    def _resume(self, peer: _Peer) -> None:
        if self._is_driver_behind():
            self._loop.call_later(PAUSE_SECONDS, self._resume, peer)
        else:
            peer.transport.resume_reading()

    def _handle(self, peer: _Peer, message: Message) -> None:
        peer.heard_at = now = monotonic()
        is_first = isinstance(message, NodeInfo | LinkHello)
        if not isinstance(message, MessageToCoordinator) or peer.is_stranger is not is_first:
            raise InvalidMessageError(f"{type(message).__name__} is not expected now")
        if isinstance(message, NodeInfo):
            self._execute(self._coordinator.join(peer.number, message, now))
            if not peer.has_last_message:  # else it was refused, and stays a stranger
                peer.is_stranger, peer.framing.limit = False, MAX_BYTES
        elif isinstance(message, LinkHello):
            if self._for_driver is None:
                raise InvalidMessageError("no driver has started the nodes of this job")
            peer.is_stranger, peer.framing.limit = False, MAX_LINK_BYTES
            peer.link = Link(message.number, self._loop, peer)
            self._tell_driver("hello", message.number, (message.hostname, peer.link))
            peer.send(encode_message(message))  # it is no stranger any more
        elif isinstance(message, Beat):
            peer.send(encode_message(message))
        else:
            self._execute(self._coordinator.handle(peer.number, message, now))
            self._loop.call_soon(lambda: self._execute(self._coordinator.judge_stalls(monotonic())))

    def remove(self, peer: _Peer) -> None:
        del self._peers[peer.number]
        if peer.link is not None:
            self._tell_driver("closed", peer.link.number, peer.link)
        elif not peer.is_stranger:
            reason = f"its connection has ended ({peer.end}): its program or its machine has failed"
            self._execute(self._coordinator.lose(peer.number, reason, monotonic()))

    def warn(self, text: str) -> None:
        if self._warnings_left:
            self._warnings_left -= 1
            self._log_warning(text)

    # ---- the coordinator

    def _execute(self, actions: Iterable[CoordinatorAction]) -> None:
        for action in actions:
            if isinstance(action, LogWarning):
                self._log_warning(action.text)
            elif isinstance(action, AttemptDecision):
                self._tell_driver("decided", 0, action)
            elif (peer := self._peers.get(action.node)) is not None:
                peer.send(encode_message(action.message))
                if isinstance(action.message, Refused | Dismissed):
                    peer.has_last_message = True
                    peer.transport.write_eof()
                    self._loop.call_later(LINGER_SECONDS, peer.abort, "it has read the last message")
        if self._coordinator.stage is JobStage.FINISHED and not self.finished.done():
            self.finished.set_result(None)
        self._set_deadline()

    def _set_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._coordinator.deadline < math.inf:
            self._deadline = self._loop.call_at(self._coordinator.deadline, self._handle_deadline)

    def _handle_deadline(self) -> None:
        self._execute(self._coordinator.handle_deadline(monotonic()))

    def _check_peers(self) -> None:
        now = monotonic()
        was_suspended = now > self._checked_at + 2 * self._check_seconds + 1.0
        self._checked_at = now
        for peer in list(self._peers.values()):
            if was_suspended:
                peer.heard_at = now
            silent = now - peer.heard_at
            if peer.is_stranger and silent > HELLO_SECONDS:
                peer.abort("it has not said who it is")
            elif not peer.is_stranger and peer.link is None and silent > self._node_timeout:
                reason = f"its program sent no sign of life for {self._node_timeout:g} s (node_timeout)"
                self._execute(self._coordinator.lose(peer.number, reason, now))
        self._loop.call_later(self._check_seconds, self._check_peers)

"""The server of a job: one thread that accepts nodes, and gives what they send to the Coordinator.

    nodes --- TCP (frames.py) ---> Server --- join, handle, lose, time ---> Coordinator
          <----------------------         <--- actions --------------------

A connection is a stranger's until its first message was accepted: it has HELLO_SECONDS, may send FIRST_BYTES, and only
MAX_STRANGERS are kept, the latest ones. So strangers can cost nothing but lines in the log. The first message is NodeInfo,
or if a driver has started the nodes, LinkHello: then the driver gets the pickles that follow, and may answer.

All times are of a clock that stands still while this program is suspended.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import Protocol

from mpwatch.errors import LaunchError
from mpwatch.nodes.coordinator import Coordinator, CoordinatorAction, Decided, JobStage, LogWarning
from mpwatch.nodes.frames import MAX_BYTES, MAX_LINK_BYTES, Connection
from mpwatch.nodes.json_codec import InvalidMessageError
from mpwatch.nodes.messages import (
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
from mpwatch.os_support.processes import wait_for_thread_exit
from mpwatch.watcher.wakeup_pipe import WakeupPipe
from mpwatch.wire.resource_errors import with_remedy

HELLO_SECONDS = 10.0
MAX_STRANGERS = 64
LINGER_SECONDS = 2.0  # for a node to read the last message and close its end
CHECKS_PER_TIMEOUT = 8  # for silent nodes
MAX_WARNINGS = 10  # about connections that are refused
ACCEPTS = 100  # in a row, before messages are read
PAUSE_SECONDS = 0.05  # after an accept for which there is no descriptor, and while the driver is behind


class _Peer:
    def __init__(self, number: int, connection: Connection, host: str, now: float) -> None:
        self.number, self.connection, self.host, self.heard_at = number, connection, host, now
        self.is_stranger, self.is_node = True, False
        self.receive: Callable[[bytes | None], object] | None = None  # gets pickles, and at the end None
        self.closes_at: float | None = None  # it has got its last message, and what it sends is ignored


class Link:
    """The driver's end of its connection to one node. Any thread may call the methods."""

    def __init__(self, server: "Server", peer: _Peer) -> None:
        self._server, self._peer = server, peer

    def send(self, data: bytes) -> None:
        self._server.post(lambda _: self._server.use_link(self._peer, data))

    def close(self) -> None:
        self._server.post(lambda _: self._server.use_link(self._peer, None))


class Driver(Protocol):
    """What a program that has started the nodes wants to know. The methods are called in the server's thread."""

    def on_decision(self, decided: Decided) -> None: ...

    def open_link(self, hello: LinkHello, link: Link) -> Callable[[bytes | None], object]:
        """Return what gets the pickles of this node, and None when the connection has ended."""

    def is_behind(self) -> bool:
        """Whether no more pickles are to be read for the moment."""


class Server:
    """Serves one job until all nodes know its end, or with a driver until `close`. It closes `listener`, a listening socket.

    `log_warning` is called in the server's thread.
    """

    def __init__(
        self,
        listener: socket.socket,
        coordinator: Coordinator,
        rendezvous: Rendezvous,
        log_warning: Callable[[str], object],
        driver: Driver | None = None,
    ) -> None:
        self._listener, self.coordinator, self._log_warning, self._driver = listener, coordinator, log_warning, driver
        self._secret, self._node_timeout = rendezvous.key, rendezvous.node_timeout
        self.address = listener.getsockname()
        self._peers: dict[int, _Peer] = {}
        self._numbers = 0
        self._suspended_seconds = 0.0
        self._paused: list[_Peer] = []  # they are not read while the driver is behind
        self._warnings_left = MAX_WARNINGS
        self._functions: deque[Callable[[float], Iterable[CoordinatorAction]]] = deque()
        self._is_closing = False
        with ExitStack() as stack:
            stack.enter_context(listener)
            self._wakeup = stack.enter_context(closing(WakeupPipe()))
            self._selector = stack.enter_context(DefaultSelector())
            listener.setblocking(False)
            self._selector.register(listener, EVENT_READ, lambda _: self._accept())
            self._selector.register(self._wakeup.fileno(), EVENT_READ, lambda _: self._wakeup.drain())
            self._resources = stack.pop_all()
        self._thread = threading.Thread(target=self._run, name="mpwatch-coordinator", daemon=True)

    def start(self) -> None:
        """Raises LaunchError; then the server is closed."""
        try:
            self._thread.start()
        except RuntimeError as error:  # there is no room for one more
            self.close()
            raise LaunchError(with_remedy("the thread of the coordinator cannot be started", error)) from error

    def post(self, function: Callable[[float], Iterable[CoordinatorAction]]) -> None:
        """Let the thread call a function with the time, and execute the actions that it returns."""
        self._functions.append(function)
        self._wakeup.wake()

    def join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        self._is_closing = True
        self._wakeup.wake()
        if self._thread.native_id is not None:
            self._thread.join()
            wait_for_thread_exit(self._thread.native_id)
        self._resources.close()

    def _run(self) -> None:
        try:
            self._serve_all()
        finally:  # after a bug, too, the nodes see at once that the coordinator is gone
            for peer in list(self._peers.values()):
                self._remove(peer)
            self._listener.close()

    def _now(self) -> float:
        return monotonic() - self._suspended_seconds

    def _serve_all(self) -> None:
        check_seconds = min(1.0, self._node_timeout / CHECKS_PER_TIMEOUT)
        checked_at = self._now()
        while not self._is_over():
            due_at = min(checked_at + check_seconds, self.coordinator.deadline)
            seconds = min(due_at - self._now(), PAUSE_SECONDS if self._paused else check_seconds)
            ready = self._selector.select(max(0.0, seconds))
            late = self._now() - checked_at - check_seconds
            if late > check_seconds + 1.0:
                self._suspended_seconds += late
            for key, events in ready:
                key.data(events)
            self._resume()
            while self._functions:
                self._execute(self._functions.popleft()(self._now()))
            now = self._now()
            self._execute(self.coordinator.judge_stalls(now))
            if now >= checked_at + check_seconds:
                checked_at = now
                self._check_peers(now)
            if now >= self.coordinator.deadline:
                self._execute(self.coordinator.handle_deadline(now))

    def _is_over(self) -> bool:
        is_done = self.coordinator.stage is JobStage.FINISHED and self._driver is None
        return self._is_closing or (is_done and not any(peer.connection.has_unsent for peer in self._peers.values()))

    def _resume(self) -> None:
        if self._paused and self._driver is not None and not self._driver.is_behind():
            for peer in self._paused:
                self._await(peer)
            self._paused.clear()

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connected, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left, or the other end is gone
                time.sleep(PAUSE_SECONDS)
                return
            strangers = [peer for peer in self._peers.values() if peer.is_stranger]
            if len(strangers) >= MAX_STRANGERS:
                self._remove(strangers[0])
            self._numbers += 1
            peer = _Peer(self._numbers, Connection(connected, self._secret, is_server=True), str(address[0]), self._now())
            self._peers[peer.number] = peer
            self._selector.register(connected, EVENT_READ | EVENT_WRITE, partial(self._serve, peer))

    def _serve(self, peer: _Peer, events: int) -> None:
        if peer.number not in self._peers:  # it was removed in this wake-up
            return
        if events & EVENT_WRITE:
            peer.connection.flush()
        if events & EVENT_READ:
            if peer.receive is not None and self._driver is not None and self._driver.is_behind():
                self._paused.append(peer)
                self._selector.unregister(peer.connection.socket)
                return
            self._read(peer)
        if peer.number not in self._peers:
            return
        if peer.connection.end:
            self._lose(peer, f"its connection has ended ({peer.connection.end}): its program or its machine has failed")
        else:
            self._await(peer)

    def _read(self, peer: _Peer) -> None:
        try:
            for data in peer.connection.receive():
                if peer.receive is not None:
                    peer.receive(data)
                elif peer.closes_at is None:
                    self._handle(peer, decode_message(data))
        except InvalidMessageError as error:
            self._warn(f"a connection from {peer.host} was refused: {error}")
            self._lose(peer, f"it has sent what cannot be read: {error}")

    def _await(self, peer: _Peer) -> None:
        wanted = EVENT_READ | (EVENT_WRITE if peer.connection.has_unsent else 0)
        change = self._selector.register if peer in self._paused else self._selector.modify
        change(peer.connection.socket, wanted, partial(self._serve, peer))

    def _handle(self, peer: _Peer, message: Message) -> None:
        peer.heard_at = now = self._now()
        is_first = isinstance(message, NodeInfo | LinkHello)
        if not isinstance(message, MessageToCoordinator) or peer.is_stranger is not is_first:
            raise InvalidMessageError(f"{type(message).__name__} is not expected now")
        if isinstance(message, NodeInfo):
            peer.is_stranger, peer.is_node, peer.connection.framing.limit = False, True, MAX_BYTES
            self._execute(self.coordinator.join(peer.number, message, now))
        elif isinstance(message, LinkHello):
            if self._driver is None:
                raise InvalidMessageError("no driver has started the nodes of this job")
            peer.is_stranger, peer.connection.framing.limit = False, MAX_LINK_BYTES
            peer.receive = self._driver.open_link(message, Link(self, peer))
            self._send(peer, encode_message(message))  # it is no stranger any more
        elif isinstance(message, Beat):
            self._send(peer, encode_message(message))
        else:
            self._execute(self.coordinator.handle(peer.number, message, now))

    def _execute(self, actions: Iterable[CoordinatorAction]) -> None:
        for action in actions:
            if isinstance(action, LogWarning):
                self._log_warning(action.text)
            elif isinstance(action, Decided):
                if self._driver is not None:
                    self._driver.on_decision(action)
            elif (peer := self._peers.get(action.node)) is not None:
                self._send(peer, encode_message(action.message))
                if isinstance(action.message, Refused | Dismissed):
                    peer.connection.shut_down()
                    peer.is_stranger = isinstance(action.message, Refused)
                    peer.closes_at = self._now() + LINGER_SECONDS

    def _send(self, peer: _Peer, data: bytes) -> None:
        if not peer.connection.end:
            peer.connection.send(data)
            if peer.connection.has_unsent and peer not in self._paused:
                self._await(peer)

    def use_link(self, peer: _Peer, data: bytes | None) -> Iterable[CoordinatorAction]:
        """In the server's thread: send something, or close the connection."""
        if peer.number in self._peers:
            if data is None:
                self._remove(peer)
            else:
                self._send(peer, data)
        return ()

    def _check_peers(self, now: float) -> None:
        for peer in list(self._peers.values()):
            silent = now - peer.heard_at
            if peer.closes_at is not None:
                if now >= peer.closes_at:
                    self._remove(peer)
            elif peer.connection.end:  # while it was sent something
                self._lose(peer, f"its connection has ended ({peer.connection.end})")
            elif peer.is_node and silent > self._node_timeout:
                reason = f"its program sent no sign of life for {self._node_timeout:g} s (node_timeout)"
                self._execute(self.coordinator.lose(peer.number, reason, now))
            elif peer.is_stranger and silent > HELLO_SECONDS:
                self._remove(peer)

    def _lose(self, peer: _Peer, reason: str) -> None:
        self._remove(peer)
        if peer.is_node:
            self._execute(self.coordinator.lose(peer.number, reason, self._now()))

    def _remove(self, peer: _Peer) -> None:
        del self._peers[peer.number]
        if peer in self._paused:
            self._paused.remove(peer)
        else:
            self._selector.unregister(peer.connection.socket)
        peer.connection.close()
        if peer.receive is not None:
            peer.receive(None)

    def _warn(self, text: str) -> None:
        if self._warnings_left:
            self._warnings_left -= 1
            self._log_warning(text)

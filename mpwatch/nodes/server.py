"""The server of a job: one thread that accepts nodes, and gives what they send to the Coordinator.

    nodes --- TCP (frames.py) ---> Server --- join, handle, lose, time ---> Coordinator
          <----------------------         <--- actions --------------------

A connection is a stranger's until its first message, a NodeInfo, was accepted: it has HELLO_SECONDS, may send FIRST_BYTES,
and only MAX_STRANGERS are kept, the latest ones. So strangers can cost nothing but lines in the log.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector

from mpwatch.errors import LaunchError
from mpwatch.nodes.coordinator import Close, Coordinator, CoordinatorAction, Decided, LogWarning, Send
from mpwatch.nodes.frames import MAX_BYTES, Connection
from mpwatch.nodes.json_codec import InvalidMessageError
from mpwatch.nodes.messages import Beat, Message, MessageToCoordinator, MessageToNode, NodeInfo
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
PAUSE_SECONDS = 0.05  # after an accept for which there is no descriptor


class _Peer:
    def __init__(self, number: int, connection: Connection, host: str) -> None:
        self.number, self.connection, self.host = number, connection, host
        self.heard_at = monotonic()
        self.is_node = False
        self.closes_at: float | None = None  # it has got its last message


class Server:
    """Serves one job until all nodes know its end, or until `close`.

    Args:
        listener: a listening socket, which the server closes.
        coordinator: decides.
        secret: of the job; empty if it has none.
        node_timeout: seconds of silence after which a node is lost.
        log_warning: called in the server's thread.
        keeps_open: whether the server goes on when the job is over, until `close`.
    """

    def __init__(
        self,
        listener: socket.socket,
        coordinator: Coordinator,
        *,
        secret: bytes,
        node_timeout: float,
        log_warning: Callable[[str], object],
        on_decision: Callable[[Decided], object] | None = None,
    ) -> None:
        self._listener, self.coordinator, self._secret = listener, coordinator, secret
        self._node_timeout, self._log_warning, self._on_decision = node_timeout, log_warning, on_decision
        self.address = listener.getsockname()
        self._peers: dict[int, _Peer] = {}
        self._numbers = 0
        self._warnings_left = MAX_WARNINGS
        self._functions: deque[Callable[[], Iterable[CoordinatorAction]]] = deque()
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

    def post(self, function: Callable[[], Iterable[CoordinatorAction]]) -> None:
        """Let the thread call a function, and execute the actions that it returns."""
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

    def _serve_all(self) -> None:
        check_seconds = min(1.0, self._node_timeout / CHECKS_PER_TIMEOUT)
        checked_at = monotonic()
        while not self._is_over():
            due_at = min(checked_at + check_seconds, self.coordinator.deadline)
            for key, events in self._selector.select(max(0.0, due_at - monotonic())):
                key.data(events)
            while self._functions:
                self._execute(self._functions.popleft()())
            now = monotonic()
            self._execute(self.coordinator.judge_stalls(now))
            if now - checked_at > 2 * check_seconds + 1.0:  # this program was suspended
                self._shift(now - checked_at - check_seconds)
            if now >= checked_at + check_seconds:
                checked_at = now
                self._check_peers(now)
            if now >= self.coordinator.deadline:
                self._execute(self.coordinator.handle_deadline(now))

    def _is_over(self) -> bool:
        is_done = self.coordinator.is_finished and self._on_decision is None
        return self._is_closing or (is_done and not any(peer.connection.has_unsent for peer in self._peers.values()))

    def _shift(self, seconds: float) -> None:
        self.coordinator.shift(seconds)
        for peer in self._peers.values():
            peer.heard_at += seconds

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connected, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left, or the other end is gone
                time.sleep(PAUSE_SECONDS)
                return
            strangers = [peer for peer in self._peers.values() if not peer.is_node]
            if len(strangers) >= MAX_STRANGERS:
                self._remove(strangers[0])
            self._numbers += 1
            peer = _Peer(self._numbers, Connection(connected, self._secret, is_server=True), str(address[0]))
            self._peers[peer.number] = peer
            self._selector.register(connected, EVENT_READ | EVENT_WRITE, partial(self._serve, peer))

    def _serve(self, peer: _Peer, events: int) -> None:
        if peer.number not in self._peers:  # it was removed in this wake-up
            return
        if peer.closes_at is not None:
            if events & EVENT_READ and peer.connection.drain():
                self._remove(peer)
            return
        if events & EVENT_WRITE:
            peer.connection.flush()
        if events & EVENT_READ:
            self._read(peer)
        if peer.number not in self._peers or peer.closes_at is not None:
            return
        if peer.connection.end:
            self._lose(peer, f"its connection has ended ({peer.connection.end}): its program or its machine has failed")
        else:
            self._await(peer)

    def _read(self, peer: _Peer) -> None:
        try:
            for message in peer.connection.receive():
                if peer.closes_at is None:
                    self._handle(peer, message)
        except InvalidMessageError as error:
            self._warn(f"a connection from {peer.host} was refused: {error}")
            self._lose(peer, f"it has sent what cannot be read: {error}")

    def _await(self, peer: _Peer) -> None:
        wanted = EVENT_READ | (EVENT_WRITE if peer.connection.has_unsent else 0)
        self._selector.modify(peer.connection.socket, wanted, partial(self._serve, peer))

    def _handle(self, peer: _Peer, message: Message) -> None:
        peer.heard_at = monotonic()
        if not isinstance(message, MessageToCoordinator) or peer.is_node is isinstance(message, NodeInfo):
            raise InvalidMessageError(f"{type(message).__name__} is not expected now")
        if isinstance(message, NodeInfo):
            peer.is_node, peer.connection.framing.limit = True, MAX_BYTES
            self._execute(self.coordinator.join(peer.number, message, monotonic()))
        elif isinstance(message, Beat):
            self._send(peer, message)
        else:
            self._execute(self.coordinator.handle(peer.number, message, monotonic()))

    def _execute(self, actions: Iterable[CoordinatorAction]) -> None:
        for action in actions:
            if isinstance(action, LogWarning):
                self._log_warning(action.text)
            elif isinstance(action, Decided):
                if self._on_decision is not None:
                    self._on_decision(action)
            elif (peer := self._peers.get(action.node)) is None:
                continue
            elif isinstance(action, Send):
                self._send(peer, action.message)
            else:
                assert isinstance(action, Close)
                self._send(peer, action.message)
                peer.connection.shut_down()
                peer.closes_at = monotonic() + LINGER_SECONDS
                self._selector.modify(peer.connection.socket, EVENT_READ, partial(self._serve, peer))

    def _send(self, peer: _Peer, message: MessageToNode) -> None:
        if peer.connection.end:
            return
        peer.connection.send(message)
        if peer.connection.has_unsent:
            self._await(peer)

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
            elif not peer.is_node and silent > HELLO_SECONDS:
                self._remove(peer)

    def _lose(self, peer: _Peer, reason: str) -> None:
        self._remove(peer)
        if peer.is_node:
            self._execute(self.coordinator.lose(peer.number, reason, monotonic()))

    def _remove(self, peer: _Peer) -> None:
        del self._peers[peer.number]
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection.socket)
        peer.connection.close()

    def _warn(self, text: str) -> None:
        if self._warnings_left:
            self._warnings_left -= 1
            self._log_warning(text)

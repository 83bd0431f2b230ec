"""The two sockets over which a rank reports its collectives to the watcher. Runs in the watcher thread.

    watcher --- one byte ---> request socket ---> rank --- one line of JSON ---> watcher
    rank --- the stack of a crash ---> crash socket: held back until the rank has answered

The rank opens both sockets when it makes its first torch process group. See worker/collectives.py.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mpwatch.os_support.descriptors import MSG_NOSIGNAL
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.processes.selector import Selector

READ_SIZE = 1 << 16
MAX_ANSWER = 1 << 22  # bytes; an answer of 64 collectives in a group of 1,000 ranks has 0.03 MB


class CollectiveSockets:
    """The two sockets of one rank, which the rank opens. It is crashing if it has begun to write the stack of a crash."""

    def __init__(self, selector: Selector[Any]) -> None:
        self.is_pending = self.is_crashing = False
        self._selector = selector
        self._requests: socket.socket | None = None
        self._crash: socket.socket | None = None
        self._on_crash: Callable[[], Any] = bool
        self._answer = bytearray()

    @property
    def is_open(self) -> bool:
        return self._requests is not None

    def open(self, fd: int, on_readable: Callable[[], Any], *, is_crash_socket: bool) -> None:
        """Take over a descriptor that the rank has sent. Raises OSError."""
        end = socket.socket(fileno=fd)
        end.setblocking(False)
        if is_crash_socket:
            self._close(self._crash)
            self._crash, self._on_crash = end, on_readable
        else:
            self._close(self._requests)
            self._requests = end
        self._selector.add(end.fileno(), on_readable)

    def ask(self) -> bool:
        """Ask the rank for its collectives, unless it has not answered yet. Return False if it cannot be asked."""
        if self._requests is None:
            return False
        if not self.is_pending:
            try:
                self._requests.send(b"?", MSG_NOSIGNAL)
            except OSError:  # the rank is dead, or has closed its end
                return False
            self.is_pending = True
        return True

    def read_answer(self) -> RankCollectives | None:
        assert self._requests is not None
        try:
            data = self._requests.recv(READ_SIZE)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self._answer += data
        if not data or len(self._answer) > MAX_ANSWER:
            self._close_requests()
            return None
        if not self._answer.endswith(b"\n"):
            return None
        text = bytes(self._answer)
        self._answer.clear()
        self.is_pending = False
        try:
            return RankCollectives.from_json(text)
        except (ValueError, LookupError, TypeError):  # other code of the rank has written to the socket
            self._close_requests()
            return None

    def hold_crash(self) -> bool:
        """Ask a crashing rank for its collectives, and let it wait for `read_crash`. Return True if it waits only from now
        on.
        """
        if self.is_crashing or self._crash is None or not self._has_crash_data(self._crash) or not self.ask():
            return False
        self.is_crashing = True
        self._selector.remove(self._crash.fileno())
        return True

    @staticmethod
    def _has_crash_data(crash: socket.socket) -> bool:
        """A rank that ends without a crash closes the socket and writes nothing."""
        try:
            return bool(crash.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def read_crash(self) -> bytes:
        """Let the crashing rank continue, and return the part of the crash stack that the rank has written so far."""
        data = b""
        if self._crash is None:
            return data
        with suppress(KeyError):  # it is registered
            self._selector.add(self._crash.fileno(), self._on_crash)
        try:
            while more := self._crash.recv(READ_SIZE):
                data += more
        except BlockingIOError:
            return data
        except OSError:  # the rank is dead, and has not read everything
            pass
        self._close(self._crash)
        self._crash = None
        return data

    def close(self) -> None:
        self._close_requests()
        self._close(self._crash)
        self._crash = None

    def _close_requests(self) -> None:
        self._close(self._requests)
        self._requests, self.is_pending = None, False

    def _close(self, end: socket.socket | None) -> None:
        if end is not None:
            self._selector.remove(end.fileno())
            end.close()

"""The socket over which the watcher asks a rank for its collectives. Runs in the watcher thread.

    watcher --- one byte ---> rank --- CALLED_COLLECTIVES, over its channel ---> watcher
    rank --- the stack of a crash: held back until the rank has answered ---> watcher

The rank opens it when it makes its first torch process group. See worker/collectives.py.
"""

import socket
from collections.abc import Callable
from typing import Any

from mpwatch.os_support.descriptors import MSG_NOSIGNAL
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.processes.selector import Selector

READ_SIZE = 1 << 16


class CollectiveSocket:
    """The socket of one rank, which can be asked while it is open, and those who wait for the rank's answer."""

    def __init__(self, selector: Selector[Any]) -> None:
        self._selector = selector
        self._socket: socket.socket | None = None
        self._receivers: dict[tuple[Any, ...], None] = {}  # each once: a function and its arguments

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    @property
    def is_pending(self) -> bool:
        return bool(self._receivers)

    def open(self, fd: int, on_crash: Callable[[], Any]) -> None:
        """Take over a descriptor that the rank has sent. Raises OSError."""
        self.close()
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._selector.add(fd, on_crash)

    def ask(self, receive: Callable[..., object], *args: object) -> bool:
        """Ask the rank for its collectives, and then call `receive(*args, answer)`, with None if the rank cannot answer.

        If an answer is awaited already, that one counts. Return False if the rank cannot be asked.
        """
        if self._socket is None:
            return False
        if not self._receivers:
            try:
                self._socket.send(b"?", MSG_NOSIGNAL)
            except OSError:  # the rank is dead, or has closed its end
                return False
        self._receivers[receive, *args] = None
        return True

    def pass_on(self, answer: RankCollectives | None) -> None:
        receivers, self._receivers = self._receivers, {}
        for receive, *args in receivers:
            receive(*args, answer)

    def hold_crash(self) -> bool:
        """Let a rank that writes the stack of a crash wait until `read_crash`. Return False if it ends without a crash."""
        if self._socket is None:
            return False
        try:
            is_crashing = bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            is_crashing = False
        self._selector.remove(self._socket.fileno())
        return is_crashing

    def read_crash(self, on_more: Callable[[], Any]) -> bytes:
        """Return the part of the stack that the rank has written so far, and let it go on."""
        data = b""
        if self._socket is None:
            return data
        self._selector.remove(self._socket.fileno())
        try:
            while more := self._socket.recv(READ_SIZE):
                data += more
        except BlockingIOError:
            self._selector.add(self._socket.fileno(), on_more)
        except OSError:  # the rank is dead, and has not read everything
            pass
        return data

    def close(self) -> None:
        if self._socket is not None:
            self._selector.remove(self._socket.fileno())
            self._socket.close()
            self._socket = None
        self.pass_on(None)

"""A rank's end of the line to the watcher. Runs in a rank.

The descriptor is a number that user code can close, and that the next file it opens then gets. So each use first looks
whether the number still means our socket; an answer that cannot be sent is left in memory (wire/lastwords.py).
"""

import array
import os
import socket

from ..wire.lastwords import LastWords
from ..wire.messages import HEADER, Kind, Message, frame, parse_header
from ..wire.payload import MAX_DESCRIPTORS

__all__ = ["Channel"]


class Channel:
    """Blocking, for the rank's main thread alone."""

    def __init__(self, fd: int, last_words: LastWords) -> None:
        self._fd = fd
        self._identity = _identity(self._fd)
        os.set_inheritable(self._fd, False)  # a program that the rank executes has no part in this
        self._last_words = last_words

    def send(self, kind: Kind, body: bytes = b"") -> bool:
        """Send, or leave it for the watcher to find; False if there was no way to do either."""
        data = frame(kind, body)
        if self._is_ours():
            try:
                _write(self._fd, data)
            except OSError:  # the watcher has gone, or has heard enough
                return False
            return True
        return self._last_words.leave_answer(data)

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and the descriptors that came with it; None once there will be none."""
        if not self._is_ours():
            return None
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=self._fd)
        try:
            return _read_message(line)
        except OSError:
            return None
        finally:
            line.detach()  # the number stays; whoever holds an object of it must not close it

    def _is_ours(self) -> bool:
        try:
            return _identity(self._fd) == self._identity
        except OSError:
            return False


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _read_message(line: socket.socket) -> tuple[Message, list[int]] | None:
    head, fds = _receive_with_descriptors(line)
    while 0 < len(head) < HEADER.size:
        more = line.recv(HEADER.size - len(head))
        if not more:
            return None
        head += more
    if not head:
        return None
    kind, stamp, length = parse_header(head)
    body = bytearray()
    while len(body) < length:
        more = line.recv(length - len(body))
        if not more:
            return None
        body += more
    return Message(kind, stamp, bytes(body)), fds


def _receive_with_descriptors(line: socket.socket) -> tuple[bytes, list[int]]:
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, _, _ = line.recvmsg(HEADER.size, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    fds = array.array("i")
    for level, kind, numbers in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(numbers[: len(numbers) - len(numbers) % fds.itemsize])
    return data, list(fds)

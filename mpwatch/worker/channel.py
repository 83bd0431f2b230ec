"""A rank's end of the line to the watcher. Runs in a rank.

The descriptor is a number that user code can close, and that the next file it opens then gets. So each use first looks
whether the number still means our socket; an answer that cannot be sent is left in memory (wire/lastwords.py).
"""

import array
import os
import socket

from ..platform import write_all
from ..wire.lastwords import LastWords
from ..wire.messages import HEADER, MAX_DESCRIPTORS, Kind, frame, parse_header

__all__ = ["Channel"]

STDERR = 2


class Channel:
    """Blocking, for the rank's main thread alone."""

    def __init__(self, fd: int, last_words: LastWords) -> None:
        self._fd = fd
        self._identity = _identity(self._fd)
        os.set_inheritable(self._fd, False)  # a program that the rank executes has no part in this
        self._last_words = last_words
        self._spare = -1

    def send(self, kind: Kind, body: bytes = b"", stamp: float | None = None) -> bool:
        """Send, or leave it for the watcher to find; False if there was no way to do either."""
        data = frame(kind, body, stamp)
        if self._is_ours():
            try:
                write_all(self._fd, data)
            except OSError:  # the watcher has gone, or has heard enough
                return False
            return True
        return self._last_words.leave(data)

    def receive_call(self) -> list[int] | None:
        """The descriptors of the next call, its own first; None once there will be no more calls."""
        if not self._is_ours():
            return None
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=self._fd)
        try:
            return _read_call(line)
        except OSError:
            return None
        finally:
            line.detach()  # the number stays; whoever holds an object of it must not close it

    def keep_a_descriptor(self) -> None:
        """Have one more than is needed, for when the function has taken all."""
        if self._spare == -1:
            self._spare = os.dup(self._fd)

    def free_a_descriptor(self) -> None:
        """Give up the one that was kept. It may have been closed meanwhile, and its number be a file's."""
        if self._spare != -1 and _is_still(self._spare, self._identity):
            os.close(self._spare)
        self._spare = -1

    def _is_ours(self) -> bool:
        return _is_still(self._fd, self._identity)


def _is_still(fd: int, identity: tuple[int, int]) -> bool:
    try:
        return _identity(fd) == identity
    except OSError:
        return False


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _read_call(line: socket.socket) -> list[int] | None:
    fds: list[int] = []
    while True:
        head, more = _receive_with_descriptors(line)
        fds += more
        while 0 < len(head) < HEADER.size and (rest := line.recv(HEADER.size - len(head))):
            head += rest
        if len(head) < HEADER.size:
            return None
        kind, _, _ = parse_header(head)
        if kind is Kind.PRINTED:
            _pass_on(fds)
            fds.clear()
        elif kind is not Kind.DESCRIPTORS:
            return fds if kind is Kind.CALL else None


def _pass_on(fds: list[int]) -> None:
    """What this interpreter had printed before it had a stderr: it is the rank that waits if nobody reads there."""
    for fd in fds:
        with open(fd, "rb") as file:
            file.seek(0)
            try:
                write_all(STDERR, file.read())
            except OSError:  # nobody will read it
                continue


def _receive_with_descriptors(line: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * fds.itemsize)
    data, ancillary, flags, _ = line.recvmsg(HEADER.size, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    for level, kind, numbers in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(numbers[: len(numbers) - len(numbers) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:  # no room for them in this process
        for fd in fds:
            os.close(fd)
        return data, []
    return data, list(fds)

"""A rank's end of the line to the watcher. Runs in a rank.

The descriptor is a number that user code can close, and that the next file it opens then gets. So each use first looks
whether the number still means our socket; an answer that cannot be sent is left in memory (wire/slots.py).
"""

import os
import select
import socket
from io import FileIO

from mpwatch.os_support.descriptors import MSG_NOSIGNAL, STDERR, receive, write_all
from mpwatch.wire.messages import HEADER, MAX_DESCRIPTORS, MessageKind, frame, parse_header
from mpwatch.wire.shared_memory import WORDS, BlackBox


class Channel:
    """Blocking, for the rank's main thread alone."""

    def __init__(self, fd: int, last_words: BlackBox) -> None:
        self._fd = fd
        self._identity = _identity(self._fd)
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fd)
        os.set_inheritable(self._fd, False)  # a program that the rank executes has no part in this
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._last_words = last_words
        self._spare = -1

    def send(self, kind: MessageKind, body: bytes = b"", stamp: float | None = None) -> bool:
        """Send, or leave it for the watcher to find; False if there was no way to do either."""
        data = frame(kind, body, stamp)
        if self._is_ours():
            try:
                write_all(self._fd, data)
            except OSError:  # the watcher has gone, or has heard enough
                return False
            return True
        return self._last_words.leave(data)

    def send_file(self, kind: MessageKind, file: FileIO, stamp: float) -> bool:
        """The same with a file in the body's place. Raises OSError if the system does not let it pass."""
        fd = file.fileno()
        if not self._is_ours():
            return self._last_words.leave(frame(kind, os.pread(fd, WORDS, 0), stamp))  # which is too much if it is cut off
        try:
            socket.send_fds(self._line, [frame(kind, stamp=stamp)], [fd], MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive_call(self) -> tuple[bytes, list[int] | None] | None:
        """The next call, as payload.unpack takes it; None once there will be no more calls."""
        if not self._is_ours():
            return None
        try:
            # not in recvmsg(2): who sleeps there is also woken when the watcher has read what was sent
            self._poll.poll()
            return _read_call(self._line)
        except OSError:
            return None

    def let_go(self) -> None:
        """No more calls. The number stays, with whoever has it by now: nothing that is closed with an object."""
        self._line.detach()

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


def _read_call(line: socket.socket) -> tuple[bytes, list[int] | None] | None:
    fds: list[int] = []
    has_all = True
    while True:
        head, more, is_cut = receive(line, HEADER.size, MAX_DESCRIPTORS)
        fds += more
        has_all &= not is_cut
        head += _read_exactly(line, HEADER.size - len(head)) if head else b""
        if len(head) < HEADER.size:
            return None
        kind, _, length = parse_header(head)
        body = _read_exactly(line, length)
        if kind is MessageKind.STARTUP_OUTPUT:
            _pass_on(fds)
            fds, has_all = [], True
        elif kind is not MessageKind.DESCRIPTORS:
            break
    if not has_all:
        while fds:
            os.close(fds.pop())
    return (body, fds if has_all else None) if kind is MessageKind.CALL and len(body) == length else None


def _read_exactly(line: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer if no more will come."""
    data = b""
    while len(data) < size and (more := line.recv(size - len(data))):
        data += more
    return data


def _pass_on(fds: list[int]) -> None:
    """What this interpreter had printed before it had a stderr: it is the rank that waits if nobody reads there."""
    for fd in fds:
        with open(fd, "rb") as file:
            file.seek(0)
            try:
                write_all(STDERR, file.read())
            except OSError:  # nobody will read it
                continue

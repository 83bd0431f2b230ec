"""The rank's end of the channel to the watcher. This module runs in a rank."""

import errno
import os
import select
import socket
import threading
import time
from contextlib import suppress

from mpwatch.os_support.descriptors import MSG_NOSIGNAL, receive_with_fds
from mpwatch.wire.messages import CALL_NUMBER, MAX_DESCRIPTORS, FrameDecoder, Message, MessageKind, encode_frame

READ_SIZE = 1 << 13  # bytes; most calls are shorter
RETRY_SECONDS = 0.01


class Channel:
    """The channel, for the rank's main thread. Other threads may call only `send` and `request_stop`. `send` returns False
    if the channel is gone: the watcher is dead, or the function has closed it.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fd)
        os.set_inheritable(fd, False)  # a program that the rank executes must not keep it open
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._decoder = FrameDecoder()
        self._messages: list[Message] = []  # received, and not handled yet
        self._lock = threading.Lock()  # one message at a time
        self._is_stop_unsent = False

    @property
    def is_busy(self) -> bool:
        return self._lock.locked()

    def send(self, kind: MessageKind, body: bytes = b"", stamp: float | None = None, *, fd: int | None = None) -> bool:
        data = encode_frame(kind, body, stamp)
        try:
            with self._lock:
                if fd is None:
                    self._socket.sendall(data, MSG_NOSIGNAL)
                else:
                    self._send_file(data, fd)
        except OSError:
            return False
        self._send_stop_request()
        return True

    def _send_file(self, data: bytes, fd: int) -> None:
        while True:
            try:
                socket.send_fds(self._socket, [data], [fd], MSG_NOSIGNAL)
                return
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
            time.sleep(RETRY_SECONDS)  # as many files as `ulimit -n` allows are on their way. The watcher receives some soon

    def request_stop(self) -> None:
        """Any thread and any signal handler may call this. If it interrupts `send`, the request comes after that message."""
        self._is_stop_unsent = True
        self._send_stop_request()

    def _send_stop_request(self) -> None:
        while self._is_stop_unsent and not self._lock.locked():  # the code that has the lock comes here, too
            with self._lock, suppress(OSError):  # the watcher is dead, or has closed the channel
                self._is_stop_unsent = False
                self._socket.sendall(encode_frame(MessageKind.STOP_REQUESTED), MSG_NOSIGNAL)

    def receive_call(self) -> tuple[int, bytes, list[int] | None] | None:
        """Return the number of the next call, and the arguments for `call_payload.unpack`. None: no call will follow."""
        with suppress(OSError):
            return self._read_call()
        return None

    def _read_call(self) -> tuple[int, bytes, list[int] | None] | None:
        fds: list[int] = []
        has_all = True
        while True:
            while not self._messages:
                # Not in recvmsg(2): a process that sleeps there also wakes up when the watcher has read what the rank sent.
                self._poll.poll()
                data, more, is_cut = receive_with_fds(self._socket, READ_SIZE, MAX_DESCRIPTORS)
                if not data:
                    return None
                self._messages += self._decoder.feed(data)
                fds += more  # they belong to the frame that ends here: recvmsg reads nothing that follows descriptors
                has_all &= not is_cut
            message = self._messages.pop(0)
            if message.kind is MessageKind.CALL:
                break
            if message.kind is not MessageKind.DESCRIPTORS:
                return None
        if not has_all:
            while fds:
                os.close(fds.pop())
        (number,) = CALL_NUMBER.unpack_from(message.body)
        return number, message.body[CALL_NUMBER.size :], fds if has_all else None

    def detach(self) -> None:
        """Leave the descriptor open: if user code has closed it, another file may have its number now."""
        self._socket.detach()

"""A pair of sockets, with which any thread or signal can wake up a thread that waits for descriptors."""

import socket
from contextlib import suppress

from mpwatch.errors import LaunchError
from mpwatch.wire.resource_errors import with_remedy


class WakeupPipe:
    """A pair of connected sockets, with which another thread or a signal wakes up a waiting thread.

    A thread waits until the first socket is readable. Each call of `wake` writes a byte to the second socket. If
    `write_fd` was passed to `signal.set_wakeup_fd`, Python writes a byte to the second socket for each signal. Any thread
    and any signal handler can call `wake` at any time. The first socket stays readable until `drain` is called. So if `wake`
    is called before a thread begins to wait, the thread wakes up immediately.
    """

    def __init__(self) -> None:
        """Create the sockets. Raises LaunchError if this process cannot open more descriptors."""
        try:
            self._pair = socket.socketpair()  # objects that close themselves, unlike the ends of os.pipe()
        except OSError as error:
            raise LaunchError(with_remedy("signals cannot be waited for", error)) from error
        for end in self._pair:
            end.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that the thread must wait for."""
        return self._pair[0].fileno()

    @property
    def write_fd(self) -> int:
        """The descriptor for `signal.set_wakeup_fd`."""
        return self._pair[1].fileno()

    def wake(self) -> None:
        with suppress(OSError):  # if the pipe is full, the reader wakes up anyway; if it is closed, there is no reader
            self._pair[1].send(b"\0")

    def drain(self) -> bytes:
        """Return the bytes that were written to the pair of sockets since the last `drain`.

        A zero byte comes from the method `wake`, and each other byte is the number of a signal.
        """
        with suppress(OSError):
            return self._pair[0].recv(4096)
        return b""

    def close(self) -> None:
        for end in self._pair:
            end.close()

"""A pair of sockets that wakes up a thread that waits for descriptors. Any thread or signal can write to the pair."""

import socket
from contextlib import suppress

from mpwatch.errors import LaunchError
from mpwatch.wire.resource_errors import with_remedy


class WakeupPipe:
    """A pair of sockets. A thread that waits for the pair is woken up by `wake`, or by a signal.

    A thread can wait for the pair together with other descriptors. Any thread and any signal handler can call `wake` at any
    time. The pair stays readable until `drain` is called, so a wake-up that comes before the wait is not lost.
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
        """Return the descriptor to wait for."""
        return self._pair[0].fileno()

    @property
    def write_fd(self) -> int:
        """The descriptor for `signal.set_wakeup_fd`. Any byte that is written to this descriptor wakes up the reader."""
        return self._pair[1].fileno()

    def wake(self) -> None:
        with suppress(OSError):  # if the pipe is full, the reader wakes up anyway; if it is closed, there is no reader
            self._pair[1].send(b"\0")

    def drain(self) -> bytes:
        """Return the bytes that were written since the last `drain`.

        `wake` writes a zero, and a signal writes its number.
        """
        with suppress(OSError):
            return self._pair[0].recv(4096)
        return b""

    def close(self) -> None:
        for end in self._pair:
            end.close()

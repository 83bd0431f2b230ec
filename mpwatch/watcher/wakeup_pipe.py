"""A pair of sockets with which any thread, or a signal, wakes up a thread that waits for descriptors."""

import socket
from contextlib import suppress

from mpwatch.errors import LaunchError
from mpwatch.wire.resource_errors import with_remedy


class WakeupPipe:
    """A pair of sockets that wakes up the thread that waits for it.

    A thread can wait for it together with other descriptors. Any thread and any signal handler can call `wake` at any time.
    It stays readable until `drain`, so a wake-up that comes before the wait is not lost.
    """

    def __init__(self) -> None:
        """Raise LaunchError if there is no descriptor left."""
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
        """The descriptor for `signal.set_wakeup_fd`: any byte written to it wakes up the reader."""
        return self._pair[1].fileno()

    def wake(self) -> None:
        with suppress(OSError):  # full: the reader is about to wake up anyway; closed: there is no reader any more
            self._pair[1].send(b"\0")

    def drain(self) -> bytes:
        """Return the bytes that were written since the last call: a zero for each `wake`, a number for each signal."""
        with suppress(OSError):
            return self._pair[0].recv(4096)
        return b""

    def close(self) -> None:
        for end in self._pair:
            end.close()

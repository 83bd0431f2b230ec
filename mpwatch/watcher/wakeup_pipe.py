"""A pair of sockets, with which any thread or signal can wake up a thread that waits for descriptors."""

import socket
from contextlib import suppress

from mpwatch.errors import LaunchError
from mpwatch.wire.resource_errors import with_remedy


class WakeupPipe:
    """Two connected sockets. A thread waits until the first is readable; any thread or signal handler may call `wake`.

    If `wake` comes before the wait, the wait ends at once, since the socket stays readable until `drain`. With
    `signal.set_wakeup_fd(write_fd)`, each signal ends the wait, too.
    """

    def __init__(self) -> None:
        try:
            self._pair = socket.socketpair()  # objects that close themselves, unlike the ends of os.pipe()
        except OSError as error:
            raise LaunchError(with_remedy("signals cannot be waited for", error)) from error
        for end in self._pair:
            end.setblocking(False)

    def fileno(self) -> int:
        return self._pair[0].fileno()

    @property
    def write_fd(self) -> int:
        return self._pair[1].fileno()

    def wake(self) -> None:
        with suppress(OSError):  # if the pipe is full, the reader wakes up anyway; if it is closed, there is no reader
            self._pair[1].send(b"\0")

    def drain(self) -> bytes:
        """Return the bytes since the last `drain`: zero for each `wake`, and the numbers of signals."""
        with suppress(OSError):
            return self._pair[0].recv(4096)
        return b""

    def close(self) -> None:
        for end in self._pair:
            end.close()

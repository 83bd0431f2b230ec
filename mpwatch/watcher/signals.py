"""What the host's signals do during a run: they are noted, wake the loop, and are delivered again when all is cleaned up.

Python runs a handler between any two bytecodes of the main thread, and one that raises (Ctrl-C) would do so in the middle
of starting or burying a rank. So for the length of a run, SIGINT, SIGTERM and SIGHUP raise nothing. Signals that the host
ignores, or that something other than Python handles, are left alone; off the main thread, where Python delivers none, so
are all.
"""

import os
import signal
import threading
from contextlib import suppress
from typing import Any, Self

from ..errors import LaunchError

__all__ = ["HostSignals"]

TAKEN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HostSignals:
    """A context manager; inside it, `fileno` becomes readable when a signal has come, and `take` says which.

    On leaving, handlers and wake-up descriptor are the host's own again. If it is left by an exception, the signals that
    have come are then delivered; else whoever uses it does that, by `deliver`: none is ever lost.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._handlers: dict[int, Any] = {}
        self._hosts_fd = -1

    def __enter__(self) -> Self:
        try:
            self._read_end, self._write_end = os.pipe()
        except OSError as error:
            raise LaunchError(f"signals cannot be waited for: {error}; see `ulimit -n`") from error
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        try:
            if threading.current_thread() is threading.main_thread():
                self._install()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._restore()
        if kind is not None:
            self.deliver()

    def deliver(self) -> None:
        """Let each signal do what it would have done; SIGINT usually raises KeyboardInterrupt."""
        for number in self.received:
            signal.raise_signal(number)

    def _restore(self) -> None:
        if self._handlers:
            signal.set_wakeup_fd(self._hosts_fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.take()
        os.close(self._read_end)
        os.close(self._write_end)

    def _install(self) -> None:
        hosts = {int(number): signal.getsignal(number) for number in TAKEN}
        self._handlers = {number: how for number, how in hosts.items() if how not in (signal.SIG_IGN, None)}
        if self._handlers:
            # C code writes to it, whichever thread the kernel has chosen for the signal
            self._hosts_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in self._handlers:
            signal.signal(number, _note)

    def fileno(self) -> int:
        """What to wait on."""
        return self._read_end

    def take(self) -> list[int]:
        """The signals that have come for us since the last call; others are passed on to the host."""
        try:
            numbers = os.read(self._read_end, 4096)
        except BlockingIOError:
            return []
        foreign = bytes(number for number in numbers if number not in self._handlers)
        if foreign and self._hosts_fd != -1:
            with suppress(OSError):  # full: the host has not looked for a while, and is woken already
                os.write(self._hosts_fd, foreign)
        ours = [number for number in numbers if number in self._handlers]
        self.received += ours
        return ours


def _note(_: int, __: object) -> None:
    """The handler that raises nothing: the wake-up descriptor has the number already."""

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
        self._taken = 0  # how many of them `take` has told
        self._handlers: dict[int, Any] = {}
        self._hosts_fd = -1
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        try:
            self._read_end, self._write_end = os.pipe()
        except OSError as error:
            raise LaunchError(f"signals cannot be waited for: {error}; see `ulimit -n`") from error
        try:
            os.set_blocking(self._read_end, False)
            os.set_blocking(self._write_end, False)
            if threading.current_thread() is threading.main_thread():
                self._install()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close()
        if kind is not None:
            self.deliver()

    def fileno(self) -> int:
        """What to wait on."""
        return self._read_end

    def take(self) -> list[int]:
        """The signals that have come since the last call. What woke us for the host's own handlers is passed on to it."""
        with suppress(BlockingIOError):
            woken_by = os.read(self._read_end, 4096)
            foreign = bytes(number for number in woken_by if number not in self._handlers)
            if foreign and self._hosts_fd != -1:
                with suppress(OSError):  # full: the host has not looked for a while, and is woken already
                    os.write(self._hosts_fd, foreign)
        new = self.received[self._taken :]
        self._taken += len(new)
        return new

    def deliver(self) -> None:
        """Let each signal do what it would have done; SIGINT usually raises KeyboardInterrupt."""
        while self.received:
            number = self.received.pop(0)
            try:
                signal.raise_signal(number)
            finally:
                self.deliver()

    def _install(self) -> None:
        hosts = {int(number): signal.getsignal(number) for number in TAKEN}
        self._handlers = {number: how for number, how in hosts.items() if how not in (signal.SIG_IGN, None)}
        for number in self._handlers:
            signal.signal(number, self._note)
        if self._handlers:
            # C code writes to it, whichever thread the kernel has chosen for the signal
            self._hosts_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)

    def _note(self, number: int, _: object) -> None:
        """The handler while the run lasts: the record is made here, and the wake-up descriptor only wakes."""
        if os.getpid() == self._pid:
            self.received.append(number)
            return
        # A child that the host has forked meanwhile, by another thread: the run is none of its business.
        self._restore()
        signal.raise_signal(number)

    def _restore(self) -> None:
        if self._handlers:
            signal.set_wakeup_fd(self._hosts_fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _close(self) -> None:
        self._restore()
        os.close(self._read_end)
        os.close(self._write_end)

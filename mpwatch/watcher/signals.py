"""What the host's signals do during a run: they are noted, tell the run to stop, and are delivered again when all is over.

For the length of a run SIGINT, SIGTERM and SIGHUP raise nothing and end nothing. Signals that the host ignores, or that
something other than Python handles, are left alone; off the main thread, where Python delivers none, so are all. Other
signals do what they always do, at once, in the caller's thread: if the host's handler raises, see watch.py.

    kernel ---> C handler, in any thread ---> waker: the caller's thread wakes up ---> Python's handler, `tell` ---> bell

A thread that sleeps on a lock would not do: a signal that comes just before it falls asleep does not wake it.
"""

import os
import signal
import socket
import threading
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from ..errors import LaunchError
from .shortage import with_remedy

__all__ = ["HostSignals"]

TAKEN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HostSignals:
    """The caller's thread takes the signals over, sleeps, and gives them back; each can be done again, should an exception
    have come in the midst of it. The run's thread waits for `fileno` to become readable, and `take` says what came.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._told: list[int] = []
        self._taken = 0  # how many of those `take` has given
        self._handlers: dict[int, Any] = {}
        self._hosts_fds: list[int] = []  # the wake-up descriptor that the host had
        self._pid = os.getpid()
        self._sockets: list[socket.socket] = []
        try:
            for _ in range(2):
                self._sockets += socket.socketpair()  # objects that close themselves, unlike the ends of os.pipe()
        except OSError as error:
            self.close()
            raise LaunchError(with_remedy("signals cannot be waited for", error)) from error
        self._bell, self._button, self._alarm, self._waker = self._sockets
        for end in self._sockets:
            end.setblocking(False)

    def fileno(self) -> int:
        """What to wait on."""
        return self._bell.fileno()

    def take(self) -> list[int]:
        """What has been told since the last call, as signals."""
        with suppress(BlockingIOError):
            self._bell.recv(4096)
        new = self._told[self._taken :]
        self._taken += len(new)
        return new

    def tell(self, number: int) -> None:
        """Have the run do what it does when this signal comes, which itself has been dealt with elsewhere."""
        self._told.append(number)
        with suppress(OSError):  # full: who looks is told all; or closed: the run is over
            self._button.send(b"\0")

    def take_over(self) -> None:
        """From now on they are noted."""
        if threading.current_thread() is not threading.main_thread():
            return
        set_waker = partial(signal.set_wakeup_fd, warn_on_full_buffer=False)
        self._hosts_fds.extend(map(set_waker, [self._waker.fileno()]))  # in one call of C: see platform.anonymous_file
        hosts = {int(number): signal.getsignal(number) for number in TAKEN}
        self._handlers = {number: how for number, how in hosts.items() if how not in (signal.SIG_IGN, None)}
        for number in self._handlers:
            signal.signal(number, self._note)

    def sleep(self) -> None:
        """Until a signal has come, or `wake` is called. What is not for us is passed on to the host's wake-up descriptor."""
        wait([self._alarm])
        with suppress(BlockingIOError):
            woken_by = self._alarm.recv(4096)
            foreign = bytes(number for number in woken_by if number and number not in self._handlers)
            if foreign and self._hosts_fds[0] != -1:
                with suppress(OSError):  # full: the host has not looked for a while, and is woken already
                    os.write(self._hosts_fds[0], foreign)

    def wake(self) -> None:
        """End the sleep of the caller's thread."""
        with suppress(OSError):  # full: it is about to wake up; closed: it is up
            self._waker.send(b"\0")

    def give_back(self) -> None:
        """Handlers and wake-up descriptor are the host's own again."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._hosts_fds:
            signal.set_wakeup_fd(self._hosts_fds[0])

    def deliver(self) -> None:
        """Let each signal do what it would have done; SIGINT usually raises KeyboardInterrupt."""
        while self.received:
            number = self.received.pop(0)
            try:
                signal.raise_signal(number)
            finally:
                self.deliver()

    def close(self) -> None:
        """Give the descriptors back."""
        for end in self._sockets:
            end.close()

    def _note(self, number: int, _: object) -> None:
        """The handler while the run lasts."""
        if os.getpid() == self._pid:
            self.received.append(number)
            self.tell(number)
            return
        # A child that the host has forked meanwhile, by another thread: the run is none of its business.
        self.give_back()
        signal.raise_signal(number)

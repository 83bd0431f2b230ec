"""What the host's signals do during a run. For its length no handler raises anything in the caller's thread:

- SIGINT, SIGTERM and SIGHUP are noted, tell the run to stop, and are delivered again when all is over;
- for any other signal the host's handler is called at once, as ever; what it raises tells the run to stop, and is raised
  when all is over.

Signals that the host ignores, or that something other than Python handles, are left alone; off the main thread, where
Python delivers none, so are all.

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
from ..platform import state_of_process
from ..wire.shortage import with_remedy

__all__ = ["HostSignals"]

NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HostSignals:
    """The caller's thread takes the signals over, sleeps, and gives them back; each can be done again, should an exception
    have come in the midst of it. The run's thread waits for `fileno` to become readable, and `take` says what came.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.raised: BaseException | None = None  # by a handler of the host's
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
        if os.getpid() == self._pid:  # and not a child that the host has forked
            self._told.append(number)
            with suppress(OSError):  # full: who looks is told all; or closed: the run is over
                self._button.send(b"\0")

    def take_over(self) -> None:
        """From now on no handler raises."""
        if threading.current_thread() is not threading.main_thread():
            return
        set_waker = partial(signal.set_wakeup_fd, warn_on_full_buffer=False)
        self._hosts_fds.extend(map(set_waker, [self._waker.fileno()]))  # in one call of C: see platform.anonymous_file
        hosts = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
        self._handlers = {number: how for number, how in hosts.items() if callable(how) or _ends_us(number, how)}
        for number in self._handlers:
            signal.signal(number, self._note if number in NOTED else self._call)

    def sleep(self) -> None:
        """Until a signal has come, or `wake` is called."""
        wait([self._alarm])
        self._pass_on()

    def wake(self) -> None:
        """End the sleep of the caller's thread."""
        with suppress(OSError):  # full: it is about to wake up; closed: it is up
            self._waker.send(b"\0")

    def give_back(self) -> None:
        """Handlers and wake-up descriptor are the host's own again, but for handlers that it has set meanwhile."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) in (self._note, self._call):
                signal.signal(number, handler)
        if self._hosts_fds:
            try:
                signal.set_wakeup_fd(self._hosts_fds[0])
            except (OSError, ValueError):  # the host has closed it, or made it block: it wakes nobody
                signal.set_wakeup_fd(-1)
            self._pass_on()

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

    def _pass_on(self) -> None:
        """What has woken us and is none of the noted ones is the host's wake-up descriptor's, too."""
        with suppress(OSError):  # nothing has come; or it is closed
            woken_by = self._alarm.recv(4096)
            foreign = bytes(number for number in woken_by if number and number not in self.received)
            if foreign and self._hosts_fds[0] != -1:
                os.write(self._hosts_fds[0], foreign)  # full: the host has not looked for a while, and is woken already

    def _note(self, number: int, _: object) -> None:
        """The handler of those that stop the run."""
        if os.getpid() == self._pid:
            self.received.append(number)
            self.tell(number)
            return
        # A child that the host has forked meanwhile, by another thread: the run is none of its business.
        self.give_back()
        signal.raise_signal(number)

    def _call(self, number: int, frame: object) -> None:
        """The handler of all others."""
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            if os.getpid() != self._pid:
                raise
            if self.raised is None:
                self.raised = error
            self.tell(signal.SIGTERM)
        if os.getpid() != self._pid:
            raise RuntimeError("a signal handler has forked a process that waits for its ranks; the copy must end there")


def _ends_us(number: int, handler: object) -> bool:
    """Whether this is a signal that is noted, and would end the program. Python takes what C code handles for that, too."""
    if number not in NOTED or handler is not signal.SIG_DFL:
        return False
    state = state_of_process(os.getpid())
    return state is None or not state.catches(number)

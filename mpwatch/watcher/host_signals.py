"""What the host's signals do during a run. For its length no handler raises anything in the caller's thread:

- SIGINT, SIGTERM and SIGHUP are noted, tell the run to stop, and are delivered again when all is over (but a second SIGINT
  is raised where code of the user's runs meanwhile: an observer, or what decides about a restart);
- for any other signal the host's handler is called at once, as ever; what it raises tells the run to stop, and is raised
  when all is over.

Signals that the host ignores, or that something other than Python handles, are left alone; off the main thread, where
Python delivers none, so are all.

    kernel ---> C handler, in any thread ---> alarm: the caller's thread wakes up ---> Python's handler, `tell` ---> bell

A thread that sleeps on a lock would not do: a signal that comes just before it falls asleep does not wake it.
"""

import os
import signal
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from mpwatch.os_support.processes import state_of_process
from mpwatch.os_support.signals import handlers_in_python, set_handler
from mpwatch.watcher.commands import CommandQueue
from mpwatch.watcher.machine.transitions import Interrupted

NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HostSignals:
    """The caller's thread takes the signals over, sleeps, and gives them back; each can be done again, should an exception
    have come in the midst of it. The thread that watches the ranks is told by mail what came.
    """

    def __init__(self, commands: CommandQueue) -> None:
        self.received: list[int] = []
        self.raised: BaseException | None = None  # by a handler of the host's
        self._commands = commands
        self._caller_wakeup = commands.caller_wakeup
        self._handlers: dict[int, Any] = {}
        self._hosts_fds: list[int] = []  # the wake-up descriptor that the host had
        self._pid = os.getpid()
        self._untold: list[int] = []
        self._may_speak = False
        self.are_taken_over = False
        self.is_in_users_code = False  # an observer's, say, which may take for ever

    def tell(self, number: int) -> None:
        """Have the run do what it does when this signal comes, which itself has been dealt with elsewhere."""
        if os.getpid() == self._pid:  # and not a child that the host has forked
            self._untold.append(number)
            if self._may_speak:
                self.speak_up()

    def speak_up(self) -> None:
        """What is to be stopped has been posted. Before that, idle ranks would have been told, and it would have begun."""
        self._may_speak = True
        with suppress(IndexError):  # a handler may come in between, and tell all
            while True:
                self._commands.post(Interrupted(self._untold.pop(0)))

    def take_over(self) -> None:
        """From now on no handler raises. Nothing if that was tried before."""
        if self.are_taken_over:
            return
        self.are_taken_over = True
        if threading.current_thread() is not threading.main_thread():
            return
        set_waker = partial(signal.set_wakeup_fd, warn_on_full_buffer=False)
        # one call of C, for the reason given in os_support.descriptors.anonymous_file
        self._hosts_fds.extend(map(set_waker, [self._caller_wakeup.write_fd]))
        handlers = handlers_in_python()
        self._handlers = handlers | dict.fromkeys(_that_end_us(handlers), signal.SIG_DFL)
        for number in self._handlers:
            set_handler(number, self._note if number in NOTED else self._call)

    def sleep(self, seconds: float | None = None) -> None:
        """Until a signal has come, or somebody else rings the alarm; no longer than that, if it is said."""
        wait([self._caller_wakeup.fileno()], seconds)
        self._pass_on()

    def doze(self, deadline: float) -> bool:
        """The same, and no longer than to that time of CLOCK_MONOTONIC; False when that is over."""
        patience = deadline - time.monotonic()
        if patience <= 0 or not wait([self._caller_wakeup.fileno()], patience):
            return False
        self._caller_wakeup.drain()
        return True

    def give_back(self) -> None:
        """Handlers and wake-up descriptor are the host's own again, but for handlers that it has set meanwhile."""
        still_ours = [number for number, handler in handlers_in_python().items() if handler in (self._note, self._call)]
        for number in still_ours:
            set_handler(number, self._handlers[number])
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

    def _pass_on(self) -> None:
        """What has woken us and is none of the noted ones is the host's wake-up descriptor's, too."""
        foreign = bytes(number for number in self._caller_wakeup.drain() if number and number not in self.received)
        if foreign and self._hosts_fds[0] != -1:
            with suppress(OSError):  # it is closed, or blocked
                os.write(self._hosts_fds[0], foreign)  # full: the host has not looked for a while, and is woken already

    def _note(self, number: int, _: object) -> None:
        """The handler of those that stop the run."""
        if os.getpid() == self._pid:
            is_urgent = number == signal.SIGINT and number in self.received
            self.received.append(number)
            self.tell(number)
            if is_urgent and self.is_in_users_code:
                raise KeyboardInterrupt
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


def _that_end_us(handlers: Collection[int]) -> list[int]:
    """Those of the noted ones that would end the program. Python takes what C code handles for that, too."""
    default = [number for number in NOTED if number not in handlers and signal.getsignal(number) is signal.SIG_DFL]
    state = state_of_process(os.getpid()) if default else None
    return [number for number in default if state is None or not state.catches(number)]

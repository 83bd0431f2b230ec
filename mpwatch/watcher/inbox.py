"""How threads ask one another for something: they post functions, and the other thread runs them in their order.

    any thread, any signal handler --- Inbox.post ------> watcher thread: run_all
    watcher thread, output thread ---- Outbox.post -----> whichever thread of the program waits for ranks: run_all
    watcher thread ------------------- Timers.call_at --> itself, at that time: run_due

A function in an Inbox runs no user code and does not block. A function in an Outbox may: observers and logging handlers run
there. A WakeupPipe becomes readable when something is posted, so the waiting thread wakes up; a wait for a lock could miss a
signal that comes just before it.
"""

import heapq
import logging
import math
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from mpwatch.errors import LaunchError
from mpwatch.watcher.log import log_now
from mpwatch.wire.resource_errors import with_remedy

Function = Callable[[], object]


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


class WaitingThread(Protocol):
    """A Caller (caller.py)."""

    wakeup: WakeupPipe
    is_waiting: bool
    is_in_main_thread: bool
    has_view: bool


class Inbox:
    """Functions for the watcher thread. Any thread and any signal handler may post."""

    def __init__(self) -> None:
        self.wakeup = WakeupPipe()
        self._functions: deque[Function] = deque()

    def post(self, function: Function) -> None:
        self._functions.append(function)
        self.wakeup.wake()

    def run_all(self) -> None:
        self.wakeup.drain()
        for _ in range(len(self._functions)):
            self._functions.popleft()()

    def close(self) -> None:
        self.wakeup.close()


class Outbox:
    """Functions for the threads of the program that wait for the ranks of one run or one WorkerGroup.

    One thread at a time runs them. A thread that finds another one at it returns at once.
    """

    def __init__(self) -> None:
        self._functions: deque[Function] = deque()
        self._threads: tuple[WaitingThread, ...] = ()  # replaced as a whole, so that `wake` needs no lock
        self._threads_lock = threading.Lock()
        self._run_lock = threading.Lock()

    def post(self, function: Function) -> None:
        self._functions.append(function)
        self.wake()

    def warn(self, text: str, *args: object) -> None:
        """Log a warning in a thread of the program, as a logging handler is user code."""
        self.post(partial(log_now, logging.WARNING, text, *args))

    def wake(self) -> None:
        for thread in self._threads:
            thread.wakeup.wake()

    def run_all(self) -> None:
        """Run the posted functions. If one raises, the others stay for the next call."""
        while self._functions and self._run_lock.acquire(blocking=False):
            try:
                while self._functions:
                    self._functions.popleft()()
            finally:
                self._run_lock.release()

    def list_waiting(self) -> list[WaitingThread]:
        """Return those that wait, in the order in which they have begun."""
        return [thread for thread in self._threads if thread.is_waiting]

    def add(self, thread: WaitingThread) -> list[WaitingThread]:
        """Return those that waited before."""
        with self._threads_lock:
            earlier = self.list_waiting()
            self._threads = (*earlier, thread)
        return earlier

    def remove(self, thread: WaitingThread) -> None:
        with self._threads_lock:
            self._threads = tuple(other for other in self._threads if other is not thread)


class Timers:
    """Functions that the watcher thread calls at a time of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Function]] = []
        self._count = 0  # functions that are due at the same time are called in their order

    @property
    def due_at(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def call_at(self, due_at: float, function: Function) -> None:
        self._count += 1
        heapq.heappush(self._heap, (due_at, self._count, function))

    def run_due(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()

    def shift(self, seconds: float) -> None:
        self._heap = [(due_at + seconds, number, function) for due_at, number, function in self._heap]

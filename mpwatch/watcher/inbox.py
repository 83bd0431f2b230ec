"""How threads ask one another for something: they post functions, and the other thread runs them in their order.

    any thread, any signal handler --- Inbox.post ----> watcher thread: run_all
    watcher thread, output thread ---- Outbox.post ---> whichever thread of the program waits for ranks: run_all

A function in an Inbox runs no user code and does not block. A function in an Outbox may: observers and logging handlers run
there. A descriptor becomes readable when something is posted, so the waiting thread wakes up; a wait for a lock could miss a
signal that comes just before it.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from mpwatch.watcher.wakeup_pipe import WakeupPipe

Function = Callable[[], object]


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

    def post_quietly(self, function: Function) -> None:
        """Post what can wait until the thread wakes up for something else."""
        self._functions.append(function)

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

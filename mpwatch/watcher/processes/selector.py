"""Waits until at least one descriptor of the event loop is readable.

`multiprocessing.connection.wait` would register all descriptors again at each call, and measures its timeout by a clock that
a test may have frozen (os_support/clock.py).

epoll lists the ready descriptors in the order in which they became ready, each once. If rank 1 sends a message, rank 0 dies,
and rank 1 sends a second message, rank 1 comes first, and both messages are read before the death. But if the death comes
first, rank 0 died before rank 1 sent its unread messages.
"""

import selectors
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Self, TypeVar

T = TypeVar("T")
LONGEST_WAIT = 86_400.0  # seconds; epoll_wait(2) takes milliseconds in an int, which is at most 24 days


class Selector(Generic[T]):
    """Waits for descriptors, and returns the handler of each readable descriptor. A Selector is a context manager."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def add(self, fd: int, handler: Callable[[], T]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, handler)

    def remove(self, fd: int) -> None:
        """Call this before the descriptor is closed: epoll reports events of a file while a fork has it open."""
        with suppress(KeyError, ValueError):  # it is not registered, or closed already
            self._selector.unregister(fd)

    def wait(self, seconds: float) -> list[Callable[[], T]]:
        """Return the handlers of the ready descriptors, in the kernel's order. It waits for LONGEST_WAIT at most."""
        return [key.data for key, _ in self._selector.select(min(seconds, LONGEST_WAIT))]

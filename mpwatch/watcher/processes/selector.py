"""The place where the event loop waits.

`multiprocessing.connection.wait` waits on one selector instead of on every descriptor, for two reasons:

- If mpwatch passed all descriptors to `wait`, each call of `wait` would register all descriptors again.
- The selector keeps its set of descriptors in the kernel (epoll). The kernel lists first the descriptor that became ready
  first. For example, if rank 0 dies before rank 1 sends a message, the kernel lists the death of rank 0 first. The watcher
  may read the list much later.

If a descriptor has two events before the watcher reads it, the kernel lists the descriptor only once, at the place of the
first event. So the place in the list can be too early for the second event, but a place is never too late.
"""

import selectors
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
LONGEST_WAIT = 86_400.0  # seconds; poll(2) takes milliseconds in an int, which is at most 24 days


class Selector(Generic[T]):
    """A context manager with the descriptors that a thread waits for, and their handlers."""

    def __init__(self) -> None:
        self._selector: Any = selectors.DefaultSelector()  # epoll or kqueue: another poll can wait for its descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def add(self, fd: int, handler: Callable[[], T]) -> None:
        """Add a descriptor. Raises OSError."""
        self._selector.register(fd, selectors.EVENT_READ, handler)

    def remove(self, fd: int) -> None:
        """Remove a descriptor. Call this method before the descriptor is closed.

        If a descriptor is closed without a call of `remove`, epoll watches it as long as a forked process has a copy of it.
        """
        self._selector.unregister(fd)

    def wait(self, seconds: float | None) -> list[Callable[[], T]]:
        """Return the handlers of the ready descriptors, in the kernel's order.

        Return an empty list if no descriptor becomes ready within `seconds`. If `seconds` is None, wait at most
        LONGEST_WAIT, which is one day.
        """
        ready = self._selector.select(0)  # during a call something is ready most times, and this is faster than `wait`
        if not ready:
            timeout = LONGEST_WAIT if seconds is None else min(max(0.0, seconds), LONGEST_WAIT)
            ready = self._selector.select(0) if wait([self._selector], timeout) else ()
        return [key.data for key, _ in ready]

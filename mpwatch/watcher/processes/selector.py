"""The one place where the watcher thread waits. `Selector` keeps the order in which descriptors became ready.

`multiprocessing.connection.wait` waits on one selector instead of on every descriptor, for two reasons:

- A poll set that is built for each wake-up costs time for every descriptor, even if only one descriptor is ready.
- The kernel's own set (epoll) lists descriptors in the order in which they became ready. If a rank dies before another rank
  sends a message, the death comes first in this list. This is true even if the watcher reads both late. A listed descriptor
  that becomes ready again before it is read keeps its place. So a descriptor can come too early in the list, but never too
  late.
"""

import selectors
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
LONGEST_WAIT = 86_400.0  # seconds; poll(2) takes milliseconds in an int, which is at most 24 days


class Selector(Generic[T]):
    """A context manager with the descriptors to wait for. Each descriptor has a function that is its handler."""

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
        """Remove a descriptor before it is closed. Otherwise a copy in a forked process keeps it in the kernel's set."""
        self._selector.unregister(fd)

    def wait(self, seconds: float | None) -> list[Callable[[], T]]:
        """Return the handlers of the ready descriptors, in the kernel's order.

        The list is empty if no descriptor is ready after `seconds`. There is no limit if `seconds` is None.
        """
        ready = self._selector.select(0)  # during a call something is ready most times, and this is faster than `wait`
        if not ready:
            timeout = LONGEST_WAIT if seconds is None else min(max(0.0, seconds), LONGEST_WAIT)
            ready = self._selector.select(0) if wait([self._selector], timeout) else ()
        return [key.data for key, _ in ready]

"""The one place where the watcher waits, and the order in which things happened there.

`multiprocessing.connection.wait` waits on a selector instead of on each descriptor, for two reasons. A poll set made anew
for each wake-up costs what all descriptors cost, however few have something to say. And where the kernel's own set (epoll)
can be had, it lists descriptors in the order in which they became ready: a rank that died before another spoke comes first,
however late we look. (One that had been listed and speaks again before the next look keeps its old place: it may come too
early, never too late.)
"""

import selectors
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
LONGEST_WAIT = 86_400.0  # poll(2) takes milliseconds in an int, and refuses more than 24 days


class Selector(Generic[T]):
    """Descriptors, and for each what it gives when there is something to read. A context manager."""

    def __init__(self) -> None:
        self._selector: Any = selectors.DefaultSelector()  # epoll's or kqueue's, which can be waited for themselves

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def add(self, fd: int, handler: Callable[[], T]) -> None:
        """Wait for this one, too. Raises OSError."""
        self._selector.register(fd, selectors.EVENT_READ, handler)

    def remove(self, fd: int) -> None:
        """No more; before it is closed, since a copy of it in a forked process would keep it in the kernel's set."""
        self._selector.unregister(fd)

    def wait(self, seconds: float | None) -> list[Callable[[], T]]:
        """The handlers of those that are ready, earliest first where the kernel knows; none when time is up."""
        ready = self._selector.select(0)  # more often than not in the midst of a call: cheaper than a wait
        if not ready:
            patience = LONGEST_WAIT if seconds is None else min(max(0.0, seconds), LONGEST_WAIT)
            ready = self._selector.select(0) if wait([self._selector], patience) else ()
        return [key.data for key, _ in ready]

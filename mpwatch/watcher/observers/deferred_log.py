"""What is to be logged of a run: noted by its thread, logged by the caller's, at once.

A logging handler is code of the user's. It may want a lock that the caller holds, or raise; neither may hold up the run.
"""

import logging
from collections import deque
from collections.abc import Callable

log = logging.getLogger("mpwatch")


class DeferredLog:
    """`wake` has the caller's thread call `say`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._unsaid: deque[tuple[int, str, tuple[object, ...]]] = deque()

    def warning(self, text: str, *args: object) -> None:
        """To be logged as a warning."""
        self._note(logging.WARNING, text, args)

    def debug(self, text: str, *args: object) -> None:
        """To be logged for who looks for a fault of ours."""
        self._note(logging.DEBUG, text, args)

    def say(self) -> None:
        """Log what has been noted. Raises what a handler does, and goes on from there next time."""
        while self._unsaid:
            level, text, args = self._unsaid.popleft()
            log.log(level, text, *args)

    def _note(self, level: int, text: str, args: tuple[object, ...]) -> None:
        self._unsaid.append((level, text, args))
        self._wake()

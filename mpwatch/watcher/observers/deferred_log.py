"""A queue of log records: the watcher thread and the output thread add records, and the caller's thread logs them.

A logging handler is user code, which may wait for a lock. Because a logging handler runs only in the caller's thread, it
never delays the watcher thread or the output thread.
"""

import logging
from collections import deque
from collections.abc import Callable

from mpwatch.watcher.observers.user_errors import ignore_user_errors

log = logging.getLogger("mpwatch")


class DeferredLog:
    """The queue of log records. The function `wake` wakes up the caller's thread, which then calls `emit`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._records: deque[tuple[int, str, tuple[object, ...]]] = deque()

    def warning(self, text: str, *args: object) -> None:
        """Queue a warning. Any thread may call this method."""
        self._queue(logging.WARNING, text, args)

    def debug(self, text: str, *args: object) -> None:
        """Queue a record that helps to find a bug in mpwatch. Any thread may call this method."""
        self._queue(logging.DEBUG, text, args)

    @property
    def has_records(self) -> bool:
        """Whether the queue has log records."""
        return bool(self._records)

    def emit(self) -> None:
        """Log the queued records, in the caller's thread."""
        while self._records:
            level, text, args = self._records.popleft()
            log_now(level, text, *args)

    def _queue(self, level: int, text: str, args: tuple[object, ...]) -> None:
        self._records.append((level, text, args))
        self._wake()


def log_now(level: int, text: str, *args: object, error: BaseException | None = None) -> None:
    """Log a record in the caller's thread.

    Ignore the exceptions of logging handlers, except those that end the run, such as KeyboardInterrupt.

    Args:
        level: a level of the logging module.
        text: the message, which may have placeholders for `args`.
        args: the values of the placeholders, as for `logging.log`.
        error: an exception to log with its traceback.
    """
    with ignore_user_errors():
        log.log(level, text, *args, exc_info=error)

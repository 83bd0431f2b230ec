"""Log records of a run: queued in the watcher thread or the output thread, logged in the caller's thread.

A logging handler is user code. It may wait for a lock that the caller holds, which delays only the caller's thread. What it
raises is ignored, except what ends the run.
"""

import logging
from collections import deque
from collections.abc import Callable

from mpwatch.watcher.observers.user_errors import ignore_user_errors

log = logging.getLogger("mpwatch")


class DeferredLog:
    """The queue of log records. `wake` makes the caller's thread call `emit`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._records: deque[tuple[int, str, tuple[object, ...]]] = deque()

    def warning(self, text: str, *args: object) -> None:
        """Queue a warning. Any thread may call it."""
        self._queue(logging.WARNING, text, args)

    def debug(self, text: str, *args: object) -> None:
        """Queue a record that helps to find a bug in mpwatch. Any thread may call it."""
        self._queue(logging.DEBUG, text, args)

    @property
    def has_records(self) -> bool:
        """Whether there are records to emit."""
        return bool(self._records)

    def emit(self) -> None:
        """Log the queued records, in the caller's thread. After an exception, the next call goes on with the next record."""
        while self._records:
            level, text, args = self._records.popleft()
            log_now(level, text, *args)

    def _queue(self, level: int, text: str, args: tuple[object, ...]) -> None:
        self._records.append((level, text, args))
        self._wake()


def log_now(level: int, text: str, *args: object, error: BaseException | None = None) -> None:
    """Log a record, in the caller's thread. Ignore what a logging handler raises, except what ends the run.

    Args:
        level: of the logging module.
        text: may have placeholders for `args`.
        args: see `logging.log`.
        error: an exception to log with its traceback.
    """
    with ignore_user_errors():
        log.log(level, text, *args, exc_info=error)

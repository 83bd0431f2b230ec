"""Log records of the watcher thread and the output thread, which a thread of the program emits.

A logging handler is user code, which may wait for a lock, so it never runs in a thread that ranks depend on.
"""

import logging
from contextlib import suppress
from functools import partial

from mpwatch.watcher.inbox import Outbox
from mpwatch.wire.exceptions.decoder import USER_ERRORS

log = logging.getLogger("mpwatch")


class DeferredLog:
    """Any thread may call its methods."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def warning(self, text: str, *args: object) -> None:
        self._outbox.post(partial(log_now, logging.WARNING, text, *args))


def log_now(level: int, text: str, *args: object, error: BaseException | None = None) -> None:
    """Exceptions of logging handlers are ignored, except those that end the run, such as KeyboardInterrupt."""
    with suppress(*USER_ERRORS):
        log.log(level, text, *args, exc_info=error)

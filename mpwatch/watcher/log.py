"""Log records, made in a thread of the program. The watcher thread and the output thread call `Outbox.warn` instead.

A logging handler is user code, which may wait for a lock, so it never runs in a thread that ranks depend on.
"""

import logging
from contextlib import suppress

from mpwatch.wire.exceptions.decoder import USER_ERRORS

log = logging.getLogger("mpwatch")


def log_now(level: int, text: str, *args: object, error: BaseException | None = None) -> None:
    """Exceptions of logging handlers are ignored, except those that end the run, such as KeyboardInterrupt."""
    with suppress(*USER_ERRORS):
        log.log(level, text, *args, exc_info=error)

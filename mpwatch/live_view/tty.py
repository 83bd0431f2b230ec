"""Finds a terminal for the live view. Every program that uses `mpwatch.run` imports this module, so it imports little."""

import os
import select
import sys
from contextlib import suppress
from typing import TextIO


def find_terminal() -> TextIO | None:
    """Return sys.stderr or sys.stdout if it is the controlling terminal, with this process in the foreground."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    for stream in (sys.stderr, sys.stdout):
        with suppress(Exception):  # the calling program may have put any object there
            if is_foreground(stream.fileno()) and 0 not in os.get_terminal_size(stream.fileno()):  # 0: it is not known
                return stream
    return None


def is_foreground(fd: int) -> bool:
    """Return whether this is the controlling terminal of this process, and this process is in the foreground."""
    try:
        return os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # not the controlling terminal
        return False


def is_writable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(timeout * 1000))

"""Where a view could be drawn. Light: it is asked of every call that is waited for."""

import os
import select
import sys
from typing import TextIO


def our_terminal() -> TextIO | None:
    """The stream that a terminal shows which can be drawn in: it knows how, is ours, and we are in its foreground."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    return next((stream for stream in (sys.stderr, sys.stdout) if _can_be_drawn_in(stream)), None)


def is_foreground(fd: int) -> bool:
    """Whether this descriptor is of the terminal of this process, which may use it: it is not in the background."""
    try:
        return os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # it is another one's
        return False


def name_of(fd: int) -> str:
    """Of the terminal that this descriptor is of; nothing if it cannot be reached by one, as in some containers."""
    try:
        return os.ttyname(fd)
    except OSError:
        return ""


def takes(fd: int, seconds: float) -> bool:
    """Whether what this descriptor is of takes something, within so long."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


def _can_be_drawn_in(stream: TextIO | None) -> bool:
    try:
        fd = stream.fileno() if stream is not None else -1
        return is_foreground(fd) and os.get_terminal_size(fd).columns > 0
    except Exception:  # noqa: BLE001  anybody may have put anything in the place of a stream
        return False

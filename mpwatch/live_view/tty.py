"""Find a terminal for the live view.

Every program that uses `mpwatch.run` imports this module, so this module must import few other modules.
"""

import os
import select
import sys
from typing import TextIO


def find_terminal() -> TextIO | None:
    """Return sys.stderr or sys.stdout if a view can be drawn there. Return None otherwise.

    The stream must be the controlling terminal of this process, and this process must be in the foreground.
    """
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    return next((stream for stream in (sys.stderr, sys.stdout) if _can_draw_in(stream)), None)


def is_foreground(fd: int) -> bool:
    """Return True if this descriptor is the controlling terminal of this process, and this process is in the foreground."""
    try:
        return os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # not the controlling terminal
        return False


def is_writable(fd: int, timeout: float) -> bool:
    """Return whether the terminal or pipe becomes ready for a write within `timeout` seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(timeout * 1000))


def _can_draw_in(stream: TextIO | None) -> bool:
    try:
        fd = stream.fileno() if stream is not None else -1
        return is_foreground(fd) and 0 not in os.get_terminal_size(fd)  # 0: the size is not known
    except Exception:  # noqa: BLE001  the calling program may have set sys.stderr to any object
        return False

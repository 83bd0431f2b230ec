"""Sets up stdout and stderr. This module runs in a rank.

When a rank starts, its stderr is a file that the watcher reads if the interpreter cannot start. `move_stderr` gives the rank
its final stderr, to which the rank then writes what is in that file. (This can block, so it comes after the message READY.)

If stdout is a pipe or a file, Python and the C library write in blocks. After `flush_at_newline` they write each line at
once, so that no line is lost if the rank is killed.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from mpwatch.os_support.descriptors import STDERR, line_buffer_c_stdout, write_all

_flush_c_stdout: Callable[[], object] | None = None  # set if the rank's output is captured


def move_stderr(stderr_fd: int) -> bytes:
    """Make this descriptor the rank's stderr. Return what the interpreter has printed."""
    printed = b""
    with suppress(OSError):  # sitecustomize has made it another file
        printed = os.pread(STDERR, os.fstat(STDERR).st_size, 0)
    os.dup2(stderr_fd, STDERR)
    os.close(stderr_fd)
    return printed


def write_startup_output(printed: bytes) -> None:
    with suppress(OSError):  # stderr is closed
        write_all(STDERR, printed)


def leave_terminal() -> None:
    """Give up /dev/tty: the kernel would silently stop the rank, a background process, when it reads from there."""
    try:
        fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return
    import fcntl
    import termios

    with suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCNOTTY)
    os.close(fd)


def flush_at_newline() -> None:
    """Flush the stdout of Python and of C at the end of each line. (They always flush stderr.)"""
    global _flush_c_stdout
    with suppress(AttributeError, ValueError):  # sys.stdout is None, or another object
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _flush_c_stdout = line_buffer_c_stdout()


def flush_before_answer() -> None:
    """Flush captured stdout, so that even an unfinished line reaches the watcher before the call's answer."""
    if _flush_c_stdout is not None:
        with suppress(BaseException):  # closed, or replaced by an object that raises anything
            sys.stdout.flush()
        _flush_c_stdout()


def flush() -> None:
    """Flush stdout and stderr, so that the function's output comes before the watcher's report."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: BLE001, S112  closed, or replaced by an object that cannot flush
            continue

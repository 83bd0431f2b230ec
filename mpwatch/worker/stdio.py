"""Set up stdout, stderr and the faulthandler pipe of a rank. Runs in a rank.

A rank starts with a pipe to the watcher as its stderr. So the watcher reads what an interpreter prints that never becomes
ready. `move_stderr` then makes stderr what the caller wants it to be, and gives the pipe to faulthandler. Its signal
handler writes Python stacks in C, whatever the interpreter is doing and whichever thread holds the GIL. It never blocks:
stacks that do not fit into the pipe are lost.

To a pipe or a file, Python and C write stdout in blocks. The watcher would read lines late, and would miss the last block
of a rank that is killed. `flush_each_line` makes stdout flush at the end of each line, as it does on a terminal.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from contextlib import suppress

from mpwatch.os_support.descriptors import STDERR, c_stdout_by_lines
from mpwatch.os_support.signals import DUMP_SIGNAL
from mpwatch.wire.messages import WHERE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Code that closes all descriptors opens its files with the lowest numbers; a crash must not write into one of them.
HIGH = 250

_flush_c_stdout: Callable[[], object] | None = None  # set once the rank's output is captured


def move_stderr(stderr_fd: int) -> bytes:
    """Make this descriptor stderr, and send stacks over the pipe that was stderr. Returns the body of READY.

    faulthandler writes the stack of the crashed thread on SIGSEGV, SIGFPE, SIGABRT, SIGBUS and SIGILL, and the stacks of all
    threads on DUMP_SIGNAL. A function that enables faulthandler for itself gets the stacks of crashes.
    """
    pipe = _move_up(STDERR)
    os.set_blocking(pipe, False)
    os.dup2(stderr_fd, STDERR)
    os.close(stderr_fd)
    faulthandler.enable(file=pipe, all_threads=False)
    if DUMP_SIGNAL is not None:
        faulthandler.register(DUMP_SIGNAL, file=pipe, all_threads=True)
    status = os.fstat(pipe)
    os.register_at_fork(after_in_child=lambda: _silence(pipe, status))
    return WHERE.pack(pipe, threading.main_thread().ident)


def flush_each_line() -> None:
    """Flush the stdout of Python and of C at the end of each line. (They always flush stderr.)"""
    global _flush_c_stdout
    with suppress(AttributeError, ValueError):  # an interpreter without a stdout
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _flush_c_stdout = c_stdout_by_lines()


def flush_for_answer() -> None:
    """Flush captured output, an unfinished line too, so that the watcher reads it before the call's answer."""
    if _flush_c_stdout is not None:
        with suppress(BaseException):  # closed, or replaced by an object that raises anything
            sys.stdout.flush()
        _flush_c_stdout()


def flush() -> None:
    """Flush stdout and stderr, so that output of the function comes before the watcher's report."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: BLE001, S112  closed, or replaced by an object that cannot flush
            continue


def _move_up(fd: int) -> int:
    """Duplicate this descriptor, with a high number if that is free and allowed."""
    try:
        os.fstat(HIGH)
    except OSError:
        with suppress(OSError):
            return os.dup2(fd, HIGH, inheritable=False)
    return os.dup(fd)


def _silence(pipe: int, status: os.stat_result) -> None:
    """Discard the stacks of a forked child of the rank: its crashes are not the rank's."""
    with suppress(OSError):  # closed, or the limit of open files is reached
        if os.path.samestat(os.fstat(pipe), status):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, pipe, inheritable=False)
            os.close(null)

"""Python stacks of this rank, at a crash and on demand, to where the watcher reads them. Runs in a rank.

A rank starts with a pipe to the watcher as its stderr, so that the watcher knows what an interpreter has printed that never
became ready. From then on stderr is the caller's, and the pipe is faulthandler's: written to in C, by a signal handler,
whatever the interpreter is doing and whoever holds the GIL. It never blocks: what does not fit is lost.
"""

import faulthandler
import os
import threading
from contextlib import suppress

from ..os_support.descriptors import STDERR
from ..os_support.signals import DUMP_SIGNAL
from ..wire.messages import WHERE

__all__ = ["report_to_watcher"]

# Code that closes all descriptors, and opens others, gets the lowest numbers: a crash is not to be written into its files.
HIGH = 250


def report_to_watcher(stderr_fd: int) -> bytes:
    """Put stderr in its place, and send stacks over the pipe that was there. Returns the body of READY.

    On SIGSEGV, SIGFPE, SIGABRT, SIGBUS and SIGILL that is the stack of the thread that crashed, on DUMP_SIGNAL those of
    all. A function that enables faulthandler for itself takes the crashes over.
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


def _move_up(fd: int) -> int:
    """A copy of this descriptor, with a high number if that is free and may be used."""
    try:
        os.fstat(HIGH)
    except OSError:
        with suppress(OSError):
            return os.dup2(fd, HIGH, inheritable=False)
    return os.dup(fd)


def _silence(pipe: int, status: os.stat_result) -> None:
    """In a forked child of the rank: its crashes are not the rank's."""
    with suppress(OSError):  # closed, or the limit of open files is reached
        if os.path.samestat(os.fstat(pipe), status):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, pipe, inheritable=False)
            os.close(nothing)

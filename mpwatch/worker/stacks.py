"""Python stacks of this rank, at a crash and on demand, to where the watcher reads them. Runs in a rank.

A rank starts with a pipe to the watcher as its stderr, so that the watcher knows what an interpreter has printed that never
became ready. From then on stderr is the caller's, and the pipe is faulthandler's: written to in C, by a signal handler,
whatever the interpreter is doing and whoever holds the GIL. It never blocks: what does not fit is lost.
"""

import faulthandler
import os
import threading

from ..platform import DUMP_SIGNAL
from ..wire.messages import WHERE

__all__ = ["report_to_watcher"]

STDERR = 2


def report_to_watcher(stderr_fd: int | None) -> bytes:
    """Put stderr in its place, and send stacks over the pipe that was there. Returns the body of READY.

    On SIGSEGV, SIGFPE, SIGABRT, SIGBUS and SIGILL that is the stack of the thread that crashed, on DUMP_SIGNAL those of
    all. A function that enables faulthandler for itself takes the crashes over.
    """
    pipe = os.dup(STDERR)
    os.set_blocking(pipe, False)
    _restore_stderr(stderr_fd)
    faulthandler.enable(file=pipe, all_threads=False)
    if DUMP_SIGNAL is not None:
        faulthandler.register(DUMP_SIGNAL, file=pipe, all_threads=True)
    return WHERE.pack(pipe, threading.main_thread().ident)


def _restore_stderr(fd: int | None) -> None:
    if fd is None:  # the caller has none
        fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, STDERR)
    os.close(fd)

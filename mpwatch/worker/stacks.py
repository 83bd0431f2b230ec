"""The Python stack at the moment of a crash, kept where the watcher finds it. Runs in a rank."""

import faulthandler

__all__ = ["keep_at_crash"]


def keep_at_crash(fd: int) -> None:
    """On SIGSEGV, SIGFPE, SIGABRT, SIGBUS and SIGILL write the stack of the thread that crashed to this descriptor.

    In C, by faulthandler, so it works whatever state the interpreter is in. A function that enables faulthandler for
    itself takes it over.
    """
    faulthandler.enable(file=fd, all_threads=False)

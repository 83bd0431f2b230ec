"""Functions for signals and their handlers, and the two signals that ask a rank for its stacks.

This module runs in the watcher and in the ranks.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

change_mask = _signal.pthread_sigmask  # without the enums of `signal`
SIGNALS = [int(number) for number in signal.valid_signals()]
# These signals ask a rank for its stacks. The first one has a handler in Python, the second one a handler in C (see
# worker/stack_dumps.py). Few programs use real-time signals, and few use these two of macOS, which has no real-time signals.
# If they are None, they are not sent.
PYTHON_DUMP_SIGNAL: int | None
NATIVE_DUMP_SIGNAL: int | None
if hasattr(signal, "SIGRTMAX"):
    PYTHON_DUMP_SIGNAL, NATIVE_DUMP_SIGNAL = signal.SIGRTMAX - 4, signal.SIGRTMAX - 3
else:
    PYTHON_DUMP_SIGNAL, NATIVE_DUMP_SIGNAL = getattr(signal, "SIGINFO", None), getattr(signal, "SIGEMT", None)


def name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def set_handler(number: int, handler: Any) -> None:
    """Set the handler of a signal to a function, signal.SIG_DFL or SIG_IGN. Only the main thread may call this function."""
    _signal.signal(number, handler if callable(handler) else int(handler))


def get_handler(number: int) -> Any:
    """Return a function or a number such as SIG_DFL, or None if C code has set the handler."""
    return _signal.getsignal(number)


def die_with_writer(pipe: int) -> None:
    """Make Linux kill this process group when the last writer of `pipe`, the watcher, ends. Without F_SETSIG, do nothing.

    PR_SET_PDEATHSIG would do so when the thread ends that has started the rank. If a fork of the program holds that end of
    the pipe, too, only the guardian kills the rank.
    """
    import fcntl
    import select

    if not hasattr(fcntl, "F_SETSIG"):
        return
    try:
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:  # a sandbox may have another kernel
        return
    poll = select.poll()
    poll.register(pipe, 0)
    if poll.poll(0):  # the writer had closed it before the kernel was asked
        os.killpg(0, signal.SIGKILL)

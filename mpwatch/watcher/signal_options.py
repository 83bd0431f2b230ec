"""Checks whether mpwatch can install its handlers for the signals in the option `stop`.

This module runs in the caller's thread.
"""

import os
import signal
import threading
from collections.abc import Collection
from typing import Any

from mpwatch.options.spec import GroupSpec
from mpwatch.os_support.processes import read_process_state
from mpwatch.os_support.signals import get_handler, name_signal

IN_MAIN_THREAD_ONLY = (
    "the signals of stop= need a run in the main thread, because Python runs signal handlers in the main thread only; call "
    "mpwatch.run there, or leave the signals out and call request_stop() of the handle in a handler of your own"
)


def check_stop_signals(spec: GroupSpec) -> None:
    """Raise ValueError if handlers for the signals of the option `stop` cannot be installed and restored in this thread."""
    signals = spec.stop_policy.signals
    if threading.current_thread() is not threading.main_thread():
        refuse_signals(spec)
    for signum in set(signals) - find_handlers(signals).keys():
        raise ValueError(
            f"stop may not have {name_signal(signum)} now: C code of this program handles it, as after "
            "faulthandler.register, and mpwatch could not restore that handler; unregister it, or leave the signal out"
        )


def refuse_signals(spec: GroupSpec) -> None:
    """Raise ValueError if a run in the background has signals in the option `stop`."""
    if spec.stop_policy.signals:
        raise ValueError(IN_MAIN_THREAD_ONLY)


def find_handlers(signals: Collection[int]) -> dict[int, Any]:
    """Return the handler of each signal, without those that C code handles: for them only the kernel reports a handler.

    `signal.getsignal` returns SIG_DFL even if C code has installed a handler later.
    """
    handlers = {signum: handler for signum in signals if (handler := get_handler(signum)) is not None}
    defaults = [signum for signum, handler in handlers.items() if handler == signal.SIG_DFL]
    state = read_process_state(os.getpid()) if defaults else None
    for signum in defaults:
        if state is not None and state.catches(signum):
            del handlers[signum]
    return handlers

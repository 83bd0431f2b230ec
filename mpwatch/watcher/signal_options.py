"""Checks whether mpwatch can install its handlers for the signals in the options `stop_signals` and `forward_signals`.

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
    "{name} needs a run in the main thread, because Python runs signal handlers in the main thread only; call mpwatch.run "
    "there, or leave {name} out"
)
STOP_ADVICE = " and call request_stop() of the handle in a handler of your own"


def check_signal_options(spec: GroupSpec) -> None:
    """Check that this thread can install handlers for the signals in the options, and can restore the old handlers.

    Raises ValueError.
    """
    for name, signals in _list_options(spec).items():
        if signals and threading.current_thread() is not threading.main_thread():
            raise ValueError(IN_MAIN_THREAD_ONLY.format(name=name))
        for signum in set(signals) - find_handlers(signals).keys():
            raise ValueError(
                f"{name} may not have {name_signal(signum)} now: C code of this program handles it, as after "
                "faulthandler.register, and mpwatch could not restore that handler; unregister it, or leave the signal out"
            )


def refuse_signals(spec: GroupSpec) -> None:
    """Raise ValueError if a run in the background has the option `stop_signals` or `forward_signals`."""
    for name, signals in _list_options(spec).items():
        if signals:
            advice = STOP_ADVICE if name == "stop_signals" else ""
            raise ValueError(IN_MAIN_THREAD_ONLY.format(name=name) + advice)


def find_handlers(signals: Collection[int]) -> dict[int, Any]:
    """Return a dict that maps each signal to its handler, which can be SIG_DFL or SIG_IGN.

    Leave out signals that C code handles. If C code handles a signal, the kernel reports a handler, but Python reports none.
    """
    handlers = {signum: handler for signum in signals if (handler := get_handler(signum)) is not None}
    defaults = [signum for signum, handler in handlers.items() if handler == signal.SIG_DFL]
    state = read_process_state(os.getpid()) if defaults else None
    for signum in defaults:
        if state is not None and state.catches(signum):
            del handlers[signum]
    return handlers


def _list_options(spec: GroupSpec) -> dict[str, Collection[int]]:
    return {"stop_signals": spec.stop_signals, "forward_signals": spec.forward_signals}

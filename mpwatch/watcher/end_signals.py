"""Defers SIGTERM and SIGHUP while the main thread waits for calls that run in other threads.

The calls of `mpwatch.map` do not run in the main thread, so no signal handlers are installed for them (signals.py). When
SIGTERM or SIGHUP comes, the main thread stops the calls, logs the report and raises the signal again.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpwatch.os_support.signals import get_handler, list_python_handlers, set_handler
from mpwatch.watcher.signals import find_signals_without_handler

END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class EndSignals:
    """Defers SIGTERM and SIGHUP, if these signals would end the program without an exception.

    Args:
        wake: ends the wait. A signal handler calls `wake`.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.received: int | None = None
        self._wake = wake
        self._is_deferring = False
        self._pid = os.getpid()
        found = find_signals_without_handler(list_python_handlers())
        self._candidates = [signum for signum in END_SIGNALS if found.get(signum) == signal.SIG_DFL]

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Defer the signals. Do nothing outside the main thread, because only the main thread can set signal handlers."""
        is_in_main_thread = threading.current_thread() is threading.main_thread()
        deferred = (
            [signum for signum in self._candidates if get_handler(signum) == signal.SIG_DFL] if is_in_main_thread else []
        )
        try:
            self._is_deferring = True
            for signum in deferred:
                set_handler(signum, self._receive)
            yield
        finally:
            self._is_deferring = False  # if Ctrl-C prevents the rest, the handler does what SIG_DFL does
            for signum in deferred:
                if get_handler(signum) == self._receive:
                    set_handler(signum, signal.SIG_DFL)

    def _receive(self, signum: int, _: object) -> None:
        if self._is_deferring and os.getpid() == self._pid:  # not in a child that another thread has forked
            self.received = self.received or signum
            self._wake()
            return
        set_handler(signum, signal.SIG_DFL)
        signal.raise_signal(signum)

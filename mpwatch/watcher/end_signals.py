"""Defers SIGTERM and SIGHUP while the main thread waits in `mpwatch.map`, whose calls run in other threads (see signals.py).

The main thread then stops the calls, logs the report and raises the signal again.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpwatch.os_support.signals import get_handler, set_handler
from mpwatch.watcher.signal_options import find_handlers

END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class EndSignals:
    """Only signals that would end the program without an exception. `wake` ends the wait, and is called by a handler."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.received: int | None = None
        self._wake = wake
        self._is_deferring = False
        self._pid = os.getpid()
        self._candidates = [signum for signum, handler in find_handlers(END_SIGNALS).items() if handler == signal.SIG_DFL]

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Outside the main thread, which alone can set handlers, do nothing."""
        candidates = self._candidates if threading.current_thread() is threading.main_thread() else []
        deferred = [signum for signum in candidates if get_handler(signum) == signal.SIG_DFL]
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

"""Signals in a rank: the function meets them as it likes, and they never disturb what the rank does around it.

    the function runs         its own handlers, or the defaults
    its answer is made        noted: a SIGTERM takes effect as soon as the answer is sent, the others are too late
    waiting for a call        SIGTERM ends the rank, whatever handler a function has left; a SIGINT is noted, and meets the
                              function that is called next if it is meant for that, whose call may be on its way

That holds for SIGINT and SIGTERM, and for whatever else has a handler in Python, such as a timer that raises. By handlers
and not by a signal mask: a mask is a thread's own, and the kernel gives a signal to any thread that takes it.
"""

import mmap
import signal
from typing import Any

from mpwatch.os_support.signals import handlers_in_python, set_handler
from mpwatch.wire.shared_memory import interrupted_call


class DeferredSignals:
    """Made, and then entered and left, by the main thread; between `enter` and `leave` no signal is felt.

    Args:
        memory: the rank's slot, where the watcher says which call an interrupt of its is meant for.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._call = 0  # the one that is waited for, or under way
        self._functions: dict[int, Any] = {}  # the handlers to be put back
        self._noted: set[int] = set()

    def enter(self) -> None:
        """Note them from now on. Nothing if they are noted already."""
        handlers = handlers_in_python()
        for always in (signal.SIGINT, signal.SIGTERM):
            if always not in handlers and (default := signal.getsignal(always)) is not None:  # None: C code's own
                handlers[always] = default
        for number, handler in handlers.items():
            if handler != self._note:
                self._functions[number] = handler
                set_handler(number, self._note)

    def wait(self) -> None:
        """SIGTERM ends the rank from now on, and does so now if it has come. A SIGINT may be meant for the next call."""
        self._call += 1
        # Python loses one that comes between its last look and the new handler; blocked, it waits, and meets the default.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        set_handler(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if signal.SIGTERM in self._noted:
            signal.raise_signal(signal.SIGTERM)

    def leave(self) -> None:
        """Give the function its handlers back. One that raises may do so from here."""
        interrupt = self._functions.pop(signal.SIGINT, None)
        self._restore()
        if interrupt is not None:
            set_handler(signal.SIGINT, interrupt)
            is_meant = signal.SIGINT in self._noted and interrupted_call(self._memory) == self._call
            self._noted.clear()
            if is_meant:
                signal.raise_signal(signal.SIGINT)

    def end(self) -> None:
        """There will be no more calls: signals may reach what still has to end, but not those that have come before."""
        self._functions.pop(signal.SIGTERM, None)
        self._restore()

    def _restore(self) -> None:
        while self._functions:
            set_handler(*self._functions.popitem())

    def _note(self, number: int, _: object) -> None:
        self._noted.add(number)

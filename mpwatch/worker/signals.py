"""Handles signals in a rank.

The user's function gets signals as usual, but the user's handlers never interrupt mpwatch's own code.

    what the rank does          what a signal does
    run the function            the function's own handler runs, or the default action
    pickle and send an answer   deferred: SIGTERM takes effect when the answer is sent; other signals are dropped
    wait for a call             SIGTERM ends the rank, even if a function has set a handler for SIGTERM. SIGINT is deferred:
                                it reaches the function of the next call if the watcher has sent SIGINT for that call
    destroy a process group     the same as while the rank waits for a call

mpwatch defers SIGINT, SIGTERM and every other signal that has a handler in Python, such as SIGALRM. mpwatch never defers
PYTHON_DUMP_SIGNAL, which asks the rank for its stacks (stack_dumps.py). To defer a signal, mpwatch replaces the handler of
the signal. mpwatch does not block signals in the main thread, because the kernel could deliver a signal to another thread.
"""

from __future__ import annotations

import signal

from mpwatch.os_support.signals import SIGNALS, change_mask, get_handler, set_handler
from mpwatch.wire.shared_memory import RankSlot
from mpwatch.worker.stack_dumps import StackWriter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class DeferredSignals:
    """Defers signals between `defer` and `restore`, in the main thread."""

    def __init__(self, slot: RankSlot) -> None:
        self._slot = slot
        self._first_sigterm = get_handler(signal.SIGTERM)  # SIG_DFL, or what the start of the interpreter has set
        self._handlers: dict[int, Any] = {}  # the handlers to restore, by signal
        self._deferred: set[int] = set()

    def defer(self) -> None:
        """If a signal gets a new handler afterwards, the next `defer` defers it, too."""
        handlers = {number: handler for number in SIGNALS if callable(handler := get_handler(number))}
        for always in (signal.SIGINT, signal.SIGTERM):
            if always not in handlers and (default := get_handler(always)) is not None:  # None: a handler in C
                handlers[always] = default
        for number, handler in handlers.items():
            if handler != self._record and not isinstance(handler, StackWriter):
                self._handlers[number] = handler
                set_handler(number, self._record)

    def prepare_for_call(self) -> None:
        """From now on SIGTERM ends the rank; a deferred one does at once. A deferred SIGINT is kept for the call."""
        # Python loses a signal that comes between its last check and the change of the handler. The kernel keeps a blocked
        # signal, whose default action then ends the rank.
        mask = change_mask(signal.SIG_BLOCK, [signal.SIGTERM])
        set_handler(signal.SIGTERM, self._first_sigterm)
        change_mask(signal.SIG_SETMASK, mask)
        if signal.SIGTERM in self._deferred:
            signal.raise_signal(signal.SIGTERM)

    def restore(self, call: int) -> None:
        """Restore the function's handlers, and run that of a SIGINT deferred in this call, which may raise."""
        interrupt = self._handlers.pop(signal.SIGINT, None)
        self._restore_handlers()
        if interrupt is not None:
            set_handler(signal.SIGINT, interrupt)
            is_for_this_call = signal.SIGINT in self._deferred and self._slot.read_interrupted_call() == call
            self._deferred.clear()
            if is_for_this_call:
                signal.raise_signal(signal.SIGINT)

    def restore_for_exit(self) -> None:
        """Drop deferred signals. SIGTERM ends the rank, even if the function has set a handler for it."""
        self._handlers.pop(signal.SIGTERM, None)
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        while self._handlers:
            set_handler(*self._handlers.popitem())

    def _record(self, number: int, _: object) -> None:
        self._deferred.add(number)

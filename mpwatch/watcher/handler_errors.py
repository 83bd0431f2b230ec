"""Handles exceptions that the calling program's signal handlers raise before and after a run.

This module runs in the caller's thread. Before and after a run, the calling program's own signal handlers are installed. If
a signal handler raises an exception, this exception appears in the code that the signal has interrupted. So the handler's
exception could be mistaken for an exception of this code:

- User code runs when arguments are pickled, when return values and exceptions are rebuilt, and when observers are called. If
  user code raises an exception, mpwatch reports that an argument, a rank or an observer has failed.
- The code that prepares a run handles OSError in many places. The calling program's handler of SIGALRM usually raises
  TimeoutError, which is an OSError.

So mpwatch replaces the exception by a HostHandlerError, which no code handles:

    kernel ---> mpwatch's handler ---> the program's own handler raises: an alarm, for example
                     |
                     `--> HostHandlerError, which ends the code ---> run_until_handler_raises raises the first exception

Before and after a run, no rank executes the user's function. So mpwatch raises the signal handler's exception at once, and
does not stop the ranks first.
"""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mpwatch.os_support.signals import STANDARD_SIGNALS, get_handler, list_python_handlers, set_handler
from mpwatch.wire.exceptions.decoder import HostHandlerError

T = TypeVar("T")


def run_until_handler_raises(action: Callable[[], T]) -> T:
    """Return the result of `action`.

    If a signal handler raises an exception while `action` runs, end `action` and raise this exception. Python runs signal
    handlers only in the main thread, so in all other threads this function simply calls `action`. This function does not
    look for handlers of real-time signals, because the search would then take twice as long.
    """
    if threading.current_thread() is not threading.main_thread():
        return action()
    # Python's own handler of Ctrl-C may stay: nothing here handles a KeyboardInterrupt.
    found = list_python_handlers(STANDARD_SIGNALS)
    host_handlers = {signum: handler for signum, handler in found.items() if handler is not signal.default_int_handler}
    if not host_handlers:
        return action()
    handlers = _HandlerWatch(host_handlers)
    try:
        try:
            handlers.replace()
            result = action()
        finally:
            handlers.restore()
    except BaseException:
        handlers.restore()  # again: a handler may have raised before the first time was complete
        if handlers.error is None:
            raise
    if handlers.error is None:
        return result
    error, handlers.error = handlers.error, None
    try:
        raise error
    finally:
        del error  # its traceback has this frame


class _HandlerWatch:
    """Replaces the calling program's signal handlers, but still calls them.

    `error` is the first exception that one of the calling program's signal handlers has raised.
    """

    def __init__(self, host_handlers: Mapping[int, Any]) -> None:
        self._host_handlers = host_handlers
        self.error: BaseException | None = None
        self._is_watching = False
        self._pid = os.getpid()

    def replace(self) -> None:
        self._is_watching = True
        for signum in self._host_handlers:
            set_handler(signum, self._call_host_handler)

    def restore(self) -> None:
        """Restore the calling program's handlers.

        If the program has set a new handler after the call of `replace`, do not replace the new handler.
        """
        self._is_watching = False  # if an exception prevents the rest, the handlers do what the host's own do
        for signum, handler in self._host_handlers.items():
            if get_handler(signum) == self._call_host_handler:
                set_handler(signum, handler)

    def _call_host_handler(self, signum: int, frame: object) -> None:
        try:
            self._host_handlers[signum](signum, frame)
        except BaseException as error:
            if not self._is_watching or os.getpid() != self._pid:
                raise
            if self.error is None:  # a second one could leave `run_until_handler_raises`
                self.error = error
                raise HostHandlerError from None

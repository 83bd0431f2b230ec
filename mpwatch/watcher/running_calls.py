"""A registry of the runs and calls that are in progress in this process. `mpwatch.request_stop` uses the registry."""

import os
from collections.abc import Callable
from weakref import WeakMethod

AskToStop = Callable[[str], bool]  # asks the ranks of a call to stop, and returns False if the call is over

# The pid of the process of each call, and a method. Each change is one operation, so threads cannot collide.
_calls: dict[object, tuple[int, WeakMethod[AskToStop]]] = {}


def add_call(ask_to_stop: AskToStop) -> None:
    """Register the method of an object that asks a call. When the object is deleted, the registry drops it.

    `mpwatch.submit` registers that of its RunHandle, since the run gets a Caller later, just before its ranks start.
    """
    key = object()
    _calls[key] = os.getpid(), WeakMethod(ask_to_stop, lambda _: _calls.pop(key, None))


def request_stop(cause: str) -> bool:
    """Ask the ranks of all running calls to stop. Return whether at least one call accepts the request to stop.

    It is safe to call this function in a signal handler.
    """
    own = [reference() for pid, reference in list(_calls.values()) if pid == os.getpid()]
    answers = [ask_to_stop(cause) for ask_to_stop in own if ask_to_stop is not None]
    return any(answers)

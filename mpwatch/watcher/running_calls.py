"""A registry of the runs and calls that are in progress in this process. `mpwatch.request_stop` uses the registry."""

import os
from collections.abc import Callable
from typing import Any
from weakref import ref

AskToStop = Callable[[Any, str], bool]  # asks the ranks of a call to stop, and returns False if the call is over

# The pid of the process of each call, its object and its method. Each change is one operation, so threads cannot collide.
_calls: dict[object, tuple[int, ref[Any], AskToStop]] = {}


def add_call(call: object, ask_to_stop: AskToStop) -> None:
    """Register a call: its object, and the function to ask it. When the object is deleted, the registry drops the call.

    `mpwatch.submit` registers its RunHandle, since the run gets a Caller later, just before its ranks start.
    """
    key = object()
    _calls[key] = os.getpid(), ref(call, lambda _: _calls.pop(key, None)), ask_to_stop


def request_stop(cause: str) -> bool:
    """Ask the ranks of all running calls to stop. Return whether at least one call accepts the request to stop.

    It is safe to call this function in a signal handler.
    """
    own = [(reference, ask_to_stop) for pid, reference, ask_to_stop in list(_calls.values()) if pid == os.getpid()]
    answers = [ask_to_stop(call, cause) for reference, ask_to_stop in own if (call := reference()) is not None]
    return any(answers)

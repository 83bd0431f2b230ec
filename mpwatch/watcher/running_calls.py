"""A registry of the runs and calls that are in progress in this process. `mpwatch.request_stop` uses the registry."""

import os
from typing import Protocol
from weakref import ReferenceType, ref


class RunningCall(Protocol):
    """A call in the registry: a BlockingCall or a RunHandle.

    `mpwatch.submit` immediately creates a RunHandle. The run gets a BlockingCall later, just before its ranks start.
    """

    def ask_to_stop(self, cause: str) -> bool:
        """Ask the ranks to stop. Return False if the call is over."""


# From the id of a call to the pid of its process and the call. Each change is one operation, so threads cannot collide.
_calls: dict[int, tuple[int, ReferenceType[RunningCall]]] = {}


def add_call(call: RunningCall) -> None:
    """Register a call. When the call object is deleted, the registry drops the call."""
    key = id(call)
    _calls[key] = os.getpid(), ref(call, lambda _: _calls.pop(key, None))


def request_stop(cause: str) -> bool:
    """Ask the ranks of all running calls to stop. Return whether at least one call accepts the request to stop.

    It is safe to call this function in a signal handler.
    """
    own = [reference for pid, reference in list(_calls.values()) if pid == os.getpid()]
    answers = [call.ask_to_stop(cause) for reference in own if (call := reference()) is not None]
    return any(answers)

"""The runs and calls of this process that are under way, so that `mpwatch.request_stop` finds them."""

import os
from typing import Protocol
from weakref import ReferenceType, ref


class RunningCall(Protocol):
    """A BlockingCall, or a RunHandle, which has no BlockingCall before its ranks are about to start."""

    def ask_to_stop(self, cause: str) -> bool:
        """Ask the ranks to stop. Return False if the call is over."""


# By the id of the call, with the process that it belongs to. Each change is one operation: any thread may come in between.
_calls: dict[int, tuple[int, ReferenceType[RunningCall]]] = {}


def add_call(call: RunningCall) -> None:
    """Remember a call until it is deleted."""
    key = id(call)
    _calls[key] = os.getpid(), ref(call, lambda _: _calls.pop(key, None))


def request_stop(cause: str) -> bool:
    """Ask the ranks of all calls that are under way to stop. Return whether there is one. A signal handler may call it."""
    own = [reference for pid, reference in list(_calls.values()) if pid == os.getpid()]
    answers = [call.ask_to_stop(cause) for reference in own if (call := reference()) is not None]
    return any(answers)

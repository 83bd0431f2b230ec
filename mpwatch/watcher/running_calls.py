"""The calls that threads of this process wait for at the moment, so that `mpwatch.request_stop` finds them."""

import os
from typing import Protocol
from weakref import ReferenceType, ref

from mpwatch.watcher.host_signals import HostSignals


class RunningCall(Protocol):
    """A call whose thread waits for the watcher thread: see BlockingCall."""

    is_over: bool
    signals: HostSignals


_calls: dict[int, ReferenceType[RunningCall]] = {}  # each change is one operation, since any thread may come in between


def add_call(call: RunningCall) -> None:
    """Remember a call until it is deleted."""
    key = id(call)
    _calls[key] = ref(call, lambda _: _calls.pop(key, None))


def request_stop(cause: str) -> bool:
    """Ask the ranks of all calls that are running to stop. Return whether there is one. A signal handler may call it."""
    calls = [call for reference in list(_calls.values()) if (call := reference()) is not None]
    running = [call for call in calls if not call.is_over and call.signals.pid == os.getpid()]
    for call in running:
        call.signals.request_stop(cause)
    return bool(running)

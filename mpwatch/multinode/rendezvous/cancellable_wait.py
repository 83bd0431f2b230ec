"""Run a call that cannot be interrupted, and stop waiting for it at a deadline or when it is cancelled.

Such calls are those of the resolver, and of torch's clients, which are written in C++. Imports no torch.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from mpwatch.multinode.rendezvous.errors import CancelledError

RETRY_SECONDS = 0.2
CHECK_SECONDS = 0.1

T = TypeVar("T")


@dataclass(frozen=True)
class Deadline:
    """A time limit that can also be cancelled.

    Args:
        at: seconds on the monotonic clock.
        cancelled: set by another thread to end the wait early.
    """

    at: float
    cancelled: threading.Event

    def seconds_left(self, at_most: float) -> float:
        """Return the seconds until the deadline, from 0 to `at_most`. Raises CancelledError."""
        if self.cancelled.is_set():
            raise CancelledError
        return max(0.0, min(at_most, self.at - time.monotonic()))

    def wait_before_retry(self) -> bool:
        """Wait a moment before the next try. Return False if the deadline has passed. Raises CancelledError."""
        self.cancelled.wait(self.seconds_left(RETRY_SECONDS))
        return self.seconds_left(RETRY_SECONDS) > 0


def _do_nothing(_: object) -> None:
    pass


def call_with_deadline(
    call: Callable[[], T],
    deadline: Deadline,
    thread_name: str,
    *,
    undo: Callable[[T], object] = _do_nothing,
    on_check: Callable[[bool], object] = _do_nothing,
) -> T:
    """Run a call on a new thread, and return or raise what the call returns or raises.

    If the deadline comes first, the thread is abandoned. The call then ends on its own some time later, and its result is
    undone.

    Args:
        call: a call that cannot be interrupted.
        deadline: raises CancelledError. When its time is over, TimeoutError is raised.
        thread_name: name of the new thread.
        undo: releases the result of an abandoned call.
        on_check: called every tenth of a second with False, and a last time with True when the call is abandoned.
    """
    task = _Task(call, undo)
    thread = threading.Thread(target=task.run, name=thread_name, daemon=True)
    thread.start()
    try:
        while not task.done.wait(CHECK_SECONDS):
            on_check(False)
            if not deadline.seconds_left(1):
                raise TimeoutError
    except (CancelledError, TimeoutError):
        on_check(True)
        task.abandon()
        thread.join(CHECK_SECONDS)
        raise
    thread.join()
    return task.get_result()


class _Task(Generic[T]):
    """A call on a thread of its own. The thread that waits for its result may abandon it."""

    def __init__(self, call: Callable[[], T], undo: Callable[[T], object]) -> None:
        self._call = call
        self._undo = undo
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._get_result: Callable[[], T] | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            result = self._call()
            get_result = lambda: result  # noqa: E731
        except Exception as error:  # noqa: BLE001  the waiting thread raises it
            get_result = _raising(error)
        with self._lock:
            self._get_result = get_result
            if self._is_abandoned:
                self._undo_result()
        self.done.set()

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            if self._get_result:
                self._undo_result()

    def get_result(self) -> T:
        assert self._get_result is not None  # the call has ended
        return self._get_result()

    def _undo_result(self) -> None:
        try:
            result = self.get_result()
        except Exception:  # noqa: BLE001  no thread waits for this error any more
            return
        self._undo(result)


def _raising(error: Exception) -> Callable[[], NoReturn]:
    def get_result() -> NoReturn:
        raise error

    return get_result

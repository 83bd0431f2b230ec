"""Wait for the end of a call that cannot be interrupted. A deadline limits the wait, and another thread can cancel it.

Examples of calls that cannot be interrupted are name resolution and the methods of torch's C++ clients. This module does not
import torch.
"""

import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import TypeVar

from mpwatch.multinode.rendezvous.errors import CancelledError
from mpwatch.os_support.clock import monotonic

RETRY_SECONDS = 0.2
CHECK_SECONDS = 0.1

T = TypeVar("T")


@dataclass(frozen=True)
class Deadline:
    """The time at which a function stops waiting, unless another thread cancels the wait earlier.

    Args:
        at: seconds on the monotonic clock.
        cancelled: another thread sets this event to end the wait early.
    """

    at: float
    cancelled: threading.Event

    def seconds_left(self, at_most: float) -> float:
        """Return the seconds until the deadline, but at least 0 and at most `at_most`. Raises CancelledError."""
        if self.cancelled.is_set():
            raise CancelledError
        return max(0.0, min(at_most, self.at - monotonic()))

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
    """Run a call on a new thread, and return the result of the call or raise its exception.

    Args:
        call: a call that cannot be interrupted.
        deadline: the time limit of the wait. When the time is over, TimeoutError is raised. When the wait is cancelled,
            CancelledError is raised.
        thread_name: name of the new thread.
        undo: releases the result of a call that ends after the wait.
        on_check: called every tenth of a second with False. If the wait ends before the call, it is called once with True.
    """
    future: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  the waiting thread raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    def undo_result(ended: futures.Future[T]) -> None:
        if ended.exception() is None:
            undo(ended.result())

    thread = threading.Thread(target=run, name=thread_name, daemon=True)
    thread.start()
    try:
        while not futures.wait([future], CHECK_SECONDS).done:
            on_check(False)
            if not deadline.seconds_left(1):
                raise TimeoutError
    except (CancelledError, TimeoutError):
        on_check(True)
        future.add_done_callback(undo_result)  # called at once if the call has just ended
        thread.join(CHECK_SECONDS)
        raise
    thread.join()
    return future.result()

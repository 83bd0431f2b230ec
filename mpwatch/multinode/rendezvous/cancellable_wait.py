"""Waiting for what cannot be interrupted: resolvers, and clients that are made in C++. Standard library alone."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from mpwatch.multinode.rendezvous.errors import CancelledError

POLL_SECONDS = 0.2
LOOK_SECONDS = 0.1

T = TypeVar("T")


@dataclass(frozen=True)
class Deadline:
    """How long something may wait: until a moment of the monotonic clock, or until it is cancelled."""

    deadline: float
    cancelled: threading.Event

    def left(self, most: float) -> float:
        """Seconds, at most so many and 0 if it is too late. Raises CancelledError."""
        if self.cancelled.is_set():
            raise CancelledError
        return max(0.0, min(most, self.deadline - time.monotonic()))

    def pause(self) -> bool:
        """For a moment, before another try. False if it is too late for one. Raises CancelledError."""
        self.cancelled.wait(self.left(POLL_SECONDS))
        return self.left(POLL_SECONDS) > 0


class _Task(Generic[T]):
    """A call on a thread of its own, which somebody waits for, or nobody any more."""

    def __init__(self, call: Callable[[], T], undo: Callable[[T], object]) -> None:
        self._call = call
        self._undo = undo
        self._lock = threading.Lock()
        self._abandoned = False
        self._outcome: Callable[[], T] | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            made = self._call()
            outcome = lambda: made  # noqa: E731
        except Exception as error:  # noqa: BLE001  it is raised where it is waited for
            outcome = _raising(error)
        with self._lock:
            self._outcome = outcome
            if self._abandoned:
                self._discard()
        self.done.set()

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            if self._outcome:
                self._discard()

    def outcome(self) -> T:
        assert self._outcome is not None  # it is done
        return self._outcome()

    def _discard(self) -> None:
        try:
            made = self.outcome()
        except Exception:  # noqa: BLE001  nobody waits for that either
            return
        self._undo(made)


def _raising(error: Exception) -> Callable[[], NoReturn]:
    def outcome() -> NoReturn:
        raise error

    return outcome


def wait_for(
    call: Callable[[], T],
    limit: Deadline,
    name: str,
    *,
    undo: Callable[[T], object] = bool,
    meanwhile: Callable[[bool], object] = bool,
) -> T:
    """What a call returns or raises, on a thread of that name.

    Nobody waits for it any longer than the limit says. It ends by itself then, some time, and what it has made is undone.

    Args:
        call: what cannot be interrupted.
        limit: raises CancelledError, and TimeoutError when the time is over.
        name: of the thread.
        undo: gives back what the call has made, when nobody is there any more to take it.
        meanwhile: called every tenth of a second, with whether it is too late, and once more then.
    """
    task = _Task(call, undo)
    thread = threading.Thread(target=task.run, name=name, daemon=True)
    thread.start()
    try:
        while not task.done.wait(LOOK_SECONDS):
            meanwhile(False)
            if not limit.left(1):
                raise TimeoutError
    except (CancelledError, TimeoutError):
        meanwhile(True)
        task.abandon()
        thread.join(LOOK_SECONDS)
        raise
    thread.join()
    return task.outcome()

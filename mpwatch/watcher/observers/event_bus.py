"""What happens in a run, noted in either thread as events, and told to the observers in the caller's.

An observer is code of the user's. It may be slow, or want a lock that the caller holds: that holds up nothing but itself.
One that raises is logged once and dropped.
"""

import logging
import platform
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from mpwatch.events.logging_observer import LogEvents
from mpwatch.events.types import Event, RunEnded, RunStarted, StateChanged
from mpwatch.options.spec import GroupSpec, Observer
from mpwatch.options.worker_info import Worker
from mpwatch.results.model import WorkerState
from mpwatch.results.state_transitions import ENDS, check_change

log = logging.getLogger("mpwatch")
MANY = 100_000  # events: some ten megabytes, of a run that is long, or has many ranks


class EventBus:
    """Of one run, or of a group in all its lives.

    Args:
        run_id: of the events.
        observers: who is told.
        keep: whether all events are kept, for the result.
    """

    def __init__(self, run_id: str, observers: Iterable[Observer], *, keep: bool) -> None:
        self.run_id = run_id
        self.started_at = time.monotonic()
        self.events: deque[Event] = deque(maxlen=MANY)  # that were told, if they are kept: the latest
        self.wake: Callable[[], object] = bool  # has the caller's thread call `tell`; so far there is nobody to wake up
        self.state = WorkerState.UNKNOWN  # of all ranks together, as it was told
        self._log = LogEvents()
        self._observers: list[Observer] = [self._log, *observers]
        self._keep = keep
        self._untold: deque[Event] = deque()
        self._wall_clock = time.time() - self.started_at
        self.ranks: Sequence[int] = ()  # of this node
        self._has_begun = False
        self._has_ended = False

    def wants(self, kind: type[Event]) -> bool:
        """Whether anybody wants to know of events of this kind."""
        return self._keep or self._is_observed(kind)

    def publish(
        self, kind: type[Event], ranks: Iterable[int], *, at: float | None = None, attempt: int = 0, **details: Any
    ) -> None:
        """Something has happened to these ranks, at this time of CLOCK_MONOTONIC, or now."""
        if not self.wants(kind):
            return
        at = time.monotonic() if at is None else at
        when = {"time": self.wall_time(at), "monotonic": at}
        self._untold.append(kind(run_id=self.run_id, ranks=tuple(ranks), attempt=attempt, **when, **details))
        if self._is_observed(kind):
            self.wake()

    def _is_observed(self, kind: type[Event]) -> bool:
        return len(self._observers) > 1 or self._log.wants(kind)

    def begin(self, spec: GroupSpec, *, fn: str) -> None:
        """The ranks are about to be started, for this function, or, if it is empty, for any number of calls."""
        assert isinstance(spec.nprocs, int)  # see GroupSpec
        self._has_begun = True
        if not spec.is_on_nodes:
            self.ranks = range(spec.nprocs)
        self.publish(
            RunStarted,
            self.ranks,
            at=self.started_at,
            fn=fn,
            role=spec.role,
            nprocs=spec.nprocs,
            max_restarts=spec.policy.max_restarts,
            hostname=platform.node(),
        )

    def end(self, state: WorkerState, workers: Collection[Worker], *, restarts: int, reason: str) -> None:
        """All is over. The first time that this is said counts; whoever is struck on the way out says it again."""
        if self._has_begun and not self._has_ended:
            if self.state not in ENDS:  # else that was all that it came to the first time
                self.change_state(state, workers)
            elapsed = time.monotonic() - self.started_at
            attempt = _latest(workers)
            self._has_ended = True
            self.publish(
                RunEnded, self.ranks, attempt=attempt, state=self.state, elapsed=elapsed, restarts=restarts, reason=reason
            )
        try:
            self.dispatch()
        finally:
            self.dispatch()  # the rest, if an observer has thrown something that is not its own failure

    def wall_time(self, at: float) -> float:
        """In seconds since 1970, what was this on CLOCK_MONOTONIC."""
        return self._wall_clock + at

    def change_state(self, after: WorkerState, workers: Iterable[Worker]) -> None:
        """All ranks together are in this state now."""
        if after is not self.state:
            check_change(self.state, after)
            before, self.state = self.state, after  # first: who is struck here does not come from an end to another
            self.publish(StateChanged, self.ranks, attempt=_latest(workers), before=before, after=after)

    def dispatch(self) -> None:
        """Tell the observers what has been noted."""
        while self._untold:
            event = self._untold.popleft()
            if self._keep:
                self.events.append(event)
            self._tell_each(self._observers, event)

    def _tell_each(self, observers: Sequence[Observer], event: Event) -> None:
        for n, observer in enumerate(observers):
            try:
                observer(event)
            except Exception as error:
                self._observers = [other for other in self._observers if other is not observer]
                with suppress(Exception):  # it may have been the log
                    text = "the observer %r has failed at %r; it is told nothing more"
                    log.exception(text, observer, event.name, exc_info=error)
            except BaseException:  # it wants the program to end, which is no reason to tell the others less
                self._tell_each(observers[n + 1 :], event)
                raise


def _latest(workers: Iterable[Worker]) -> int:
    return max((worker.restart_count for worker in workers), default=0)

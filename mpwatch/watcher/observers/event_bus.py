"""The events of a run or a WorkerGroup: any thread publishes them, and a thread of the program passes them to the observers.

An observer is user code. A slow one delays only the thread that waits for the ranks. One that raises gets no more events.
"""

import logging
import platform
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from mpwatch.events.logging_observer import LogEvents
from mpwatch.events.types import Event, Progressed, RunEnded, RunStarted, StateChanged
from mpwatch.options.spec import GroupSpec, Observer, describe_options
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.clock import monotonic
from mpwatch.results.model import WorkerState
from mpwatch.watcher.inbox import Outbox
from mpwatch.watcher.log import log_now
from mpwatch.wire.exceptions.decoder import USER_ERRORS

ENDS = (WorkerState.SUCCEEDED, WorkerState.FAILED, WorkerState.STOPPED)
MAX_EVENTS = 100_000  # about 10 MB. A run that is long or has many ranks keeps only the latest events


class EventBus:
    def __init__(self, spec: GroupSpec, *, keep_events: bool) -> None:
        self.run_id = uuid.uuid4().hex if spec.rendezvous is None else spec.rendezvous.run_id
        self.started_at = monotonic()
        self.outbox = Outbox()
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)  # for the result, if they are kept
        self.state = WorkerState.UNKNOWN  # of all ranks together, as of the last StateChanged
        self._log = LogEvents()
        self._observers: list[Observer] = [self._log, *spec.observers]
        self._progress_observers: list[Callable[[Any], object]] = [*spec.progress_observers]
        self._spec, self._keep_events = spec, keep_events
        self._wall_clock = time.time() - self.started_at
        self.ranks: Sequence[int] = ()  # of this node
        self._has_started = False
        self._has_ended = False

    def wants(self, kind: type[Event]) -> bool:
        return self._keeps(kind) or self._is_observed(kind)

    def publish(
        self, kind: type[Event], ranks: Iterable[int], *, at: float | None = None, attempt: int = 0, **details: Any
    ) -> None:
        """Keep an event that happened `at`, by CLOCK_MONOTONIC, or now, and queue it for its observers. For any thread."""
        if not self.wants(kind):
            return
        at = monotonic() if at is None else at
        when = {"time": self.wall_time(at), "monotonic": at}
        event = kind(run_id=self.run_id, ranks=tuple(ranks), attempt=attempt, **when, **details)
        if self._keeps(kind):
            self.events.append(event)
        if self._is_observed(kind):
            observers = self._progress_observers if kind is Progressed else self._observers
            self.outbox.post(partial(call_observers, observers, event))

    def _keeps(self, kind: type[Event]) -> bool:
        return self._keep_events and kind is not Progressed

    def _is_observed(self, kind: type[Event]) -> bool:
        if kind is Progressed:
            return bool(self._progress_observers)
        return len(self._observers) > 1 or self._log.wants(kind)

    def publish_run_started(self) -> None:
        spec = self._spec
        assert isinstance(spec.nprocs, int)  # see GroupSpec
        self._has_started = True
        if not spec.is_multi_node:
            self.ranks = range(spec.nprocs)
        self.publish(
            RunStarted,
            self.ranks,
            at=self.started_at,
            fn=spec.fn_name,
            role=spec.role,
            nprocs=spec.nprocs,
            max_restarts=spec.policy.max_restarts,
            hostname=platform.node(),
            options=describe_options(spec),
        )

    def publish_run_ended(self, state: WorkerState, workers: Collection[Worker], *, restarts: int, reason: str) -> None:
        """Publish RunEnded, once, and pass all events to the observers. Call it again if an exception interrupts it."""
        if self._has_started and not self._has_ended:
            if self.state not in ENDS:  # otherwise an exception came after the change of the state, in the first call
                self.change_state(state, workers)
            elapsed = monotonic() - self.started_at
            attempt = _latest_attempt(workers)
            self._has_ended = True
            self.publish(
                RunEnded, self.ranks, attempt=attempt, state=self.state, elapsed=elapsed, restarts=restarts, reason=reason
            )
        try:
            self.outbox.run_all()
        finally:
            self.outbox.run_all()  # the rest, after a KeyboardInterrupt

    def change_state(self, after: WorkerState, workers: Iterable[Worker]) -> None:
        if after is not self.state and not self._has_ended:
            before, self.state = self.state, after  # first: after an exception here, no second final state can follow
            self.publish(StateChanged, self.ranks, attempt=_latest_attempt(workers), before=before, after=after)

    def wall_time(self, at: float) -> float:
        return self._wall_clock + at


def call_observers(observers: list[Any], event: Event) -> None:
    """Remove those that raise."""
    for observer in tuple(observers):
        try:
            observer(event)
        except USER_ERRORS as error:  # not even sys.exit() in an observer ends the run
            observers[:] = [other for other in observers if other is not observer]
            text = "the observer %r failed at the event %r; it receives no more events"
            log_now(logging.ERROR, text, observer, event.name, error=error)


def _latest_attempt(workers: Iterable[Worker]) -> int:
    return max((worker.restart_count for worker in workers), default=0)

"""Makes all ranks stop at the same step when a stop is requested.

This module runs in the watcher thread.

    StopRequested --> begin: hold the ranks --- HOLD_SECONDS later ---> read the steps that they have passed
    one node                   '--> agree on the highest step
    several nodes              '--> on_steps_held: the leader gets the highest step of each node --- StopAfter ---> agree

The protocol between the watcher and a rank is in wire/stop_step.py.
"""

from collections.abc import Callable
from functools import partial

from mpwatch.events.types import Stopping
from mpwatch.os_support.clock import monotonic
from mpwatch.results.failure import format_ranks
from mpwatch.results.places import format_location
from mpwatch.results.report import format_overdue_ranks
from mpwatch.watcher.call import Call
from mpwatch.watcher.diagnosis.stragglers import get_stacks_or_state
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.processes.process_pool import ProcessPool
from mpwatch.wire.stop_step import HOLD_SECONDS

StepsHeldCallback = Callable[[int | None], object]


class StopAgreements:
    """Makes the ranks of one event loop agree on the step at which they stop.

    Args:
        pool: the ranks.
        event_bus: receives an event for each agreement.
        deferred_log: receives a warning for each agreement.
        call_at: makes the event loop call a function at a time of CLOCK_MONOTONIC.
        is_current: returns whether the ranks of a call have got no other call.
        on_steps_held: is called on several nodes. Its argument is the highest step that a rank of this node has passed, or
            None if no rank has passed a step. On a single node, there is no such function (None).
    """

    def __init__(
        self,
        pool: ProcessPool,
        event_bus: EventBus,
        deferred_log: DeferredLog,
        *,
        call_at: Callable[[float, Callable[[], object]], None],
        is_current: Callable[[Call], bool],
        on_steps_held: StepsHeldCallback | None,
    ) -> None:
        self._pool = pool
        self._event_bus = event_bus
        self._deferred_log = deferred_log
        self._call_at = call_at
        self._is_current = is_current
        self._on_steps_held = on_steps_held

    def begin(self, call: Call, cause: str) -> None:
        """Make each rank of a call wait at its next call of `should_stop`.

        After HOLD_SECONDS, the event loop reads the last step of each rank. On one node, the event loop then calls `agree`
        with the highest of these steps. On several nodes, it calls `on_steps_held`.
        """
        for rank in call.ranks:
            self._pool.get_stop_memory(rank).hold()
        read_steps = partial(self._read_steps, call, cause)
        self._call_at(monotonic() + HOLD_SECONDS, read_steps)

    def _read_steps(self, call: Call, cause: str) -> None:
        if not self._is_current(call):  # the ranks have another call meanwhile
            return
        passed = [self._pool.get_stop_memory(rank).read_passed_step() for rank in call.ranks]
        highest = max((step for step in passed if step is not None), default=None)
        if self._on_steps_held is None:
            self.agree(call, highest, cause)
        else:
            self._on_steps_held(highest)

    def agree(self, call: Call, step: int | None, cause: str) -> None:
        """Make each rank of a call stop after the step whose number is `step`.

        If `step` is None, the ranks stop at their next call of `should_stop`.
        """
        for rank in call.ranks:
            self._pool.get_stop_memory(rank).agree(step)
        attempt = call.attempt
        self._event_bus.publish(Stopping, call.ranks, attempt=attempt, stop_cause=cause, after_step=step)
        ranks = format_ranks(call.ranks)
        if step is None:
            text = "a stop was requested (%s); should_stop() has not been called by %s yet, and its first call returns True"
            self._deferred_log.warning(text, cause, ranks)
        else:
            self._deferred_log.warning("a stop was requested (%s); the last step of %s is step %d", cause, ranks, step)

    def log_overdue_ranks(self, call: Call, stop_timeout: float) -> None:
        """Log a warning with the step and the code location of each rank that has not returned within `stop_timeout`.

        Ask these ranks for their stacks before you call this method.
        """
        places = {}
        for rank, observed in call.observed.items():
            if observed.answer is None and not observed.has_exited:
                step = self._pool.get_stop_memory(rank).read_passed_step()
                at_step = "" if step is None else f", at step {step}"
                places[rank] = at_step + format_location(get_stacks_or_state(observed))
        if places:  # otherwise the last one has just returned
            self._deferred_log.warning("%s", format_overdue_ranks(stop_timeout, places))

"""Makes all ranks stop at the same step when a stop is requested. Runs in the watcher thread.

    StopRequested --> begin: hold the ranks --- HOLD_SECONDS later ---> read the steps that they have passed
    one node                   '--> agree on the highest step
    several nodes              '--> on_steps_held: the leader gets the highest step of each node --- StopAfter ---> agree

The protocol between the watcher and a rank is in wire/stop_step.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(eq=False)
class StopAgreements:
    pool: ProcessPool
    event_bus: EventBus
    deferred_log: DeferredLog
    call_at: Callable[[float, Callable[[], object]], None]
    is_current: Callable[[Call], bool]  # whether the ranks of a call have got no other call
    on_steps_held: StepsHeldCallback | None  # on several nodes, gets the highest step that a rank of this node has passed

    def begin(self, call: Call, cause: str) -> None:
        """Make each rank wait at its next call of `should_stop`, and agree, or call `on_steps_held`, HOLD_SECONDS later."""
        for rank in call.ranks:
            self.pool.get_stop_memory(rank).hold()
        self.call_at(monotonic() + HOLD_SECONDS, partial(self._read_steps, call, cause))

    def _read_steps(self, call: Call, cause: str) -> None:
        if not self.is_current(call):  # the ranks have another call meanwhile
            return
        passed = [self.pool.get_stop_memory(rank).read_passed_step() for rank in call.ranks]
        highest = max((step for step in passed if step is not None), default=None)
        if self.on_steps_held is None:
            self.agree(call, highest, cause)
        else:
            self.on_steps_held(highest)

    def agree(self, call: Call, step: int | None, cause: str) -> None:
        """Make each rank stop after this step, or at its next call of `should_stop` if that is None."""
        for rank in call.ranks:
            self.pool.get_stop_memory(rank).agree(step)
        self.event_bus.publish(Stopping, call.ranks, attempt=call.attempt, stop_cause=cause, after_step=step)
        ranks = format_ranks(call.ranks)
        if step is None:
            text = "a stop was requested (%s); should_stop() has not been called by %s yet, and its first call returns True"
            self.deferred_log.warning(text, cause, ranks)
        else:
            self.deferred_log.warning("a stop was requested (%s); the last step of %s is step %d", cause, ranks, step)

    def log_overdue_ranks(self, call: Call, stop_timeout: float) -> None:
        """Warn of each rank that has not returned: its step, and where it is. Ask them for their stacks before."""
        places = {}
        for rank, observed in call.observed.items():
            if observed.answer is None and not observed.has_exited:
                step = self.pool.get_stop_memory(rank).read_passed_step()
                at_step = "" if step is None else f", at step {step}"
                places[rank] = at_step + format_location(get_stacks_or_state(observed))
        if places:  # otherwise the last one has just returned
            self.deferred_log.warning("%s", format_overdue_ranks(stop_timeout, places))

"""Ranks that stay: one life of them after another, each for as many calls as it lasts.

A life ends when a rank is lost, or could not be spared; the next call begins another. A loss is noticed when it happens, by
the thread of that life, which sleeps meanwhile.
"""

import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from mpwatch.options.spec import GroupSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.descriptors import standard_descriptors
from mpwatch.results.model import WorkerState
from mpwatch.results.report import verdict
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.commands import PendingCall
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.machine.transitions import Shutdown, StopReason
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.observers.view_driver import MakeView, no_view
from mpwatch.watcher.output.output_thread import LAST_SECONDS
from mpwatch.watcher.pack_call import pack_call
from mpwatch.watcher.restarts.run_controller import diagnose_attempt, tell_fates
from mpwatch.watcher.run import BlockingCall
from mpwatch.watcher.watcher_thread import WatcherThread
from mpwatch.wire.pickling.call_payload import Call

log = logging.getLogger("mpwatch")
LOST = "some were lost while there was no call"
CUT_SHORT = "the last call could not be brought to its end"


class PersistentRanks:
    """For one thread at a time, but for `state` and `workers`. Each call has a view of its own."""

    def __init__(self, spec: GroupSpec, make_view: MakeView = no_view) -> None:
        self._spec = spec
        self._make_view = make_view
        self._journal = EventBus(uuid.uuid4().hex, spec.observers, keep=False)
        self._life: WatcherThread | None = None
        self._restart_count = -1
        self._why = LOST  # if the ranks have to be started anew
        self._epoch = 0  # of the process group: a call that did not succeed may have left its ranks out of step
        self.workers: tuple[Worker, ...] = ()

    @property
    def state(self) -> WorkerState:
        """INIT, HEALTHY, or UNHEALTHY if the ranks have to be started anew."""
        life = self._life
        if life is None:
            return WorkerState.UNHEALTHY
        return life.mailbox.state if life.has_started() else WorkerState.INIT

    @property
    def has_ranks(self) -> bool:
        """Whether there are any that have to be ended."""
        return self._life is not None

    def start(self) -> None:
        """Start the ranks. Raises LaunchError."""
        with standard_descriptors():
            life = self._begin_life()
            self._journal.begin(self._spec, fn="")
            visit = self._visit(life, None, until=life.has_started)
        if visit.signals.received or visit.signals.raised is not None:
            self.close()
        visit.raise_error()
        visit.signals.deliver()

    def call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout: float | None
    ) -> RunResult[Any]:
        """Call a function in every rank.

        Raises LaunchError, or what the host's handler raises for a signal that came during the call.
        """
        __tracebackhide__ = True  # see mpwatch.run
        started_at = time.monotonic()
        payload = pack_call(Call(fn, args, kwargs, self._spec.backend, self._epoch))
        self._epoch += 1  # for the next one, unless this succeeds
        try:
            answer = None if self._life is None else self._call(self._life, PendingCall(payload, started_at, timeout))
            visit, result = self._call_anew(PendingCall(payload, started_at, timeout)) if answer is None else answer
        finally:
            payload.close()
        visit.deliver_signals(result)
        return result

    def close(self) -> None:
        """Have the ranks end, and wait for that. What signals came meanwhile do what they would have done."""
        if self._life is not None:
            visit = self._visit(self._life, Shutdown(), until=lambda: False)
            visit.raise_error()
            visit.signals.deliver()

    def forget(self) -> None:
        """Have the ranks end by themselves."""
        life, self._life = self._life, None
        if life is not None and life.is_ours():
            life.mailbox.post(Shutdown())
            life.forget()

    def end_with_program(self) -> None:
        """Have the ranks end, and wait for that; nobody uses this any more."""
        life = self._life
        if life is not None and life.is_ours():
            life.mailbox.post(Shutdown())
            life.join()
            life.settle(LAST_SECONDS if life.output.is_stuck else None)
            life.close()
            self._life, self._why = None, "the program is ending"

    def tell_end(self, reason: str = "") -> None:
        """Nobody will call them any more."""
        self._journal.end(WorkerState.STOPPED, self.workers, restarts=max(0, self._restart_count), reason=reason)

    def _begin_life(self) -> WatcherThread:
        life = WatcherThread(self._spec, self._journal, restart_count=self._restart_count + 1, keep=True)
        try:
            life.prepare()
            life.output.attach()
        except BaseException:
            life.close()
            raise
        self._restart_count += 1
        self.workers = life.workers
        self._life = life
        return life

    def _call_anew(self, errand: PendingCall) -> tuple[BlockingCall, RunResult[Any]]:
        """Start the ranks for this call. It is there before they are, so that it is told what becomes of them."""
        log.warning("all ranks are started anew: %s", self._why)
        with standard_descriptors():
            answer = self._call(self._begin_life(), errand)
        assert answer is not None
        return answer

    def _call(self, life: WatcherThread, errand: PendingCall) -> tuple[BlockingCall, RunResult[Any]] | None:
        """Return None if a rank had died before the call came."""
        why, self._why = self._why, CUT_SHORT  # until it is known better
        life.output.attach()
        visit = self._visit(life, errand, until=lambda: errand.is_done)
        visit.raise_error()
        if not errand.facts:
            self._why = why
            visit.signals.deliver()
            return None
        (facts,) = errand.facts
        has_succeeded = facts.verdict is StopReason.SUCCEEDED
        if has_succeeded:
            self._epoch -= 1
        result = visit.conclude(lambda: self._judge(facts))
        if self._life is None:
            how = "some ended after they had returned" if has_succeeded else verdict(result)
            self._why = f"not all came through the last call: {how}"
        elif not visit.signals.received:  # which may have come too late for the call, and are at work
            self._why = LOST
        return visit, result

    def _judge(self, facts: AttemptObservations) -> RunResult[Any]:
        result = diagnose_attempt(facts)
        tell_fates(self._journal, facts, result)
        self._journal.tell()
        return result

    def _seconds_left(self, life: WatcherThread, thing: PendingCall | Shutdown | None) -> float:
        """Of the time that a call may take. The end does not wait for a reader who was waited for in vain before."""
        if isinstance(thing, Shutdown) and life.output.is_stuck:
            return 0.0
        if not isinstance(thing, PendingCall) or thing.timeout is None:
            return math.inf
        return thing.started_at + thing.timeout - time.monotonic()

    def _visit(
        self, life: WatcherThread, thing: PendingCall | Shutdown | None, *, until: Callable[[], bool]
    ) -> BlockingCall:
        visit = BlockingCall(life, make_view=self._make_view)
        try:
            visit.pay(thing, until=until)
            life.settle(visit.patience(self._seconds_left(life, thing)))
        finally:
            if life.is_over:
                life.close()
                self._life = None
        return visit

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
from mpwatch.watcher.restarts.run_controller import diagnose_attempt, publish_outcomes
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
        self._event_bus = EventBus(uuid.uuid4().hex, spec.observers, keep=False)
        self._watcher_thread: WatcherThread | None = None
        self._restart_count = -1
        self._why = LOST  # if the ranks have to be started anew
        self._epoch = 0  # of the process group: a call that did not succeed may have left its ranks out of step
        self.workers: tuple[Worker, ...] = ()

    @property
    def state(self) -> WorkerState:
        """INIT, HEALTHY, or UNHEALTHY if the ranks have to be started anew."""
        watcher_thread = self._watcher_thread
        if watcher_thread is None:
            return WorkerState.UNHEALTHY
        return watcher_thread.commands.state if watcher_thread.has_started() else WorkerState.INIT

    @property
    def has_ranks(self) -> bool:
        """Whether there are any that have to be ended."""
        return self._watcher_thread is not None

    def start(self) -> None:
        """Start the ranks. Raises LaunchError."""
        with standard_descriptors():
            watcher_thread = self._start_watcher_thread()
            self._event_bus.begin(self._spec, fn="")
            blocking_call = self._block(watcher_thread, None, until=watcher_thread.has_started)
        if blocking_call.signals.received or blocking_call.signals.raised is not None:
            self.close()
        blocking_call.raise_error()
        blocking_call.signals.deliver()

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
            answer = (
                None
                if self._watcher_thread is None
                else self._call(self._watcher_thread, PendingCall(payload, started_at, timeout))
            )
            blocking_call, result = self._call_anew(PendingCall(payload, started_at, timeout)) if answer is None else answer
        finally:
            payload.close()
        blocking_call.deliver_signals(result)
        return result

    def close(self) -> None:
        """Have the ranks end, and wait for that. What signals came meanwhile do what they would have done."""
        if self._watcher_thread is not None:
            blocking_call = self._block(self._watcher_thread, Shutdown(), until=lambda: False)
            blocking_call.raise_error()
            blocking_call.signals.deliver()

    def forget(self) -> None:
        """Have the ranks end by themselves."""
        watcher_thread, self._watcher_thread = self._watcher_thread, None
        if watcher_thread is not None and watcher_thread.is_ours():
            watcher_thread.commands.post(Shutdown())
            watcher_thread.forget()

    def end_with_program(self) -> None:
        """Have the ranks end, and wait for that; nobody uses this any more."""
        watcher_thread = self._watcher_thread
        if watcher_thread is not None and watcher_thread.is_ours():
            watcher_thread.commands.post(Shutdown())
            watcher_thread.join()
            watcher_thread.settle(LAST_SECONDS if watcher_thread.output.is_stuck else None)
            watcher_thread.close()
            self._watcher_thread, self._why = None, "the program is ending"

    def tell_end(self, reason: str = "") -> None:
        """Nobody will call them any more."""
        self._event_bus.end(WorkerState.STOPPED, self.workers, restarts=max(0, self._restart_count), reason=reason)

    def _start_watcher_thread(self) -> WatcherThread:
        watcher_thread = WatcherThread(self._spec, self._event_bus, restart_count=self._restart_count + 1, keep=True)
        try:
            watcher_thread.prepare()
            watcher_thread.output.attach()
        except BaseException:
            watcher_thread.close()
            raise
        self._restart_count += 1
        self.workers = watcher_thread.workers
        self._watcher_thread = watcher_thread
        return watcher_thread

    def _call_anew(self, pending_call: PendingCall) -> tuple[BlockingCall, RunResult[Any]]:
        """Start the ranks for this call. It is there before they are, so that it is told what becomes of them."""
        log.warning("all ranks are started anew: %s", self._why)
        with standard_descriptors():
            answer = self._call(self._start_watcher_thread(), pending_call)
        assert answer is not None
        return answer

    def _call(self, watcher_thread: WatcherThread, pending_call: PendingCall) -> tuple[BlockingCall, RunResult[Any]] | None:
        """Return None if a rank had died before the call came."""
        why, self._why = self._why, CUT_SHORT  # until it is known better
        watcher_thread.output.attach()
        blocking_call = self._block(watcher_thread, pending_call, until=lambda: pending_call.is_done)
        blocking_call.raise_error()
        if not pending_call.observations:
            self._why = why
            blocking_call.signals.deliver()
            return None
        (observations,) = pending_call.observations
        has_succeeded = observations.verdict is StopReason.SUCCEEDED
        if has_succeeded:
            self._epoch -= 1
        result = blocking_call.build_result(lambda: self._judge(observations))
        if self._watcher_thread is None:
            how = "some ended after they had returned" if has_succeeded else verdict(result)
            self._why = f"not all came through the last call: {how}"
        elif not blocking_call.signals.received:  # which may have come too late for the call, and are at work
            self._why = LOST
        return blocking_call, result

    def _judge(self, observations: AttemptObservations) -> RunResult[Any]:
        result = diagnose_attempt(observations)
        publish_outcomes(self._event_bus, observations, result)
        self._event_bus.dispatch()
        return result

    def _seconds_left(self, watcher_thread: WatcherThread, thing: PendingCall | Shutdown | None) -> float:
        """Of the time that a call may take. The end does not wait for a reader who was waited for in vain before."""
        if isinstance(thing, Shutdown) and watcher_thread.output.is_stuck:
            return 0.0
        if not isinstance(thing, PendingCall) or thing.timeout is None:
            return math.inf
        return thing.started_at + thing.timeout - time.monotonic()

    def _block(
        self, watcher_thread: WatcherThread, thing: PendingCall | Shutdown | None, *, until: Callable[[], bool]
    ) -> BlockingCall:
        blocking_call = BlockingCall(watcher_thread, make_view=self._make_view)
        try:
            blocking_call.execute(thing, until=until)
            watcher_thread.settle(blocking_call.patience(self._seconds_left(watcher_thread, thing)))
        finally:
            if watcher_thread.is_over:
                watcher_thread.close()
                self._watcher_thread = None
        return blocking_call

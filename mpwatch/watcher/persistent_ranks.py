"""The ranks of a WorkerGroup: they stay between calls; a call restarts them if one was lost. Runs in the caller's threads.

    start --> call --> call --> ... a rank is lost, or has to be stopped ... --> call: restart, then call --> ... --> close

Each restart has a WatcherThread of its own. While there is no call that thread waits; so it notices a lost rank at once, and
stops the others. The next call then starts all ranks again.
"""

import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mpwatch.options.spec import GroupSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.descriptors import open_standard_descriptors
from mpwatch.results.model import WorkerState
from mpwatch.results.report import format_end_of_program, format_verdict
from mpwatch.results.run_result import RunResult
from mpwatch.results.stacks import Stacks
from mpwatch.watcher.commands import PendingCall
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.handler_errors import run_until_handler_raises
from mpwatch.watcher.machine.transitions import Shutdown, StopReason
from mpwatch.watcher.observers.deferred_log import log_now
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.observers.view_driver import MakeView, no_view
from mpwatch.watcher.output.output_thread import LAST_DRAIN_SECONDS
from mpwatch.watcher.pack_call import pack_call
from mpwatch.watcher.restarts.run_controller import diagnose_attempt, publish_outcomes
from mpwatch.watcher.run import BlockingCall
from mpwatch.watcher.watcher_thread import WatcherThread
from mpwatch.wire.pickling.call_payload import Call

LOST_WHILE_IDLE = "a rank was lost while no call was running"
CALL_ABORTED = "the last call was aborted"


class PersistentRanks:
    """The ranks of one WorkerGroup.

    One thread at a time may call the methods; any thread may read `state` and `workers`. Each call has its own live view.
    """

    def __init__(self, spec: GroupSpec, make_view: MakeView = no_view) -> None:
        self._spec = spec
        self._make_view = make_view
        self._event_bus = EventBus(uuid.uuid4().hex, spec.observers, keep_events=False)
        self._watcher_thread: WatcherThread | None = None
        self._restart_count = -1
        self._restart_reason = LOST_WHILE_IDLE  # for the log, if the next call has to restart the ranks
        self._process_group_version = 0  # a new one after a failed call makes a new process group
        self.workers: tuple[Worker, ...] = ()

    @property
    def state(self) -> WorkerState:
        """INIT, HEALTHY, or UNHEALTHY if the next call has to restart the ranks."""
        watcher_thread = self._watcher_thread
        if watcher_thread is None:
            return WorkerState.UNHEALTHY
        return watcher_thread.commands.state if watcher_thread.has_started_ranks() else WorkerState.INIT

    @property
    def has_ranks(self) -> bool:
        """Whether there are ranks that have to be ended."""
        return self._watcher_thread is not None

    def start(self) -> None:
        """Start the ranks. Raises LaunchError."""
        with open_standard_descriptors():
            watcher_thread = run_until_handler_raises(self._make_watcher_thread)
            self._event_bus.publish_run_started(self._spec, fn="")
            blocking_call = self._execute(watcher_thread, None, until=watcher_thread.has_started_ranks)
        if blocking_call.signals.received or blocking_call.signals.handler_error is not None:
            self.close()
        blocking_call.raise_error()
        blocking_call.signals.deliver_received()

    def call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], timeout: float | None
    ) -> RunResult[Any]:
        """Call a function in every rank. Restart the ranks before if one of them was lost.

        Raises LaunchError, or what the host's handler raises for a signal that came during the call.
        """
        __tracebackhide__ = True  # see mpwatch.run
        started_at = time.monotonic()
        spec, version = self._spec, self._process_group_version
        payload = pack_call(Call(fn, args, kwargs, spec.backend, version, backend_timeout=spec.backend_timeout))
        self._process_group_version += 1  # for the next call, unless this one succeeds
        try:
            answer = None
            if self._watcher_thread is not None:
                answer = self._call(self._watcher_thread, PendingCall(payload, started_at, timeout))
            if answer is None:
                answer = self._restart_and_call(PendingCall(payload, started_at, timeout))
        finally:
            payload.close()
        blocking_call, result = answer
        blocking_call.deliver_signals(result)
        return result

    def close(self) -> None:
        """Have the ranks end, and wait for that. Then deliver the signals that have come meanwhile."""
        if self._watcher_thread is not None:
            blocking_call = self._execute(self._watcher_thread, Shutdown(), until=lambda: False)
            blocking_call.raise_error()
            blocking_call.signals.deliver_received()

    def take_stacks(self) -> Stacks:
        """Return the present stacks of all ranks; empty if there are none. Any thread may call it, also during a call."""
        watcher_thread = self._watcher_thread
        return Stacks() if watcher_thread is None else watcher_thread.take_stacks()

    def shut_down_in_background(self) -> None:
        """Have the ranks end, and do not wait for that. This is for a WorkerGroup without references."""
        watcher_thread, self._watcher_thread = self._watcher_thread, None
        if watcher_thread is not None and watcher_thread.belongs_to_this_process():
            watcher_thread.commands.post(Shutdown())
            watcher_thread.close_when_finished()

    def shut_down_at_exit(self) -> None:
        """Have the ranks end, and wait for that. For the end of the host program: no observers, no live view."""
        watcher_thread = self._watcher_thread
        if watcher_thread is not None and watcher_thread.belongs_to_this_process():
            watcher_thread.commands.post(Shutdown())
            watcher_thread.join()
            watcher_thread.drain_output(LAST_DRAIN_SECONDS if watcher_thread.output.is_reader_stalled else None)
            watcher_thread.close()
            self._watcher_thread, self._restart_reason = None, "the program is ending"

    def publish_run_ended(self, reason: str = "") -> None:
        """Publish that there will be no more calls."""
        restarts = max(0, self._restart_count)
        publish = self._event_bus.publish_run_ended
        run_until_handler_raises(partial(publish, WorkerState.STOPPED, self.workers, restarts=restarts, reason=reason))

    def _make_watcher_thread(self) -> WatcherThread:
        watcher_thread = WatcherThread(self._spec, self._event_bus, restart_count=self._restart_count + 1, keep_ranks=True)
        try:
            watcher_thread.prepare()
            watcher_thread.output.use_current_streams()
        except BaseException:
            watcher_thread.close()
            raise
        self._restart_count += 1
        self.workers = watcher_thread.workers
        self._watcher_thread = watcher_thread
        return watcher_thread

    def _restart_and_call(self, pending_call: PendingCall) -> tuple[BlockingCall, RunResult[Any]]:
        """Start the ranks for this call. The call is posted before they start, so a failure to start is its failure."""
        log_now(logging.WARNING, "all ranks are restarted: %s", self._restart_reason)
        with open_standard_descriptors():
            answer = self._call(run_until_handler_raises(self._make_watcher_thread), pending_call)
        assert answer is not None
        return answer

    def _call(self, watcher_thread: WatcherThread, pending_call: PendingCall) -> tuple[BlockingCall, RunResult[Any]] | None:
        """Return None if a rank had died before the call came."""
        earlier_reason, self._restart_reason = self._restart_reason, CALL_ABORTED  # until the call has ended
        watcher_thread.output.use_current_streams()
        blocking_call = self._execute(watcher_thread, pending_call, until=lambda: pending_call.is_done)
        blocking_call.raise_error()
        if not pending_call.observations:
            self._restart_reason = earlier_reason
            blocking_call.signals.deliver_received()
            return None
        (observations,) = pending_call.observations
        has_succeeded = observations.stop_reason is StopReason.SUCCEEDED
        if has_succeeded:
            self._process_group_version -= 1
        if self._watcher_thread is not None and not blocking_call.signals.received:
            self._restart_reason = LOST_WHILE_IDLE  # else a signal may reach the ranks after the call, and end them
        result = blocking_call.build_result(partial(self._diagnose, observations))
        if self._watcher_thread is None:
            why = "a rank ended after it had returned" if has_succeeded else format_verdict(result)
            self._restart_reason = f"not all of them survived the last call: {why}"
        return blocking_call, result

    def _diagnose(self, observations: AttemptObservations) -> RunResult[Any]:
        result = diagnose_attempt(observations)
        if result.state is WorkerState.STOPPED and not result.reason:  # only `shut_down_at_exit` interrupts a call
            result = replace(result, reason=format_end_of_program())
        publish_outcomes(self._event_bus, observations, result)
        self._event_bus.dispatch()
        return result

    def _execute(
        self, watcher_thread: WatcherThread, command: PendingCall | Shutdown | None, *, until: Callable[[], bool]
    ) -> BlockingCall:
        blocking_call = BlockingCall(watcher_thread, make_view=self._make_view)
        try:
            blocking_call.execute(command, until=until)
            watcher_thread.drain_output(blocking_call.drain_timeout(_seconds_left(watcher_thread, command)))
        finally:
            if watcher_thread.is_finished:
                watcher_thread.close()
                self._watcher_thread = None
        return blocking_call


def _seconds_left(watcher_thread: WatcherThread, command: PendingCall | Shutdown | None) -> float:
    """Return the time left to wait for the reader of the output: the rest of the call's timeout; infinite if it has none.

    If an earlier wait for the reader timed out, a Shutdown does not wait for it again.
    """
    if isinstance(command, Shutdown) and watcher_thread.output.is_reader_stalled:
        return 0.0
    if not isinstance(command, PendingCall) or command.timeout is None:
        return math.inf
    return command.started_at + command.timeout - time.monotonic()

"""The ranks of a WorkerGroup, which stay alive between calls. Runs in the caller's threads.

Calls of different ranks can run at the same time, each in a thread of the caller.

    start --> call --> call --> ... a rank is lost, or has to be stopped ... --> call: restart, then call --> ... --> close

With scope="group", the loss of a rank ends all running calls and all other ranks. The next call creates a new WatcherThread,
which starts all ranks again.

With scope="worker", the loss of a rank ends only the call in which the rank was lost. The existing WatcherThread restarts
the lost rank when a call needs the rank. If all ranks are lost, the next call creates a new WatcherThread.
"""

import logging
import math
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

from mpwatch.options.spec import PersistentGroupSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.descriptors import open_standard_descriptors
from mpwatch.results.model import WorkerState
from mpwatch.results.report import format_end_of_program, format_ended_ranks, format_loss_in_other_call
from mpwatch.results.run_result import RunResult
from mpwatch.results.stacks import Stacks
from mpwatch.watcher.commands import StartLostRanks
from mpwatch.watcher.handler_errors import run_until_handler_raises
from mpwatch.watcher.machine.transitions import Shutdown, StopReason
from mpwatch.watcher.observers.deferred_log import log_now
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.observers.view_driver import MakeView, no_view
from mpwatch.watcher.output.output_thread import LAST_DRAIN_SECONDS
from mpwatch.watcher.pack_call import pack_call
from mpwatch.watcher.pending_call import PendingCall
from mpwatch.watcher.restarts.run_controller import diagnose_attempt, publish_outcomes
from mpwatch.watcher.run import BlockingCall
from mpwatch.watcher.signal_options import check_stop_signals
from mpwatch.watcher.watcher_thread import WatcherThread
from mpwatch.wire.pickling.call_payload import Call

CallOutcome = tuple[BlockingCall, RunResult[Any], bool]  # the last one: whether all ranks have returned
OnStart = Callable[[BlockingCall], object]  # see PersistentRanks.call
BeginCall = Callable[[WatcherThread], BlockingCall | None]  # see PersistentRanks._begin

LOST_WHILE_IDLE = "a rank was lost while it had no call"
CALL_ABORTED = "the last call was aborted"
START_INTERRUPTED = "a signal interrupted the start of the ranks"
CLOSED = "this WorkerGroup is closed; make another one"
ENDED_AT_EXIT = "the program is ending, and has ended the ranks of this WorkerGroup"


class PersistentRanks:
    """The ranks of one WorkerGroup.

    Calls that run at the same time must use different ranks. Do not use `start` or `close` while a call is running. But you
    can use `close` while the thread of a cancelled call is still running. Any thread may read `state` and `workers`.
    """

    def __init__(self, spec: PersistentGroupSpec, make_view: MakeView = no_view) -> None:
        self._spec = spec
        self._make_view = make_view
        self._event_bus = EventBus(uuid.uuid4().hex, spec, keep_events=False)
        self._watcher_thread: WatcherThread | None = None
        self._restart_count = -1  # how often all ranks, or one of them, were restarted; -1: they were not started yet
        self._restart_reason = LOST_WHILE_IDLE  # for the log, if the next call has to restart the ranks
        self._loss_reasons: dict[int, str] = {}  # the same with scope="worker", for ranks that were lost in a call
        self._process_group_version = 0  # a new one makes a new process group, after a call of all ranks that has failed
        self._joined: tuple[WatcherThread, int] | None = None  # whose ranks have made which process group
        self._start_refusal = ""  # why no ranks may be started any more; empty: they may be started
        # To replace the watcher thread, and to begin and end calls. A thread also holds it while it calls the user's `env`.
        self._lock = threading.RLock()
        self._blocking_calls: WeakSet[BlockingCall] = WeakSet()  # that may not be over
        self.workers: tuple[Worker, ...] = ()

    @property
    def state(self) -> WorkerState:
        """The state of all ranks: INIT, HEALTHY or UNHEALTHY.

        The state is UNHEALTHY if the next call must restart ranks, or if the heartbeat of a rank is late.
        """
        watcher_thread = self._watcher_thread
        if watcher_thread is None:
            return WorkerState.UNHEALTHY
        return watcher_thread.commands.state if watcher_thread.has_started_ranks() else WorkerState.INIT

    @property
    def has_ranks(self) -> bool:
        """False if it is certain that the WorkerGroup has no ranks, and True otherwise."""
        return self._watcher_thread is not None

    def start(self) -> None:
        """Start the ranks. Raises LaunchError."""
        with open_standard_descriptors():
            watcher_thread = run_until_handler_raises(self._make_watcher_thread)
            self._event_bus.publish_run_started(self._spec, fn="")
            blocking_call = self._begin(watcher_thread)
            assert blocking_call is not None  # there is no other call
            self._execute(blocking_call, None, until=watcher_thread.has_started_ranks)
        if blocking_call.signals.received or blocking_call.signals.handler_error is not None:
            self._end_ranks()
            self._restart_reason = START_INTERRUPTED  # the group stays if the handler of the signal raises no exception
        blocking_call.raise_error()
        blocking_call.signals.deliver_received()

    @property
    def lacks_process_group(self) -> bool:
        """True if the option `backend` is set and the ranks have no usable process group of torch.

        The ranks can make torch's process group only in a call that runs on all ranks.
        """
        watcher_thread = self._watcher_thread
        is_joined = watcher_thread is not None and self._joined == (watcher_thread, self._process_group_version)
        return self._spec.torch_backend.name is not None and not is_joined

    def call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        timeout: float | None,
        ranks: tuple[int, ...] | None = None,
        *,
        on_start: OnStart | None = None,
        has_view: bool = True,
    ) -> RunResult[Any] | None:
        """Call a function in these ranks, or in all ranks if `ranks` is None.

        `on_start` is called with the BlockingCall, and is called again if the ranks are restarted. A call with `on_start`
        has no live view, because the call runs in the background.

        Return None if a rank was lost before the call began, so that torch's process group no longer exists. The method can
        return None only if `ranks` is not None and the option `backend` is set. See `lacks_process_group`.

        Raises LaunchError. Raises RuntimeError if the call needs to start ranks after the WorkerGroup was closed, or while
        the program ends. Raises ValueError if mpwatch cannot install its handler for a signal that an option names. If
        a signal handler of the calling program raises an exception during the call, `call` raises it, too.
        """
        __tracebackhide__ = True  # see mpwatch.run
        if threading.current_thread() is threading.main_thread():
            check_stop_signals(self._spec)
        started_at = monotonic()
        may_reach_ranks = False

        def begin(watcher_thread: WatcherThread) -> BlockingCall | None:
            nonlocal may_reach_ranks
            blocking_call = self._begin(watcher_thread, on_start=on_start, has_view=has_view and on_start is None)
            may_reach_ranks |= blocking_call is not None
            return blocking_call

        spec, version = self._spec, self._process_group_version
        backend = (
            spec.torch_backend.name if ranks is None else None
        )  # some ranks alone can neither make nor destroy a process group
        payload = pack_call(Call(fn, args, kwargs, backend, version, backend_timeout=spec.torch_backend.timeout))
        has_succeeded = False
        try:
            answer = None
            while answer is None and (watcher_thread := self._watcher_thread) is not None:
                pending_call = PendingCall(payload, started_at, timeout, ranks=ranks)
                answer = self._call(watcher_thread, pending_call, begin)
                if not pending_call.ranks_to_restart:
                    break
                self._restart_lost_ranks(watcher_thread, pending_call.ranks_to_restart)
            if answer is None and ranks is not None and spec.torch_backend.name is not None:
                return None
            if answer is None:
                pending_call = PendingCall(payload, started_at, timeout, ranks=ranks)
                answer = self._restart_and_call(pending_call, begin)
            blocking_call, result, has_succeeded = answer
        finally:
            payload.close()
            with self._lock:
                if ranks is None and has_succeeded:
                    self._joined = (blocking_call.watcher_thread, version)
                elif ranks is None and may_reach_ranks:
                    self._process_group_version = version + 1
        blocking_call.deliver_signals(result)
        if result.state is not WorkerState.SUCCEEDED and (ended_ranks := self._list_ended_ranks(pending_call)):
            result = replace(result, notes=(*result.notes, format_ended_ranks(ended_ranks)))
        return result

    def close(self) -> None:
        """End the ranks, and wait for their end. Once this method has begun, no call can start ranks.

        If signals come while `close` waits, the calling program's signal handlers run after the end of the ranks.
        """
        self._start_refusal = CLOSED
        self._end_ranks()

    def take_stacks(self) -> Stacks:
        """Return the present stacks of all ranks. Return an empty Stacks object if there are no ranks.

        Any thread may call this method.
        """
        watcher_thread = self._watcher_thread
        return Stacks() if watcher_thread is None else watcher_thread.take_stacks()

    def explain_loss(self, rank: int, reason: str) -> None:
        """Set the reason that the log gives when the lost rank, or the whole WorkerGroup, is restarted.

        Without scope="worker", `explain_loss` does nothing. If the rank was lost while it had no call, `explain_loss` does
        nothing.
        """
        if rank in self._loss_reasons:
            self._restart_reason = self._restart_reason.replace(self._loss_reasons[rank], reason)
            self._loss_reasons[rank] = reason

    def shut_down_in_background(self) -> None:
        """End the ranks, but do not wait for their end.

        Use this method if Python deletes a WorkerGroup that the program has not closed.
        """
        watcher_thread, self._watcher_thread = self._watcher_thread, None
        if watcher_thread is not None and watcher_thread.belongs_to_this_process():
            watcher_thread.commands.post(Shutdown())
            watcher_thread.close_when_finished()

    def shut_down_at_exit(self) -> None:
        """End the ranks when the calling program ends, and wait for their end.

        Once this method has begun, no call can start ranks.
        """
        self._start_refusal = ENDED_AT_EXIT
        watcher_thread = self._watcher_thread
        if watcher_thread is not None and watcher_thread.belongs_to_this_process():
            watcher_thread.commands.post(Shutdown())
            watcher_thread.join()
            watcher_thread.drain_output(LAST_DRAIN_SECONDS if watcher_thread.output.is_reader_stalled else None)
            with self._lock:
                self._close(watcher_thread)

    def publish_run_ended(self, reason: str = "") -> None:
        """Publish the event RunEnded after the last call of the group."""
        restarts = max(0, self._restart_count)
        publish = self._event_bus.publish_run_ended
        run_until_handler_raises(partial(publish, WorkerState.STOPPED, self.workers, restarts=restarts, reason=reason))

    def _end_ranks(self) -> None:
        with self._lock:  # a call that was cancelled may be making a watcher thread
            watcher_thread = self._watcher_thread
        if watcher_thread is not None and (blocking_call := self._begin(watcher_thread)) is not None:
            self._execute(blocking_call, Shutdown(), until=lambda: False)
            blocking_call.raise_error()
            blocking_call.signals.deliver_received()

    def _check_start(self) -> None:
        """Raise RuntimeError if `close` or `shut_down_at_exit` has begun.

        After the start of `close`, the thread of a cancelled call can still try to start ranks.
        """
        if self._start_refusal:
            raise RuntimeError(self._start_refusal)

    def _make_watcher_thread(self) -> WatcherThread:
        with self._lock:
            current = self._watcher_thread
            if current is not None and not current.is_finished:  # another call has made it
                return current
            return self._make_new_watcher_thread()

    def _make_new_watcher_thread(self) -> WatcherThread:
        self._check_start()
        if self._restart_count >= 0:
            log_now(logging.WARNING, "all ranks are restarted: %s", self._restart_reason)
        restart_count = max((worker.restart_count for worker in self.workers), default=-1) + 1
        watcher_thread = WatcherThread(self._spec, self._event_bus, restart_count=restart_count, keep_ranks=True)
        try:
            watcher_thread.prepare()
            watcher_thread.output.use_current_streams()
            self._check_start()  # again: `prepare` calls functions of the user, such as `env`
        except BaseException:
            watcher_thread.close()
            raise
        self._restart_count += 1
        self._restart_reason = LOST_WHILE_IDLE
        self._loss_reasons.clear()
        self.workers = watcher_thread.workers
        self._watcher_thread = watcher_thread
        return watcher_thread

    def _restart_lost_ranks(self, watcher_thread: WatcherThread, ranks: Sequence[int]) -> None:
        """With scope="worker", make the watcher thread restart the lost ranks in `ranks`.

        If the watcher thread has ended because all ranks were lost, this method starts no rank.
        """
        self._check_start()
        with open_standard_descriptors(), self._lock:
            if self._watcher_thread is not watcher_thread:  # all ranks were lost, and another call has closed it
                return
            counts = {worker.rank: worker.restart_count for worker in self.workers}
            setups = []
            for rank in ranks:
                reason = self._loss_reasons.pop(rank, "it was lost while it had no call")
                log_now(logging.WARNING, "rank %d is restarted: %s", rank, reason)
                setups += run_until_handler_raises(partial(watcher_thread.prepare_restart, [rank], counts[rank] + 1))
            self._restart_count += len(ranks)
            self.workers = watcher_thread.workers
            watcher_thread.commands.post(StartLostRanks(setups))

    def _restart_and_call(self, pending_call: PendingCall, begin: BeginCall) -> CallOutcome:
        """Start the ranks and execute the call.

        The watcher thread gets the call first, and then starts the ranks. If the ranks cannot start, the call fails. If a
        rank is lost before the call begins, start the ranks again.
        """
        outcome = None
        while outcome is None:
            with open_standard_descriptors():
                outcome = self._call(run_until_handler_raises(self._make_watcher_thread), pending_call, begin)
        return outcome

    def _call(self, watcher_thread: WatcherThread, pending_call: PendingCall, begin: BeginCall) -> CallOutcome | None:
        """Execute the call. Return None if a rank was lost before it received the call."""
        blocking_call = begin(watcher_thread)
        if blocking_call is None:
            return None
        try:
            self._execute(blocking_call, pending_call, until=pending_call.is_over)
            blocking_call.raise_error()
            if not pending_call.observations:
                blocking_call.signals.deliver_received()
                return None
            result = blocking_call.build_result(partial(self._diagnose, watcher_thread, pending_call))
        except BaseException:
            self._restart_reason = CALL_ABORTED
            raise
        has_succeeded = pending_call.observations[0].stop_reason is StopReason.SUCCEEDED
        why = "a rank ended after it had returned" if has_succeeded else result.verdict
        self._loss_reasons |= dict.fromkeys(pending_call.ended_ranks, why)
        if not (watcher_thread.is_finished or pending_call.ended_ranks):
            # a signal may reach the ranks after the call, and end them
            self._restart_reason = CALL_ABORTED if blocking_call.signals.received else LOST_WHILE_IDLE
        elif pending_call.ended_ranks or not (pending_call.is_over() or pending_call.lost_ranks):
            self._restart_reason = f"not all of them survived the last call: {why}"
        return blocking_call, result, has_succeeded

    def _list_ended_ranks(self, call: PendingCall) -> tuple[int, ...]:
        """Return the ranks that have ended during this call. If ranks can no longer be started, return an empty tuple."""
        if self._start_refusal:
            return ()
        return call.ended_ranks if call.is_over() else tuple(worker.rank for worker in self.workers)

    def _diagnose(self, watcher_thread: WatcherThread, call: PendingCall) -> RunResult[Any]:
        (observations,) = call.observations
        result = diagnose_attempt(observations)
        if result.state is WorkerState.STOPPED and not result.reason:  # otherwise only `shut_down_at_exit` stops a call
            reason = format_loss_in_other_call(call.lost_ranks) if call.lost_ranks else format_end_of_program()
            result = replace(result, reason=reason)
        publish_outcomes(self._event_bus, observations, result)
        watcher_thread.emit_logs_and_events()
        return result

    def _begin(
        self, watcher_thread: WatcherThread, *, on_start: OnStart | None = None, has_view: bool = True
    ) -> BlockingCall | None:
        """Return the BlockingCall that waits for the ranks.

        Nothing closes `watcher_thread` until `_end` is called with this BlockingCall. Return None if `watcher_thread` was
        already closed.
        """
        with self._lock:
            if self._watcher_thread is not watcher_thread:
                return None
            # two views would draw over each other
            has_view = has_view and self._make_view is not no_view and not any(call.has_view for call in self._list_others())
            blocking_call = BlockingCall(watcher_thread, make_view=self._make_view if has_view else no_view)
            self._blocking_calls.add(blocking_call)
        try:
            if on_start is not None:
                on_start(blocking_call)
        except BaseException:
            self._end(blocking_call)
            raise
        return blocking_call

    def _list_others(self, own: BlockingCall | None = None) -> list[BlockingCall]:
        return [call for call in self._blocking_calls if call is not own and not call.is_over]

    def _execute(
        self, blocking_call: BlockingCall, command: PendingCall | Shutdown | None, *, until: Callable[[], bool]
    ) -> None:
        watcher_thread = blocking_call.watcher_thread
        try:
            output = watcher_thread.output
            if output.is_read and not self._list_others(blocking_call):  # lines of ranks of other calls may be unfinished
                output.use_current_streams()
            blocking_call.execute(command, until=until)
            if output.is_read:
                timeout = blocking_call.drain_timeout(_seconds_left(watcher_thread, command))
                watcher_thread.drain_output(timeout, with_unfinished_lines=not self._list_others(blocking_call))
            else:
                watcher_thread.emit_logs_and_events()
        finally:
            self._end(blocking_call)

    def _end(self, blocking_call: BlockingCall) -> None:
        blocking_call.is_over = True
        with self._lock:
            self._blocking_calls.discard(blocking_call)
            if blocking_call.watcher_thread.is_finished:
                self._close(blocking_call.watcher_thread)

    def _close(self, watcher_thread: WatcherThread) -> None:
        """Close a watcher thread whose ranks have ended, unless another call still uses the thread."""
        if self._watcher_thread is watcher_thread:
            self._watcher_thread = None
        if not any(call.watcher_thread is watcher_thread for call in self._blocking_calls):
            watcher_thread.close()


def _seconds_left(watcher_thread: WatcherThread, command: PendingCall | Shutdown | None) -> float:
    """Return how many seconds to wait for a slow reader of the caller's stdout and stderr.

    The result is negative if the timeout of the call has passed. `BlockingCall.drain_timeout` replaces a result below
    LAST_DRAIN_SECONDS with LAST_DRAIN_SECONDS.
    """
    if isinstance(command, Shutdown) and watcher_thread.output.is_reader_stalled:
        return 0.0
    if not isinstance(command, PendingCall) or command.timeout is None:
        return math.inf
    return command.started_at + command.timeout + command.suspended_seconds - monotonic()

"""The ranks of a WorkerGroup, which stay alive between calls. Runs in the threads of the program.

    start --> call --> call --> ... a rank is lost, or has to be stopped ... --> start ranks, then call --> ... --> close

With scope="group", the loss of a rank ends all running calls and all other ranks; the next call starts all ranks again. With
scope="worker" it ends only its own call, and the next call that needs the rank starts it again. In both cases the watcher
refuses a call whose ranks are lost, and the thread of the call starts them and posts the call once more.
"""

import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mpwatch.errors import LaunchError, make_error
from mpwatch.live_view.select import MakeView
from mpwatch.options.spec import PersistentGroupSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.clock import monotonic
from mpwatch.results.model import WorkerState
from mpwatch.results.report import STOPPED_AT_EXIT, format_ended_ranks, format_loss_in_other_call, format_signal
from mpwatch.results.run_result import RunResult
from mpwatch.results.stacks import Stacks
from mpwatch.watcher.call import Call
from mpwatch.watcher.caller import Caller, OnStart
from mpwatch.watcher.log import log_now
from mpwatch.watcher.machine.transitions import StopReason
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.output.rank_output import LAST_DRAIN_SECONDS
from mpwatch.watcher.pack_call import pack_call
from mpwatch.watcher.restarts.merge_results import merge_results_of_calls
from mpwatch.watcher.restarts.run_controller import diagnose_attempt, publish_outcomes
from mpwatch.watcher.signals import check_stop_signals
from mpwatch.watcher.watcher import Watcher
from mpwatch.wire.pickling.call_payload import FunctionCall, Payload

LOST_WHILE_IDLE = "a rank was lost while it had no call"
LOST_RANK = "it was lost while it had no call"
CLOSED = "this WorkerGroup is closed; make another one"
ENDED_AT_EXIT = "the program is ending, and has ended these ranks"


@dataclass(frozen=True)
class GroupCall:
    """A call that has not begun."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timeout: float | None
    ranks: tuple[int, ...]


class GroupRanks:
    """The ranks of one WorkerGroup. Calls that run at the same time use different ranks (rank_queue.py).

    `start` and `close` do not run beside a call.
    """

    def __init__(self, spec: PersistentGroupSpec, make_view: MakeView | None = None) -> None:
        self._spec = spec
        self._make_view = make_view
        self._event_bus = EventBus(spec, keep_events=False)
        self._watcher: Watcher | None = None  # None before the start and after the end; replaced if it has failed itself
        self._starts = 0  # how often ranks were started in this watcher
        self._restart_count = -1  # how often all ranks, or one of them, were restarted; -1: they were not started yet
        self._loss_reasons: dict[int, str] = {}  # for the log, if ranks that were lost in a call are restarted
        self._process_group_version = 0  # with a new one, a call of all ranks makes a new process group
        self._refusal = ""  # why there are no calls and no new ranks any more; empty: there may be some
        self._lock = threading.RLock()  # to start ranks. A thread also holds it while it calls the user's `env`
        self.workers: tuple[Worker, ...] = ()

    @property
    def state(self) -> WorkerState:
        """See WorkerGroup.state."""
        watcher = self._watcher
        if self._refusal:
            return WorkerState.STOPPED
        if watcher is None or watcher.is_finished:
            return WorkerState.UNHEALTHY
        state = watcher.loop.state
        return WorkerState.INIT if state is WorkerState.UNKNOWN else state

    @property
    def has_ranks(self) -> bool:
        """False if it is certain that there are none."""
        return self._watcher is not None

    def check_open(self) -> None:
        """Raise RuntimeError if `close` or `shut_down_at_exit` has begun."""
        __tracebackhide__ = True  # see mpwatch.run
        if self._refusal:
            raise RuntimeError(self._refusal)

    def start(self) -> None:
        watcher = self._get_watcher()
        self._event_bus.publish_run_started()
        caller = Caller(watcher)
        caller.execute(lambda: caller.wait(lambda: watcher.loop.state is not WorkerState.UNKNOWN))
        caller.drain_output()
        if caller.signals.received:
            self._end_ranks()
        caller.signals.deliver_received()

    def call(self, planned: GroupCall, on_start: OnStart | None = None) -> RunResult[Any]:
        """Call a function in these ranks. Raises LaunchError, or RuntimeError if the group or the program ends.

        `on_start` gets the Caller of a call in the background.
        """
        __tracebackhide__ = True  # see mpwatch.run
        self.check_open()
        if threading.current_thread() is threading.main_thread():
            check_stop_signals(self._spec)
        backend, version = self._spec.torch_backend, self._process_group_version
        are_all = len(planned.ranks) == self._spec.nprocs
        name = backend.name if are_all else None  # some ranks alone can neither make nor destroy a process group
        function = FunctionCall(planned.fn, planned.args, planned.kwargs, name, version, backend_timeout=backend.timeout)
        started_at, timeout = monotonic(), planned.timeout
        call, payload = None, pack_call(function)
        loss_reason = "it was aborted"
        try:
            watcher = self._get_watcher()
            suspended = watcher.loop.suspended_seconds
            call = Call(payload, planned.ranks, started_at=started_at, timeout=timeout, suspended_before=suspended)
            caller = Caller(watcher, call, self._make_view if on_start is None else None)
            if on_start is not None:
                on_start(caller)
            if are_all:  # unless it succeeds
                self._process_group_version = version + 1
            watcher.use_current_streams()
            caller.execute(partial(self._follow, caller, call))
            caller.drain_output(math.inf if timeout is None else started_at + timeout - suspended)
            result = caller.build_result(partial(self.diagnose, call))
            assert call.evidence is not None
            has_succeeded = call.evidence.stop_reason is StopReason.SUCCEEDED
            if are_all and has_succeeded:
                self._process_group_version = version
            loss_reason = "a rank ended after it had returned" if has_succeeded else result.verdict
        finally:
            payload.close()
            self._close_finished_watcher()
            if call is not None and not call.lost_elsewhere:
                self._loss_reasons |= dict.fromkeys(call.ended_ranks, loss_reason)
        caller.deliver_signals(result, [call.evidence])
        if result.state is not WorkerState.SUCCEEDED and call.ended_ranks and not self._refusal:
            ended = call.ended_ranks if self._spec.scope == "worker" else tuple(worker.rank for worker in self.workers)
            result = replace(result, notes=(*result.notes, format_ended_ranks(ended)))
        return result

    def close(self) -> None:
        """End the ranks, and wait for their end. Once this method has begun, no call can start ranks."""
        self._refusal = CLOSED
        self._end_ranks()

    def take_stacks(self) -> Stacks:
        watcher = self._watcher
        return Stacks() if watcher is None else watcher.take_stacks()

    # ---- several calls of one thread, for `mpwatch.map`

    def make_call(self, payload: Payload, rank: int) -> Call:
        """Make a call of an idle rank, which `follow` begins. If the rank was lost, the call is refused."""
        suspended = self._get_running_watcher().loop.suspended_seconds
        return Call(payload, [rank], started_at=monotonic(), suspended_before=suspended)

    def restart(self, rank: int, reason: str) -> None:
        self._loss_reasons[rank] = reason
        with self._lock:
            self._start_ranks(self._get_running_watcher(), [rank])

    def follow(self, calls: Collection[Call], until: Callable[[], bool], deadline: float) -> None:
        """Begin the new calls, and wait as `Caller.wait` does. After a signal, wait until all are over, and deliver it."""
        watcher = self._get_running_watcher()
        caller = Caller(watcher, ends_ranks=True)
        received = caller.signals.received
        caller.signals.close_stop_requests()

        def wait() -> None:
            for call in calls:
                if not call.is_posted and not received:
                    call.is_posted = True
                    watcher.post(watcher.loop.begin, call)
            caller.wait(lambda: until() or bool(received), deadline)
            if received:
                caller.wait(lambda: all(call.has_ended() for call in calls if call.is_posted))

        caller.execute(wait)
        self.check_open()
        if received:
            caller.drain_output()
            ended = [call for call in calls if call.evidence is not None]
            stopped = RunResult[Any](WorkerState.STOPPED, reason=format_signal(received[0]))
            result = caller.build_result(lambda: merge_results_of_calls([*map(self.diagnose, ended), stopped]))
            caller.deliver_signals(result, [])
            raise make_error(result)  # the program has handled the signal
        caller.signals.deliver_received()

    # ---- the end

    def shut_down_in_background(self) -> None:
        """End the ranks of a WorkerGroup that was not closed, but do not wait for their end."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.post(watcher.loop.shut_down)
            watcher.close_when_finished()

    def shut_down_at_exit(self) -> None:
        """End the ranks when the program ends, and wait for their end. Once this has begun, no call can start ranks."""
        self._refusal = ENDED_AT_EXIT
        watcher = self._watcher
        if watcher is not None:
            watcher.post(watcher.loop.shut_down)
            watcher.join()
            watcher.drain_output(LAST_DRAIN_SECONDS if watcher.output.is_reader_stalled else None)
            watcher.close()

    def publish_run_ended(self, reason: str = "") -> None:
        restarts = max(0, self._restart_count)
        self._event_bus.publish_run_ended(WorkerState.STOPPED, self.workers, restarts=restarts, reason=reason)

    def _end_ranks(self) -> None:
        watcher = self._watcher
        if watcher is None:
            return
        caller = Caller(watcher, ends_ranks=True)

        def shut_down() -> None:
            watcher.post(watcher.loop.shut_down)
            caller.wait(lambda: False)

        try:
            if watcher.is_running():
                watcher.use_current_streams()
                caller.execute(shut_down)
                caller.drain_output(0.0 if watcher.output.is_reader_stalled else math.inf)
        finally:
            if not watcher.is_running():
                self._watcher = None
                watcher.join()
                watcher.close()
        caller.signals.deliver_received()

    # ---- the watcher and its ranks

    def _get_watcher(self) -> Watcher:
        """Return the watcher. If there is none, or if it has failed, make one that starts all ranks."""
        with self._lock:
            self._close_finished_watcher()
            if self._watcher is None:
                self.check_open()
                watcher = Watcher(self._spec, self._event_bus, keep_ranks=True)
                try:
                    self._starts = 0
                    self._start_ranks(watcher, [])
                    watcher.output.use_current_streams()
                except BaseException:
                    watcher.close()
                    raise
                self._watcher = watcher
            return self._watcher

    def _close_finished_watcher(self) -> None:
        watcher = self._watcher
        if watcher is not None and watcher.is_finished:
            with self._lock:
                if self._watcher is watcher:
                    self._watcher = None
                    watcher.close()

    def _get_running_watcher(self) -> Watcher:
        """Return the watcher that has started the ranks. Raises what has ended it."""
        watcher = self._watcher
        self.check_open()
        if watcher is None or watcher.is_finished:
            raise (watcher and watcher.error) or LaunchError("the ranks have ended, and cannot be called any more")
        return watcher

    def _start_ranks(self, watcher: Watcher, lost_ranks: Sequence[int]) -> None:
        """Make the watcher start these ranks, or all ranks with scope="group" and at first."""
        self.check_open()
        is_first = self._restart_count < 0
        counts = {worker.rank: worker.restart_count for worker in self.workers}
        setups = []
        if self._spec.scope == "worker" and lost_ranks:
            for rank in lost_ranks:
                reason = self._loss_reasons.pop(rank, LOST_RANK)
                log_now(logging.WARNING, "rank %d is restarted: %s", rank, reason)
                setups += watcher.prepare([rank], counts[rank] + 1)
            self._restart_count += len(lost_ranks)
        else:
            if not is_first:
                reasons = [f"not all of them survived the last call: {reason}" for reason in self._loss_reasons.values()]
                log_now(logging.WARNING, "all ranks are restarted: %s", reasons[0] if reasons else LOST_WHILE_IDLE)
            setups = watcher.prepare(range(int(self._spec.nprocs)), max(counts.values(), default=-1) + 1)
            self._restart_count += 1
            self._loss_reasons.clear()
        self.check_open()  # again: `prepare` calls functions of the user, such as `env`
        self.workers = watcher.workers
        self._starts += 1
        watcher.post(watcher.loop.start_ranks, setups)

    def _follow(self, caller: Caller, call: Call) -> None:
        """Post the call, and wait until it is over. If ranks are lost, start them first."""
        watcher = caller.watcher
        while True:
            call.is_posted, call.is_refused = True, False
            watcher.post(watcher.loop.begin, call)
            caller.wait(call.has_ended)
            if call.is_over:
                return
            if watcher.is_finished and not self._refusal:
                raise LaunchError("the ranks cannot be called: an exception in another thread has interrupted their start")
            with self._lock:
                self.check_open()
                if self._starts == call.refused_at_start:  # otherwise another call has started them meanwhile
                    self._start_ranks(watcher, call.lost_ranks)

    def diagnose(self, call: Call) -> RunResult[Any]:
        assert call.evidence is not None
        result = diagnose_attempt(call.evidence)
        if result.state is WorkerState.STOPPED and not result.reason:  # otherwise only `shut_down_at_exit` stops a call
            reason = format_loss_in_other_call(call.lost_elsewhere) if call.lost_elsewhere else STOPPED_AT_EXIT
            result = replace(result, reason=reason)
        publish_outcomes(self._event_bus, call.evidence, result)
        self._event_bus.outbox.run_all()
        return result

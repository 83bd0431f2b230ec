"""A thread of the program waits for its ranks, and meanwhile runs what must not run in the watcher thread.

    Caller.execute:  install signal handlers --> start the watcher thread --> body: post, wait --> restore the handlers

`wait` runs the functions of the Outbox (observers, log records), decisions about restarts (`serve`), the live view and the
prompts of the debugger. After the first exception there, of whatever code and also of a signal handler of the program, the
ranks of the call are stopped as after SIGTERM, and the exception goes on when they have ended. If a second exception comes
meanwhile, the watcher thread still ends the ranks, but nobody waits for it. Idle ranks of a WorkerGroup stay.
"""

import logging
import math
import signal
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mpwatch.errors import make_error
from mpwatch.live_view.select import MakeView
from mpwatch.os_support.clock import monotonic
from mpwatch.results.model import WorkerState
from mpwatch.results.run_result import RunResult, format_report
from mpwatch.watcher.call import Call
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.inbox import WakeupPipe
from mpwatch.watcher.log import log_now
from mpwatch.watcher.machine.transitions import InterruptCause
from mpwatch.watcher.observers.status_snapshot import final_statuses
from mpwatch.watcher.output.rank_output import LAST_DRAIN_SECONDS
from mpwatch.watcher.signals import Signals
from mpwatch.watcher.watcher import Watcher
from mpwatch.wire.exceptions.decoder import add_note

if TYPE_CHECKING:
    from mpwatch.live_view.live import LiveView
    from mpwatch.watcher.debugger.console import DebuggerConsole

T = TypeVar("T")
OnStart = Callable[["Caller"], object]  # gets each new Caller of a run or call in the background


class Caller:
    """One wait of one thread, for the ranks of `call`, or for all ranks if it is None. `execute` is called once.

    `serve` is called at each wake-up, until an exception comes. With `ends_ranks`, no rank is left afterwards.
    """

    wakeup: WakeupPipe

    def __init__(
        self, watcher: Watcher, call: Call | None = None, make_view: MakeView | None = None, *, ends_ranks: bool = False
    ) -> None:
        self.watcher, self._call, self._ends_ranks = watcher, call, ends_ranks
        self._make_view, self.has_view = make_view, make_view is not None
        self.serve: Callable[[], object] = lambda: None
        self.list_attempts: Callable[[], Iterable[AttemptObservations]] = lambda: (
            [] if call is None or call.evidence is None else [call.evidence]
        )
        self.is_waiting = False
        self._has_begun = self._is_stopping = False
        self._view: LiveView | None = None
        self.signals = Signals(watcher, call)
        self.is_in_main_thread = self.signals.is_in_main_thread

    def execute(self, body: Callable[[], T]) -> T:
        """Call `body`, which posts to the watcher and waits, and return its value."""
        with closing(WakeupPipe()) as self.wakeup:
            return self._execute(body)

    def _execute(self, body: Callable[[], T]) -> T:
        try:
            self.is_waiting = True
            others = self.watcher.outbox.add(self)
            self.signals.take_over(self.wakeup)
            self._has_begun = True
            if any(other.has_view for other in others):  # two views would draw over each other
                self._make_view, self.has_view = None, False
            self.watcher.start()
            if self._call is not None or not self.watcher.keeps_ranks:
                self._open_view()
            self.signals.is_in_user_code = True
            try:
                value = body()
            finally:
                self.signals.is_in_user_code = False
            self._restore()
        except BaseException:
            self._is_stopping = True
            try:
                self._stop_ranks()
            finally:
                self._restore()
                self.signals.deliver_received()
            raise
        finally:
            self.is_waiting = False
            self.signals.close_stop_requests()
            self.watcher.outbox.remove(self)
        return value

    def _open_view(self) -> None:
        if self._make_view is not None:
            ranks = None if self._call is None else self._call.ranks
            ask = partial(self.watcher.post, self.watcher.loop.send_statuses, numbers=ranks)
            self._view = self.signals.suspension.view = self._make_view(ask)

    def wait(self, until: Callable[[], bool], deadline: float = math.inf) -> None:
        """Wait until `until()` is true, at most to a time of CLOCK_MONOTONIC. Raise what has ended the watcher thread."""
        self._wait(until, deadline)
        if self.watcher.error is not None and not until():
            raise self.watcher.error

    def _wait(self, until: Callable[[], bool], deadline: float = math.inf) -> None:
        """Do not use `Thread.join` here: not every signal wakes up a thread that waits for a lock."""
        self._run_callbacks()
        while not (until() or self.watcher.is_finished) and (now := monotonic()) < deadline:
            next_update_at = math.inf if self._view is None else self._view.next_update_at
            seconds = max(0.0, min(deadline, next_update_at) - now)
            debugger = self._get_debugger()
            self.signals.wait_for_wakeup(
                seconds if seconds < math.inf else None, () if debugger is None else debugger.connections
            )
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        was_in_user_code, self.signals.is_in_user_code = self.signals.is_in_user_code, True
        try:
            self.signals.suspension.suspend()
            self.watcher.outbox.run_all()
            if not self._is_stopping:
                self.serve()
            self._update_view()
            if (debugger := self._get_debugger()) is not None:
                is_in_charge = lambda: self._get_debugger() is not None  # noqa: E731
                debugger.serve(self.signals, self.signals.suspension.view, is_in_charge)
        finally:
            self.signals.is_in_user_code = was_in_user_code

    def _get_debugger(self) -> "DebuggerConsole | None":
        return None if self._is_stopping else self.watcher.get_debugger(self)

    def _update_view(self) -> None:
        """If SIGTSTP comes during an update, the program is suspended after it."""
        self.signals.is_drawing = True
        try:
            if self._view is not None:
                self._view.update()
        finally:
            self.signals.is_drawing = False
        self.signals.suspension.suspend()

    def _stop_ranks(self) -> None:
        """After an exception: stop the ranks that were to work for this thread, and wait until they have ended."""
        watcher, call = self.watcher, self._call
        watcher.cancel_start()
        if not self._has_begun or not watcher.is_running():
            return
        if self._ends_ranks:
            self.signals.post_interrupt(signal.SIGTERM)
            watcher.post(watcher.loop.shut_down if watcher.keeps_ranks else watcher.loop.end)
            self._wait(lambda: False)
        elif call is not None and call.is_posted:
            self.signals.post_interrupt(signal.SIGTERM)
            watcher.post(watcher.loop.withdraw, call)
            self._wait(call.has_ended)

    def _restore(self) -> None:
        try:
            if self.watcher.is_finished:
                self.watcher.join()
            if self._view is not None:
                self._view.close(final_statuses(self.list_attempts()))
        finally:
            self.signals.restore()
        self.watcher.outbox.run_all()

    # ---- afterwards

    def drain_output(self, deadline: float = math.inf) -> None:
        """Wait until everything that the ranks have printed was written, but not long after `deadline` or a signal."""
        seconds = 0.0 if self.signals.received else deadline + self.watcher.loop.suspended_seconds - monotonic()
        self.watcher.drain_output(None if seconds == math.inf else max(LAST_DRAIN_SECONDS, seconds))

    def build_result(self, make: Callable[[], RunResult[T]]) -> RunResult[T]:
        """Return what `make` builds, which runs user code."""
        try:
            result = make()
        except BaseException:
            self.signals.deliver_received()
            raise
        # a stop request may have come when the ranks were about to end
        return result if result.stop_cause else replace(result, stop_cause=self.signals.close_stop_requests())

    def deliver_signals(self, result: RunResult[Any], attempts: Iterable[AttemptObservations]) -> None:
        """Call this last, and outside of an `except` block: the handler of SIGINT can raise KeyboardInterrupt."""
        __tracebackhide__ = True  # see mpwatch.run
        for evidence in attempts:
            if evidence.interrupt_cause is InterruptCause.STOP_TIMEOUT:
                self.signals.defer_stop_signal(evidence.signum)
        if result.state is not WorkerState.SUCCEEDED and self.signals.will_end_program():
            log_now(logging.WARNING, "%s", format_report(result))
        try:
            self.signals.deliver_received()
        except BaseException as error:
            if result.state is WorkerState.FAILED:
                raise error from make_error(result)
            if result.state is WorkerState.STOPPED and isinstance(error, KeyboardInterrupt):
                add_note(error, format_report(result))
            raise

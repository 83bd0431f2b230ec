"""Runs a function on the ranks of one node. A caller's thread uses a BlockingCall to wait for the watcher thread.

This module runs in the caller's thread. From `mpwatch.run()` to the process of a rank:

    api.run -> run_single_node -> BlockingCall.execute -> WatcherThread -> EventLoop.run -> ProcessPool.start -> process

A BlockingCall posts a command and waits until it is done:

    start of the ranks:   install signal handlers -> post -> start the thread -> wait -> restore the program's handlers
    call of idle ranks:   install signal handlers -> post -> wait -> restore the program's handlers

While the caller's thread waits, it runs the code that must not run in the watcher thread: observers, logging handlers,
decisions about restarts, and the live view.

mpwatch's signal handlers raise no exception while the caller's thread waits (host_signals.py).

If Ctrl-C raises KeyboardInterrupt in the caller's thread while ranks work, these ranks are interrupted. After any exception
except KeyboardInterrupt in the caller's thread, mpwatch stops the working ranks as if the calling program had received
SIGTERM. If a second exception comes while mpwatch stops the ranks, mpwatch kills the ranks. At the end,
`BlockingCall.execute` re-raises the first exception. An exception in the caller's thread does not stop the idle ranks of a
WorkerGroup.

Other code can use `PyThreadState_SetAsyncExc` to raise an exception in the caller's thread. If the caller's thread is
waiting, Python raises this exception only at the end of the wait.
"""

import logging
import math
import signal
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import ref

from mpwatch.errors import make_error
from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.descriptors import open_standard_descriptors
from mpwatch.results.model import WorkerState
from mpwatch.results.run_result import RunResult, format_report
from mpwatch.watcher.commands import Command
from mpwatch.watcher.handler_errors import run_until_handler_raises
from mpwatch.watcher.host_signals import HostSignals
from mpwatch.watcher.machine.transitions import InterruptCause
from mpwatch.watcher.observers.deferred_log import log_now
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.observers.user_errors import ignore_user_errors
from mpwatch.watcher.observers.view_driver import MakeView, ViewDriver, no_view
from mpwatch.watcher.output.output_thread import LAST_DRAIN_SECONDS
from mpwatch.watcher.pack_call import pack_call
from mpwatch.watcher.pending_call import PendingCall
from mpwatch.watcher.restarts.run_controller import RunController
from mpwatch.watcher.running_calls import add_call
from mpwatch.watcher.signal_options import check_stop_signals
from mpwatch.watcher.suspension import ProgramSuspension
from mpwatch.watcher.watcher_thread import WatcherThread
from mpwatch.wire.exceptions.decoder import add_note
from mpwatch.wire.pickling.call_payload import Call, Payload

T = TypeVar("T")
MAX_INTERRUPTIONS = 1000  # of one abort; more exceptions than that are a bug in mpwatch


def run_single_node(
    spec: WorkerSpec[T],
    make_view: MakeView = no_view,
    *,
    payload: Payload | None = None,
    on_start: "Callable[[BlockingCall], object] | None" = None,
) -> RunResult[T]:
    """Run a function on all ranks and show their progress. Wait until the processes of all ranks have ended.

    Args:
        spec: the options of the run.
        make_view: makes the live view.
        payload: the packed call, which this function closes. If `payload` is None, this function packs the call.
        on_start: is called with the BlockingCall before the ranks are started.

    Raises LaunchError. If a signal such as SIGINT comes during the run, the calling program's handler for this signal runs
    at the end of the run. The calling program's handler can raise an exception such as KeyboardInterrupt.
    """
    __tracebackhide__ = True  # see mpwatch.run
    check_stop_signals(spec)
    controller = RunController(spec, EventBus(uuid.uuid4().hex, spec, keep_events=True))
    try:
        with ExitStack() as resources:
            watcher_thread, pending_call = run_until_handler_raises(partial(_prepare, spec, controller, payload, resources))
            blocking_call = BlockingCall(
                watcher_thread, partial(controller.handle_ended_attempts, watcher_thread), make_view
            )
            if on_start is not None:
                on_start(blocking_call)
            blocking_call.execute(pending_call, until=lambda: False)
            watcher_thread.drain_output(blocking_call.drain_timeout(controller.seconds_left()))
        blocking_call.raise_error()
        result = blocking_call.build_result(controller.build_result)
    except BaseException as error:
        controller.end_with_error(error)
        raise
    blocking_call.deliver_signals(result)
    return result


def pack_spec(spec: WorkerSpec[Any]) -> Payload:
    """Pickle the function and the arguments of a run. Raises LaunchError."""
    call = Call(
        spec.fn, tuple(spec.args), spec.kwargs or {}, spec.torch_backend.name, backend_timeout=spec.torch_backend.timeout
    )
    return pack_call(call)


def _prepare(
    spec: WorkerSpec[Any], controller: RunController[Any], payload: Payload | None, resources: ExitStack
) -> tuple[WatcherThread, PendingCall]:
    """Do everything that must be done before the watcher thread starts.

    The ExitStack `resources` closes the objects that this function creates.
    """
    resources.enter_context(open_standard_descriptors())
    payload = resources.enter_context(closing(payload or pack_spec(spec)))
    watcher_thread = resources.enter_context(closing(WatcherThread(spec, controller.event_bus, keep_ranks=False)))
    watcher_thread.prepare()
    watcher_thread.output.use_current_streams()
    pending_call = PendingCall(payload, controller.started_at, spec.timeout, spec.stop_policy.after)
    controller.begin(pending_call)
    return watcher_thread, pending_call


def log_last_report(result: RunResult[Any]) -> None:
    """Log the report of the run, because a signal is about to end the program."""
    log_now(logging.WARNING, "%s", format_report(result))


class BlockingCall:
    """Makes a caller's thread wait for the watcher thread. A BlockingCall is used only once.

    Args:
        watcher_thread: the thread that the command is for.
        handle_ended_attempts: decides about restarts.
        make_view: makes the live view of a call.
    """

    def __init__(
        self,
        watcher_thread: WatcherThread,
        handle_ended_attempts: Callable[[], None] | None = None,
        make_view: MakeView = no_view,
    ) -> None:
        self.watcher_thread = watcher_thread
        self._handle_ended_attempts = handle_ended_attempts
        self._make_view = make_view
        self.has_view = make_view is not no_view
        self._view_driver: ViewDriver | None = None
        self._progress_driver: ViewDriver | None = None
        self.signals = HostSignals(
            watcher_thread.commands,
            is_run=not watcher_thread.keeps_ranks,
            suspension=ProgramSuspension(watcher_thread.commands, watcher_thread.is_running),
            stop_signals=watcher_thread.stop_signals,
        )
        self._pending_call: PendingCall | None = None
        self._is_posted = False
        self.is_over = False
        add_call(self, BlockingCall.ask_to_stop)
        if threading.current_thread() is threading.main_thread():
            watcher_thread.get_main_call = ref(self)

    def execute(self, command: Command | None, *, until: Callable[[], bool]) -> None:
        """Post a command to the watcher thread, start the watcher thread if it does not run yet, and wait.

        Return when `until` returns True, or when all ranks are dead.
        """
        if isinstance(command, PendingCall):
            self._pending_call = command
            if self.watcher_thread.keeps_ranks:
                self.signals.call = command
        try:
            self.signals.take_over()
            self._is_posted = True
            if command is not None:
                self.watcher_thread.commands.post(command)
            self.signals.start_posting()
            self.watcher_thread.start()
            if isinstance(command, PendingCall):
                commands = self.watcher_thread.commands
                self._view_driver = self.signals.suspension.view = ViewDriver(self._make_view, commands, command)
                self._progress_driver = ViewDriver(self.watcher_thread.make_progress_events, commands, command)
            self._wait(until)
            self._restore_host()
        except BaseException:
            self._abort(until)
            self.signals.deliver_received()
            raise
        finally:
            self.is_over = True
            self.signals.close_stop_requests()
            self.signals.release_wakeup()

    def ask_to_stop(self, cause: str) -> bool:
        """Ask the ranks to save their state and return. Return False if the call is over.

        Any thread may call this method.
        """
        return self.signals.request_stop(cause)

    def drain_timeout(self, seconds_left: float) -> float | None:
        """Return the longest time in seconds to wait for the ranks' output, or None if there is no limit.

        `seconds_left` is the time until the timeout of the run, or infinity if the run has no timeout.
        """
        if self.signals.received or self.signals.handler_error is not None:
            return LAST_DRAIN_SECONDS
        return None if seconds_left == math.inf else max(LAST_DRAIN_SECONDS, seconds_left)

    def raise_error(self) -> None:
        """Re-raise the exception of a signal handler or of the watcher thread. Do nothing if there is no such exception.

        Deliver the deferred signals before the exception leaves this method.
        """
        handler_error, self.signals.handler_error = self.signals.handler_error, None
        watcher_error, self.watcher_thread.error = self.watcher_thread.error, None
        try:
            if error := handler_error or watcher_error:
                raise error
        except BaseException:
            self.signals.deliver_received()
            raise

    def build_result(self, make: Callable[[], RunResult[T]]) -> RunResult[T]:
        """Return the result that the function `make` builds.

        The function `make` rebuilds return values and exceptions, and calls observers. If a signal handler of the calling
        program raises an exception meanwhile, the function `make` ends at once, and `build_result` raises this exception.
        """
        try:
            result = run_until_handler_raises(make)
        except BaseException:
            self.signals.deliver_received()
            raise
        # it may have come when the ranks were about to end
        return result if result.stop_cause else replace(result, stop_cause=self.signals.close_stop_requests())

    def deliver_signals(self, result: RunResult[Any]) -> None:
        """Deliver the deferred signals to the calling program's handlers. The handler of SIGINT can raise KeyboardInterrupt.

        Call this method last, after all cleanup, and outside an `except` block. If an `except` block calls this method, the
        traceback of a KeyboardInterrupt also shows the exception that the block handles.
        """
        __tracebackhide__ = True  # see mpwatch.run
        for observations in [] if self._pending_call is None else self._pending_call.observations:
            if observations.interrupt_cause is InterruptCause.STOP_TIMEOUT:
                self.signals.defer_stop_signal(observations.signum)
        if result.state is not WorkerState.SUCCEEDED and self.signals.will_end_program():
            log_last_report(result)
        try:
            self.signals.deliver_received()
        except BaseException as error:
            if result.state is WorkerState.FAILED:
                raise error from make_error(result)
            if result.state is WorkerState.STOPPED and isinstance(error, KeyboardInterrupt):
                add_note(error, format_report(result))
            raise

    def _wait(self, until: Callable[[], bool]) -> None:
        """Call `_run_callbacks` at each wakeup. Return as soon as `until()` is true or all ranks have ended.

        Do not use `Thread.join` here: not every signal wakes up a thread that waits for a lock (see host_signals.py).
        """
        self._run_callbacks()  # for what has come before the signal handlers were installed
        while not (until() or self.watcher_thread.is_finished):
            seconds = min((s for d in self._drivers if (s := d.seconds_to_next_update()) is not None), default=None)
            debugger = self.watcher_thread.get_debugger(self)
            self.signals.wait_for_wakeup(seconds, () if debugger is None else debugger.connections)
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        """Do the work of the caller's thread: suspensions, logging, observers, decisions, and the live view."""
        self.signals.is_in_user_code = True
        try:
            self.signals.suspension.suspend()
            self.watcher_thread.emit_logs_and_events()
            if self._handle_ended_attempts is not None:
                self._handle_ended_attempts()
            self._update_views()
            self._print_stacks()
            if (debugger := self.watcher_thread.get_debugger(self)) is not None:
                debugger.serve(self.signals, self._view_driver)
        finally:
            self.signals.is_in_user_code = False

    def _update_views(self) -> None:
        """Update the live view.

        If SIGTSTP comes during the update of the live view, mpwatch suspends the program after the update.
        """
        self.signals.is_drawing = True
        try:
            for driver in self._drivers:
                driver.update()
        finally:
            self.signals.is_drawing = False
        self.signals.suspension.suspend()

    @property
    def _drivers(self) -> list[ViewDriver]:
        return [driver for driver in (self._view_driver, self._progress_driver) if driver is not None]

    def _print_stacks(self) -> None:
        """If SIGQUIT has come, write the stacks of the ranks to stderr. Do nothing before the stacks have arrived."""
        request = self.signals.stacks_request
        if request is not None and request.stacks is not None:
            self.signals.stacks_request = None
            with ignore_user_errors():  # stderr may be closed, or an object that raises anything
                sys.stderr.write(f"mpwatch: where the ranks are now (they go on)\n{request.stacks}\n")
                sys.stderr.flush()

    def _restore_host(self) -> None:
        for driver in self._drivers:
            driver.close()
        if self.watcher_thread.is_finished:
            self.watcher_thread.join()
        self.signals.restore()
        self.signals.suspension.suspend_after_call()
        run_until_handler_raises(self.watcher_thread.emit_logs_and_events)

    def _abort(self, until: Callable[[], bool]) -> None:
        """Stop the ranks in the same way as after SIGTERM. Then restore the program's signal handlers.

        If another exception interrupts this method, the method ignores the exception and starts again from the beginning.
        """
        must_stop, self._handle_ended_attempts = False, None
        for _ in range(MAX_INTERRUPTIONS):
            try:
                must_stop = must_stop or self._must_stop_ranks(until)
                if must_stop:
                    self._stop_ranks(until)
                self._restore_host()
                if must_stop and not self.watcher_thread.is_alive() and not self.watcher_thread.keeps_ranks:
                    self.watcher_thread.close()
            except BaseException:  # noqa: BLE001, S112  the first one is re-raised; this one has made the ranks stop sooner
                continue
            return

    def _must_stop_ranks(self, until: Callable[[], bool]) -> bool:
        """Return False if the ranks are idle: their call has not begun yet, or is already over."""
        return not self.watcher_thread.is_alive() or (self._is_posted and not until())

    def _stop_ranks(self, until: Callable[[], bool]) -> None:
        self.watcher_thread.cancel_start()
        self.signals.take_over()
        self.signals.post_interrupt(signal.SIGTERM)
        self.signals.start_posting()
        if self.watcher_thread.is_alive():
            # a call of a WorkerGroup may be answered before this signal comes: then its ranks stay
            self._wait(until if self.signals.call is not None else lambda: False)

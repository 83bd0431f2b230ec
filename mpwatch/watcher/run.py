"""The caller's side of a run: it posts what it wants to the thread that watches the ranks (life.py), and waits for it.

    take the signals over --> post --> wait --> give the signals back --> rebuild what came --> return
    post --> wait for a moment --> return, or take the signals over, and so on         (ranks that are there)

While it waits it tells the observers (journal.py), and serves the live view, if there is one (viewing.py).

Handlers do not raise while the caller waits (signals.py), but in that moment: a Ctrl-C is passed on to the ranks then, too.
If something else is thrown into the caller's thread, the ranks are stopped as by SIGTERM (at once, if it happens again), and
it leaves `pay` when nothing of them is left; but if they have yet to be asked, or have answered, they stay as they are. Off
the main thread Python notices it when the wait is over.
"""

import math
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

from mpwatch.errors import make_error
from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.descriptors import standard_descriptors
from mpwatch.results.model import WorkerState
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.commands import PendingCall
from mpwatch.watcher.host_signals import HostSignals
from mpwatch.watcher.machine.transitions import Event
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.observers.view_driver import MakeView, ViewDriver, no_view
from mpwatch.watcher.output.output_thread import LAST_SECONDS
from mpwatch.watcher.pack_call import pack_call
from mpwatch.watcher.restarts.run_controller import RunController
from mpwatch.watcher.watcher_thread import WatcherThread
from mpwatch.wire.pickling.call_payload import Call

T = TypeVar("T")
MOMENT_SECONDS = 0.002  # in which most calls of idle ranks are over, if they do next to nothing
MANY = 1000  # things are not thrown at one wait; if they were, an error of ours would be among them


def watch(spec: WorkerSpec[T], make_view: MakeView = no_view) -> RunResult[T]:
    """Run a function on all ranks, and show the progress. Return when every rank is dead.

    Raises LaunchError, or what the host's handler raises for a signal that came during the run: KeyboardInterrupt, say.
    """
    __tracebackhide__ = True  # see mpwatch.run
    controller = RunController(spec, EventBus(uuid.uuid4().hex, spec.observers, keep=True))
    call = Call(spec.fn, tuple(spec.args), spec.kwargs or {}, spec.backend)
    try:
        with (
            standard_descriptors(),
            closing(pack_call(call)) as payload,
            closing(WatcherThread(spec, controller.event_bus, keep=False)) as watcher_thread,
        ):
            watcher_thread.prepare()
            watcher_thread.output.attach()
            pending_call = PendingCall(payload, controller.started_at, spec.timeout)
            controller.begin(pending_call)
            blocking_call = BlockingCall(watcher_thread, partial(controller.judge, watcher_thread), make_view)
            blocking_call.execute(pending_call, until=lambda: False)
            watcher_thread.settle(blocking_call.patience(controller.seconds_left()))
        blocking_call.raise_error()
        result = blocking_call.build_result(controller.result)
    except BaseException as error:
        controller.fail(error)
        raise
    blocking_call.deliver_signals(result)
    return result


class BlockingCall:
    """What one thread of the caller's does about ranks, once."""

    def __init__(
        self, watcher_thread: WatcherThread, judge: Callable[[], float | None] | None = None, make_view: MakeView = no_view
    ) -> None:
        self._watcher_thread = watcher_thread
        self._judge = judge  # decides about restarts, and returns in how many seconds it must be called again
        self._make_view = make_view
        self._viewing: ViewDriver | None = None  # of a call that takes longer than a moment
        self.signals = HostSignals(watcher_thread.commands)
        self._has_asked = False

    def execute(self, thing: Event | PendingCall | None, *, until: Callable[[], bool]) -> None:
        """Post this, and wait until that holds, or all ranks have ended."""
        try:
            if isinstance(thing, PendingCall) and self._watcher_thread.is_watched():
                self._ask(thing)
                if self._is_done_soon(until):
                    return
            self.signals.take_over()
            self._ask(thing)
            self._watcher_thread.begin()
            if isinstance(thing, PendingCall):
                self._viewing = ViewDriver(self._make_view, self._watcher_thread.commands, thing)
            self._sleep(until)
            self._leave()
        except BaseException as error:
            # Ctrl-C in the first moment: the host's handler has raised it
            is_interrupt = isinstance(error, KeyboardInterrupt) and not self.signals.are_taken_over
            self._abort(signal.SIGINT if is_interrupt else signal.SIGTERM, until)
            self.signals.deliver()
            raise

    def raise_error(self) -> None:
        """What went wrong, other than in a rank. Signals do then what they would have done."""
        raised, self.signals.raised = self.signals.raised, None
        failed, self._watcher_thread.error = self._watcher_thread.error, None
        try:
            if error := raised or failed:
                raise error
        except BaseException:
            self.signals.deliver()
            raise

    def build_result(self, make: Callable[[], RunResult[T]]) -> RunResult[T]:
        """What came of it."""
        try:
            return make()
        except BaseException:
            self.signals.deliver()
            raise

    def patience(self, seconds_left: float) -> float | None:
        """How long who reads what the ranks have printed is waited for: for ever, unless somebody wants an end."""
        if self.signals.received or self.signals.raised is not None:
            return LAST_SECONDS
        return None if seconds_left == math.inf else max(LAST_SECONDS, seconds_left)

    def deliver_signals(self, result: RunResult[Any]) -> None:
        """Deliver the signals that came during the call to the host's handlers. SIGINT usually raises KeyboardInterrupt.

        Call this last, when everything is cleaned up, and outside an `except` block: the only history of a KeyboardInterrupt
        is the failure of the run.
        """
        __tracebackhide__ = True  # see mpwatch.run
        try:
            self.signals.deliver()
        except BaseException as error:
            if result.state is WorkerState.FAILED:
                raise error from make_error(result)
            raise

    def _ask(self, thing: Event | PendingCall | None) -> None:
        """Once."""
        if not self._has_asked:
            self._has_asked = True
            if thing is not None:
                self._watcher_thread.commands.post(thing)
            self.signals.speak_up()

    def _is_done_soon(self, until: Callable[[], bool]) -> bool:
        """Within a moment, for which the signals are left as they are: to take them over and to give them back is a quarter
        of what a short call costs. One that comes is felt at once, or when the moment is over.
        """
        deadline = time.monotonic() + MOMENT_SECONDS
        while not until():
            if not self.signals.doze(deadline):
                return False
        self._watcher_thread.attend()
        return True

    def _sleep(self, until: Callable[[], bool]) -> None:
        """Not by joining the thread: that has the fault that signals.py tells of."""
        seconds = self._attend()  # to what was heard in the first moment
        while not (until() or self._watcher_thread.is_over):
            self.signals.sleep(seconds)
            seconds = self._attend()

    def _attend(self) -> float | None:
        """Run what belongs to the caller's thread. Returns the seconds until the next call; None: at the next wake-up."""
        self.signals.is_in_users_code = True
        try:
            self._watcher_thread.attend()
            waits = [None if self._judge is None else self._judge()]
            if self._viewing is not None:
                self._viewing.attend()
                waits.append(self._viewing.patience())
            return min((seconds for seconds in waits if seconds is not None), default=None)
        finally:
            self.signals.is_in_users_code = False

    def _leave(self) -> None:
        """The host is as it was."""
        if self._viewing is not None:
            self._viewing.close()
        if self._watcher_thread.is_over:
            self._watcher_thread.join()
        self.signals.give_back()
        self._watcher_thread.attend()

    def _abort(self, number: int, until: Callable[[], bool]) -> None:
        """Something has been thrown at us. Stop the ranks as by that signal and leave, and let nothing that is thrown
        meanwhile prevent it.
        """
        must_stop, self._judge = False, None
        for _ in range(MANY):
            try:
                must_stop = must_stop or self._is_waited_for(until)
                if must_stop:
                    self._stop(number, until)
                self._leave()
                if must_stop and not self._watcher_thread.has_begun():  # or not any more; else they have answered, and stay
                    self._watcher_thread.close()
            except BaseException:  # noqa: BLE001, S112  the first one is raised; this one has hurried the ranks
                continue
            return

    def _is_waited_for(self, until: Callable[[], bool]) -> bool:
        """False for ranks that are idle: a call was about to be posted, or has been answered."""
        return not self._watcher_thread.has_begun() or (self._has_asked and not until())

    def _stop(self, number: int, until: Callable[[], bool]) -> None:
        self._watcher_thread.cancel()
        self.signals.take_over()
        self.signals.tell(number)
        self.signals.speak_up()
        if self._watcher_thread.has_begun():
            self._sleep(until if number == signal.SIGINT else lambda: False)

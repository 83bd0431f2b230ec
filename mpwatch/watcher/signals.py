"""The signals of the program while one of its threads waits for ranks. Its own handlers are back afterwards.

- SIGINT, SIGTERM and SIGHUP are deferred: the watcher thread stops the ranks at once, and the program's handler gets the
  signal when they have ended. At the prompt of a debugger each of them raises KeyboardInterrupt at once, to end `input`. So
  does a second SIGINT while user code (an observer, `retry_if`, `env`) runs in this thread.
- A signal of the option `stop` asks the ranks to save and return, and does not reach the program. If it comes twice, or if
  the ranks do not return in time, the run is stopped and the signal is deferred.
- SIGQUIT (Ctrl-Backslash) prints the stacks of all ranks, unless the program handles it. A shell without job control starts
  background programs (`&`) with SIGQUIT ignored, so it does so then, too.
- SIGTSTP (Ctrl-Z) suspends the ranks together with the program, unless the program handles or ignores it. See suspension.py.
- All other signals go to the program's own handlers. If one raises, the ranks are stopped, as after any other exception in
  this thread.

A handler that C code has installed is never replaced, and an ignored signal stays ignored, except SIGQUIT and the signals of
`stop`. Outside the main thread nothing is changed, since Python runs signal handlers in the main thread only; registry.py
interrupts such a call when Ctrl-C ends the script.
"""

import os
import signal
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from mpwatch.options.spec import GroupSpec
from mpwatch.os_support.processes import read_process_state
from mpwatch.os_support.signals import get_handler, name_signal, set_handler
from mpwatch.results.stacks import Stacks
from mpwatch.watcher.call import Call
from mpwatch.watcher.inbox import WakeupPipe
from mpwatch.watcher.machine.transitions import InterruptCause, Interrupted, StopRequested
from mpwatch.watcher.registry import CallOfThread, add_call
from mpwatch.watcher.suspension import ProgramSuspension
from mpwatch.watcher.watcher import Watcher
from mpwatch.wire.exceptions.decoder import USER_ERRORS

DEFERRED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IN_MAIN_THREAD_ONLY = (
    "the signals of stop= need a run in the main thread, because Python runs signal handlers in the main thread only; call "
    "mpwatch.run there, or leave the signals out and call request_stop() of the handle in a handler of your own"
)


class Signals(CallOfThread):
    def __init__(self, watcher: Watcher, call: Call | None) -> None:
        super().__init__(is_run=not watcher.keeps_ranks)
        self._watcher, self._call = watcher, call
        self._wakeup: WakeupPipe
        self._stop_signals: Collection[int] = watcher.stop_signals if self.is_run or call is not None else ()
        self._received_stop_signals: set[int] = set()
        # The cause of the first request to stop, or "" if the call has ended before that. `setdefault` is one operation, so
        # a request and the end of the call agree on which of them was first.
        self._stop_cause: dict[None, str] = {}
        self.received: list[int] = []  # deferred signals that must still be delivered to the program's own handlers
        self.is_in_user_code = False  # which may take any time
        self.is_drawing = False  # the live view, which takes a short time, and must not be left incomplete
        self.is_at_prompt = False  # of a debugger
        self._host_handlers: dict[int, Any] = {}  # of the signals that `_receive` handles
        self._host_wakeup_fd = -1  # the program's own wake-up descriptor
        self._has_wakeup_fd = False
        self._pid = os.getpid()
        self.suspension = ProgramSuspension(partial(watcher.post, watcher.loop.suspend), watcher.is_running)
        self._is_ended_by_program = False

    def take_over(self, wakeup: WakeupPipe) -> None:
        self._wakeup = wakeup
        add_call(self)
        if not self.is_in_main_thread:
            return
        self._has_wakeup_fd = True
        self._host_wakeup_fd = signal.set_wakeup_fd(self._wakeup.write_fd, warn_on_full_buffer=False)
        handlers = find_handlers({*DEFERRED_SIGNALS, signal.SIGQUIT, signal.SIGTSTP, *self._stop_signals})
        self._host_handlers = {signum: handler for signum, handler in handlers.items() if self._uses(signum, handler)}
        for signum in self._host_handlers:
            set_handler(signum, self._receive)

    def _uses(self, signum: int, host_handler: Any) -> bool:
        if signum in self._stop_signals:
            return True
        if signum == signal.SIGQUIT:
            return not callable(host_handler)
        return host_handler == signal.SIG_DFL or (signum in DEFERRED_SIGNALS and callable(host_handler))

    def restore(self) -> None:
        """Install the program's handlers and wake-up descriptor again. A handler that it has set meanwhile stays."""
        if self._has_wakeup_fd:
            signal.set_wakeup_fd(-1)
            with suppress(OSError, ValueError):  # the program has closed it meanwhile
                signal.set_wakeup_fd(self._host_wakeup_fd)
            self._forward_wakeups()
        for signum, handler in self._host_handlers.items():
            if get_handler(signum) == self._receive:
                set_handler(signum, handler)

    def _receive(self, signum: int, _: object) -> None:
        if os.getpid() == self._pid:
            if signum in self._stop_signals:
                self._receive_stop_signal(signum)
            elif signum in DEFERRED_SIGNALS:
                self._defer(signum)
            elif signum == signal.SIGTSTP:
                self.suspension.is_requested = True
                if self.is_in_user_code and not self.is_drawing:
                    self.suspension.suspend()
            elif not self.is_at_prompt:  # SIGQUIT; it would disturb the prompt
                show = lambda stacks: self._watcher.outbox.post(partial(_print_stacks, stacks))  # noqa: E731
                self._watcher.post(self._watcher.loop.send_stacks, show)
        else:  # a child that another thread of the program has forked; the ranks do not belong to it
            self.restore()
            signal.raise_signal(signum)

    def _defer(self, signum: int) -> None:
        is_keyboard = signum == signal.SIGINT
        if is_keyboard and self.is_at_prompt:  # the console ends the run, if that is not over already
            raise KeyboardInterrupt
        is_urgent = is_keyboard and signum in self.received
        self.received.append(signum)
        self.post_interrupt(signum)
        if self.is_at_prompt or (is_urgent and self.is_in_user_code):
            raise KeyboardInterrupt

    def _receive_stop_signal(self, signum: int) -> None:
        is_for_prompt = self.is_at_prompt and signum == signal.SIGINT
        if signum in self._received_stop_signals or is_for_prompt:
            self._defer(signum)
        else:
            self._received_stop_signals.add(signum)
            self.request_stop(name_signal(signum), signum)

    def post_interrupt(self, signum: int, cause: InterruptCause = InterruptCause.SIGNAL) -> None:
        """Make the watcher act as if this signal had come, but do not deliver it to the program. For any thread."""
        self._watcher.post(self._watcher.loop.interrupt, Interrupted(signum, cause), self._call)

    def request_stop(self, cause: str, signum: int | None = None) -> bool:
        """Ask the ranks to save and return, because of `cause`, and of the signal `signum` if there was one.

        Any thread may call this. Return False if the call is over, so that the result will not have this request.
        """
        if not self._stop_cause.setdefault(None, cause):
            return False
        self._watcher.post(self._watcher.loop.request_stop, StopRequested(cause, signum), self._call)
        return True

    def _ask_to_stop(self, cause: str) -> bool:
        return self.request_stop(cause)

    def close_stop_requests(self) -> str:
        """Refuse stop requests from now on. Return the cause of the first one, or an empty text if there was none."""
        return self._stop_cause.setdefault(None, "")

    def interrupt(self) -> None:
        """Do what Ctrl-C does, for a call outside the main thread. Any thread may call this method."""
        self.received.append(signal.SIGINT)
        self.post_interrupt(signal.SIGINT)

    def end_with_program(self) -> None:
        """Stop the ranks: the program is ending."""
        self._is_ended_by_program = True
        self.post_interrupt(signal.SIGTERM, InterruptCause.PROGRAM_END)

    def wait_for_wakeup(self, seconds: float | None = None, others: Collection[Connection] = ()) -> None:
        """Wait for a signal, for the watcher, or for one of `others`; at most `seconds`, or without a limit."""
        was_in_user_code, self.is_in_user_code = self.is_in_user_code, False
        try:
            wait([self._wakeup.fileno(), *others], seconds)
        finally:
            self.is_in_user_code = was_in_user_code
        self._forward_wakeups()

    def will_end_program(self) -> bool:
        """Return whether a deferred signal will end the program without an exception, as SIGTERM does by default.

        Not SIGINT: a user who presses Ctrl-C knows why the program ends.
        """
        return any(signum != signal.SIGINT and signal.getsignal(signum) is signal.SIG_DFL for signum in self.received)

    def defer_stop_signal(self, signum: int | None) -> None:
        """Defer a stop signal after all, because the ranks have not returned in time."""
        if signum in self._received_stop_signals and signum not in self.received:
            self.received.append(signum)

    def deliver_received(self) -> None:
        """Deliver each deferred signal to the program's handler, as the last step. SIGINT usually raises KeyboardInterrupt.

        Outside the main thread, raise KeyboardInterrupt if the call was interrupted.
        """
        if not self.is_in_main_thread:
            self.is_over.set()
            if self._is_ended_by_program:
                sys.exit()  # ends the thread, and prints nothing
            if self.received:
                self.received.clear()
                raise KeyboardInterrupt
            return
        while self.received:
            signum = self.received.pop(0)
            try:
                signal.raise_signal(signum)
            finally:
                self.deliver_received()

    def _forward_wakeups(self) -> None:
        """Write the numbers of received signals to the program's wake-up descriptor, except those that mpwatch has used."""
        consumed = {*self.received, *self._stop_signals}
        forwarded = bytes(signum for signum in self._wakeup.drain() if signum and signum not in consumed)
        if forwarded and self._host_wakeup_fd != -1:
            with suppress(OSError):  # it may be closed; or full, and then the calling program is woken already
                os.write(self._host_wakeup_fd, forwarded)


def _print_stacks(stacks: Stacks) -> None:
    with suppress(*USER_ERRORS):  # stderr may be closed, or an object that raises anything
        sys.stderr.write(f"mpwatch: where the ranks are now (they go on)\n{stacks}\n")
        sys.stderr.flush()


def check_stop_signals(spec: GroupSpec) -> None:
    """Raise ValueError if handlers for the signals of the option `stop` cannot be installed and restored in this thread."""
    signals = spec.stop_policy.signals
    if threading.current_thread() is not threading.main_thread():
        refuse_signals(spec)
    for signum in set(signals) - find_handlers(signals).keys():
        raise ValueError(
            f"stop may not have {name_signal(signum)} now: C code of this program handles it, as after "
            "faulthandler.register, and mpwatch could not restore that handler; unregister it, or leave the signal out"
        )


def refuse_signals(spec: GroupSpec) -> None:
    """Raise ValueError if a run in the background has signals in the option `stop`."""
    if spec.stop_policy.signals:
        raise ValueError(IN_MAIN_THREAD_ONLY)


def find_handlers(signals: Collection[int]) -> dict[int, Any]:
    """Return the handler of each signal, without those that C code handles: for them only the kernel reports a handler.

    `signal.getsignal` returns SIG_DFL even if C code has installed a handler later.
    """
    handlers = {signum: handler for signum in signals if (handler := get_handler(signum)) is not None}
    defaults = [signum for signum, handler in handlers.items() if handler == signal.SIG_DFL]
    state = read_process_state(os.getpid()) if defaults else None
    for signum in defaults:
        if state is not None and state.catches(signum):
            del handlers[signum]
    return handlers

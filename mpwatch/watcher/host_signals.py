"""Installs mpwatch's signal handlers during a run, and restores the calling program's handlers after the run.

This module runs in the caller's thread.

During a run, no handler except the handler of SIGINT raises an exception in the caller's thread:

- SIGINT, SIGTERM and SIGHUP are deferred: the watcher thread stops the run at once, and the program's own handler gets the
  signal when the run is over. At the prompt of a debugger, however, SIGINT raises KeyboardInterrupt at once. If user code
  (an observer, `retry_if`, `env`) is running in the caller's thread, a second SIGINT raises KeyboardInterrupt at once.
- A signal of the option `stop` asks the ranks to save their state and return, and does not reach the program's own
  handler. If such a signal comes twice, or if the ranks do not return within the limit of StopPolicy, mpwatch stops the
  run and defers the signal. When such a signal stops the run, SIGINT acts like Ctrl-C, and every other signal
  acts like SIGTERM.
- SIGQUIT (Ctrl-Backslash in a terminal) asks for the stacks of all ranks, if the calling program has no handler for SIGQUIT.
  SIGQUIT asks for the stacks even if the calling program ignores SIGQUIT. A shell without job control starts background
  programs (`&`) with SIGQUIT ignored.
- SIGTSTP (Ctrl-Z in a terminal) suspends the ranks together with the calling program, if the program neither handles nor
  ignores this signal. See suspension.py.
- When a signal comes that mpwatch does not use, the program's own handler is called at once. If the calling program's signal
  handler raises an exception, mpwatch stops the run in the same way as after SIGTERM. When the run is over, mpwatch raises
  the exception of the signal handler.

mpwatch does not replace signal handlers that C code has installed. A signal that the calling program ignores stays ignored,
except SIGQUIT and the signals of `stop`. For a call outside the main thread, mpwatch changes
no signal handler, because Python runs signal handlers only in the main thread. program_end.py interrupts such a call when
Ctrl-C ends the program.

    kernel ---> C handler, in any thread ---> WakeupPipe: wakes up the caller's thread
                                                    |
                                                    `--> Python's handler ---> Interrupted ---> watcher_wakeup

The caller's thread waits for a descriptor, not for a lock. A wait for a lock could miss a signal that comes just before the
wait begins.

handler_errors.py handles the exceptions that the calling program's handlers raise before and after a run.
"""

import os
import signal
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from mpwatch.os_support.processes import read_process_state
from mpwatch.os_support.signals import list_python_handlers, name_signal, set_handler
from mpwatch.watcher.commands import CallEvent, CommandQueue, StacksRequest
from mpwatch.watcher.handler_errors import run_until_handler_raises
from mpwatch.watcher.machine.transitions import InterruptCause, Interrupted, StopRequested
from mpwatch.watcher.pending_call import PendingCall
from mpwatch.watcher.program_end import add_call, remove_call
from mpwatch.watcher.signal_options import find_handlers
from mpwatch.watcher.suspension import ProgramSuspension

DEFERRED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HostSignals:
    """Handles the signals of the calling program during one blocking call.

    If an exception interrupts a method of this class, it is safe to call the method again.

    Args:
        commands: the command queue to the watcher thread.
        is_run: True for a run, and False for a WorkerGroup.
        suspension: suspends the calling program.
        stop_signals: signals that ask the ranks to save their state and return. See `check_stop_signals`.
    """

    def __init__(
        self,
        commands: CommandQueue,
        *,
        is_run: bool,
        suspension: ProgramSuspension,
        stop_signals: Collection[int],
    ) -> None:
        self._stop_signals = stop_signals
        self._received_stop_signals: set[int] = set()
        # The cause of the first request to stop the ranks, or "" if the call has ended before that. `setdefault` is one
        # operation, so a request and the end of the call agree on which of them was first.
        self._stop_cause: dict[None, str] = {}
        self.received: list[int] = []  # deferred signals that must still be delivered to the program's own handlers
        self.handler_error: BaseException | None = None  # the first exception that a handler of the program raised
        self.stacks_request: StacksRequest | None = None  # for the last SIGQUIT
        self.is_taken_over = False
        self._has_begun = False  # to install the signal handlers
        self.is_in_user_code = False  # which may take any time
        self.is_drawing = False  # the live view, which takes a short time, and must not be left incomplete
        self.is_at_prompt = False  # of a debugger: Ctrl-C raises KeyboardInterrupt at once
        self._commands = commands
        self._caller_wakeup = commands.acquire_caller_wakeup(self)
        self.call: PendingCall | None = None  # of a WorkerGroup; None: the signals are for all ranks
        self._host_handlers: dict[int, Any] = {}
        self._host_wakeup_fds: list[int] = []  # the program's own wake-up descriptor, once it has been replaced
        self.thread_id = threading.get_native_id()
        self.pid = os.getpid()
        self.suspension = suspension
        self._is_run = is_run
        self.ends_with_program = is_run and threading.current_thread().daemon
        self._is_ended_by_program = False
        self._unposted: list[Interrupted | StopRequested] = []
        self._may_post = False

    def take_over(self) -> None:
        """Replace the handlers and the wake-up descriptor of the calling program."""
        if self._has_begun:
            return
        self._has_begun = True
        if threading.current_thread() is not threading.main_thread():
            self.is_over = threading.Event()
            self.is_taken_over = True
            add_call(self)
            return
        set_wakeup_fd = partial(signal.set_wakeup_fd, warn_on_full_buffer=False)
        # one call of C, for the reason given in os_support.descriptors.open_anonymous_file
        self._host_wakeup_fds.extend(map(set_wakeup_fd, [self._caller_wakeup.write_fd]))
        handlers = list_python_handlers()
        without_handler = run_until_handler_raises(partial(find_signals_without_handler, handlers))
        stopping = self._find_host_handlers(self._stop_signals, handlers)
        self._host_handlers = stopping | handlers | without_handler
        for signum in self._host_handlers:
            if signum in stopping:
                set_handler(signum, self._receive_stop_signal)
            elif signum in DEFERRED_SIGNALS:
                set_handler(signum, self._defer_signal)
            elif signum in without_handler:
                set_handler(signum, self._request_suspension if signum == signal.SIGTSTP else self._request_stacks)
            else:
                set_handler(signum, self._call_host_handler)
        self.is_taken_over = True

    def _find_host_handlers(self, signals: Collection[int], python_handlers: Mapping[int, Any]) -> dict[int, Any]:
        """Return a dict with the calling program's handler for each signal in `signals`.

        The dict is empty while a WorkerGroup starts or ends.
        """
        if not signals or not (self._is_run or self.call is not None):
            return {}
        found = run_until_handler_raises(partial(find_handlers, set(signals) - python_handlers.keys()))
        return found | {signum: python_handlers[signum] for signum in signals if signum in python_handlers}

    def start_posting(self) -> None:
        """Post the events of all earlier signals and stop requests to the watcher thread. From now on, post events at once.

        Before the first call of this method, post the command that starts the work of the ranks. On idle ranks, SIGINT and
        stop requests have no effect.
        """
        self._may_post = True
        with suppress(IndexError):  # a signal handler may come in between and post the rest
            while True:
                event = self._unposted.pop(0)
                self._commands.post(event if self.call is None else CallEvent(self.call, event))

    def post_interrupt(self, signum: int, cause: InterruptCause = InterruptCause.SIGNAL) -> None:
        """Make the watcher thread act as if this signal had come, but do not call the program's handler of this signal."""
        if os.getpid() == self.pid:  # this is not a child that the calling program has forked
            self._post(Interrupted(signum, cause))

    def request_stop(self, cause: str, signum: int | None = None) -> bool:
        """Make the watcher thread ask the ranks to save their state and return. Any thread may call this method.

        Args:
            cause: the text that names the origin of the request.
            signum: the signal to the calling program that has caused the request, or None.

        Returns:
            Whether the result will have this request, or an earlier request. False if the call is over.
        """
        if os.getpid() != self.pid or not self._stop_cause.setdefault(None, cause):
            return False
        self._post(StopRequested(cause, signum))
        return True

    def close_stop_requests(self) -> str:
        """Refuse stop requests from now on.

        Return the cause of the first stop request, or an empty text if there was none.
        """
        return self._stop_cause.setdefault(None, "")

    def _post(self, event: Interrupted | StopRequested) -> None:
        self._unposted.append(event)
        if self._may_post:
            self.start_posting()

    def quit(self, error: BaseException) -> None:
        """Stop the ranks as if SIGTERM had come.

        When the ranks have ended, the blocking call raises the first `error` that this method has received.
        """
        if self.handler_error is None:
            self.handler_error = error
        self.post_interrupt(signal.SIGTERM)

    def interrupt(self) -> None:
        """Do what Ctrl-C does, for a call outside the main thread. Any thread may call this method."""
        self.received.append(signal.SIGINT)
        self.post_interrupt(signal.SIGINT)

    def end_with_program(self) -> None:
        """Stop the ranks as if SIGTERM had come.

        The program is ending, and Python does not wait for the caller's daemon thread.
        """
        self._is_ended_by_program = True
        self.post_interrupt(signal.SIGTERM, InterruptCause.PROGRAM_END)

    def wait_for_wakeup(self, seconds: float | None = None, others: Collection[Connection] = ()) -> None:
        """Wait until a signal or the watcher thread wakes up the caller's thread, but at most `seconds`.

        If `seconds` is None, there is no limit. The wait also ends if one of the connections in `others` can be read.
        """
        wait([self._caller_wakeup.fileno(), *others], seconds)
        self._forward_wakeups()

    def restore(self) -> None:
        """Restore the calling program's handlers and wake-up descriptor.

        If the program has set a new handler during the run, do not replace the new handler.
        """
        # checked before the calling program has its handlers back, which may raise
        usable_wakeup_fds = [fd if _can_be_woken(fd) else -1 for fd in self._host_wakeup_fds[:1]]
        requests = (self._request_stacks, self._request_suspension, self._receive_stop_signal)
        ours = (self._defer_signal, *requests, self._call_host_handler)
        replaced = [signum for signum, handler in list_python_handlers().items() if handler in ours]
        for signum in replaced:
            set_handler(signum, self._host_handlers[signum])
        for fd in usable_wakeup_fds:
            signal.set_wakeup_fd(fd)
            self._forward_wakeups()

    def release_wakeup(self) -> None:
        """Let other threads use the wake-up pipe. Call this method after the last wait of the caller's thread."""
        self._commands.release_caller_wakeup(self._caller_wakeup)

    def will_end_program(self) -> bool:
        """Return whether a deferred signal will end the program without an exception, as SIGTERM does by default.

        If SIGINT is the only deferred signal, return False. A user who presses Ctrl-C knows why the program ends.
        """
        return any(signum != signal.SIGINT and signal.getsignal(signum) is signal.SIG_DFL for signum in self.received)

    def deliver_received(self) -> None:
        """Deliver each deferred signal to the program's handler. The handler of SIGINT usually raises KeyboardInterrupt.

        Call this method as the last step of every blocking call. Outside the main thread, raise KeyboardInterrupt if the
        call was interrupted.
        """
        if threading.current_thread() is not threading.main_thread():
            if self.is_taken_over:
                remove_call(self)
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
        """Write the numbers of received signals to the program's wake-up descriptor.

        Leave out deferred signals and the signals of `stop`.
        """
        consumed = {*self.received, *self._stop_signals}
        forwarded = bytes(signum for signum in self._caller_wakeup.drain() if signum and signum not in consumed)
        if forwarded and self._host_wakeup_fds[0] != -1:
            with suppress(OSError):  # it may be closed; or full, and then the calling program is woken already
                os.write(self._host_wakeup_fds[0], forwarded)

    def _defer_signal(self, signum: int, _: object) -> None:
        """Defer a signal. This method is the handler of each signal in DEFERRED_SIGNALS."""
        if os.getpid() == self.pid:
            if self.is_at_prompt and signum == signal.SIGINT:
                raise KeyboardInterrupt
            is_urgent = signum == signal.SIGINT and signum in self.received
            self.received.append(signum)
            self.post_interrupt(signum)
            if is_urgent and self.is_in_user_code:
                raise KeyboardInterrupt
            return
        # This is a child that another thread of the calling program has forked. The run does not belong to the child.
        self.restore()
        signal.raise_signal(signum)

    def _receive_stop_signal(self, signum: int, _: object) -> None:
        """Request a stop. This method is the handler of each signal of the option `stop`."""
        is_for_prompt = self.is_at_prompt and signum == signal.SIGINT
        if os.getpid() != self.pid or signum in self._received_stop_signals or is_for_prompt:
            self._defer_signal(signum, None)
            return
        self._received_stop_signals.add(signum)
        self.request_stop(name_signal(signum), signum)

    def defer_stop_signal(self, signum: int | None) -> None:
        """Defer a stop signal, so that the calling program's own handler gets the signal at the end of the call.

        Call this method if the ranks have not returned within `stop_timeout` after the stop signal.
        """
        if signum in self._received_stop_signals and signum not in self.received:
            self.received.append(signum)

    def _request_stacks(self, signum: int, _: object) -> None:
        """Request the stacks of all ranks. This method is the handler of SIGQUIT."""
        if os.getpid() == self.pid:
            if not self.is_at_prompt:  # where the command `ranks` shows them
                self.stacks_request = StacksRequest()
                self._commands.post(self.stacks_request)
            return
        self.restore()
        signal.raise_signal(signum)

    def _request_suspension(self, signum: int, _: object) -> None:
        """Request a suspension of the program. This method is the handler of SIGTSTP."""
        if os.getpid() == self.pid:
            self.suspension.request(at_once=self.is_in_user_code and not self.is_drawing)
            return
        self.restore()
        signal.raise_signal(signum)

    def _call_host_handler(self, signum: int, frame: object) -> None:
        """Call the calling program's own handler of the signal.

        During a run, this method replaces the program's handlers of all signals that mpwatch does not use.
        """
        try:
            self._host_handlers[signum](signum, frame)
        except BaseException as error:
            if os.getpid() != self.pid:
                raise
            self.quit(error)
        if os.getpid() != self.pid:
            raise RuntimeError(
                "a signal handler has forked this process during a run; the ranks belong to the parent, so the child must "
                "not return from the handler: end it there with os._exit()"
            )


def _can_be_woken(fd: int) -> bool:
    """Return whether Python accepts `fd` as the wake-up descriptor. Python refuses a closed or blocking descriptor."""
    try:
        return fd == -1 or not os.get_blocking(fd)
    except OSError:
        return False


def find_signals_without_handler(python_handlers: Collection[int]) -> dict[int, Any]:
    """Find the signals that mpwatch uses and for which the calling program has installed no handler.

    Return a dict from each such signal to SIG_DFL. However, if the program ignores SIGQUIT, the value of SIGQUIT is SIG_IGN.
    Only SIGQUIT, SIGTSTP and the signals in DEFERRED_SIGNALS can be keys. This function asks the kernel which signals have a
    handler, because `signal.getsignal` returns SIG_DFL even if C code has installed a handler.
    """
    candidates = [signum for signum in (*DEFERRED_SIGNALS, signal.SIGQUIT, signal.SIGTSTP) if signum not in python_handlers]
    default = [signum for signum in candidates if signal.getsignal(signum) is signal.SIG_DFL]
    state = read_process_state(os.getpid()) if default else None
    found: dict[int, Any] = {signum: signal.SIG_DFL for signum in default if state is None or not state.catches(signum)}
    if signal.SIGQUIT in candidates and signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        found[signal.SIGQUIT] = signal.SIG_IGN
    return found

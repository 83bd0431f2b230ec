"""The watcher thread: it runs the event loop that starts, watches and reaps the ranks.

    caller's thread    prepare --> start --> post commands ----------------------------> join --> close
                                     |            |            ^                          ^
    watcher thread                   `--> EventLoop.run -------'-- answers ---> is_finished, wake-up

The event loop has its own thread, so that no exception of the calling program's code can interrupt the event loop. In a
thread of the calling program, a signal handler or `PyThreadState_SetAsyncExc` can raise an exception between any two
bytecodes. If an exception interrupted the start of a rank, the rank's process could stay alive without a watcher.

No user code runs in the watcher thread.
"""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from multiprocessing.context import set_spawning_popen
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from mpwatch.errors import LaunchError
from mpwatch.events.types import Progressed
from mpwatch.options.log_spec import default_logs
from mpwatch.options.spec import GroupSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.processes import wait_for_thread_exit
from mpwatch.results.model import WorkerState
from mpwatch.results.rank_status import RankStatus
from mpwatch.results.stacks import Stacks
from mpwatch.watcher.commands import CommandQueue, StacksRequest, StatusRequest
from mpwatch.watcher.event_loop import EventLoop, OutcomeCallback, StopCallback
from mpwatch.watcher.import_check import check_not_importing
from mpwatch.watcher.observers.collective_monitor import StallCallback
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.observers.progress_events import ProgressEvents
from mpwatch.watcher.output.rank_output import RankOutput
from mpwatch.watcher.processes.rank_environment import RankSetup, build_rank_setups, build_workers, reserve_port
from mpwatch.watcher.stop_agreements import StepsHeldCallback
from mpwatch.wire.resource_errors import with_remedy

if TYPE_CHECKING:
    from mpwatch.watcher.debugger.console import DebuggerConsole

THREAD_START_SECONDS = 1.0  # a thread needs microseconds to start
ANSWER_POLL_SECONDS = 0.05  # how often a thread that waits for an answer checks whether the ranks have ended meanwhile


class WaitingCall(Protocol):
    """Declares the attribute of BlockingCall (run.py) that this module uses."""

    is_over: bool


def has_come_up(thread: threading.Thread) -> bool:
    """Return whether a thread is alive. If the start of the thread was interrupted, wait until the thread runs."""
    deadline = monotonic() + THREAD_START_SECONDS
    while thread in threading.enumerate() and not thread.is_alive() and monotonic() < deadline:
        os.sched_yield()
    return thread.is_alive()


class WatcherThread:
    """The watcher thread of a run or a WorkerGroup, and the data that this thread shares with other threads.

    Two threads of the calling program must not call `prepare`, `prepare_restart` or `close` at the same time. If an
    exception interrupts a method, the method can be called again.

    Args:
        spec: number of ranks, and the limits.
        event_bus: the event bus of the run or the WorkerGroup.
        restart_count: how often the ranks of the WorkerGroup were restarted before.
        keep_ranks: whether the ranks stay after a call.
        on_outcome_change: is called in the watcher thread. See EventLoop.
        on_stall: is called in the watcher thread. See EventLoop.
        on_stop: is called in the watcher thread. See EventLoop.
        on_steps_held: is called in the watcher thread. See EventLoop.
    """

    def __init__(
        self,
        spec: GroupSpec,
        event_bus: EventBus,
        *,
        restart_count: int = 0,
        keep_ranks: bool,
        on_outcome_change: OutcomeCallback = lambda _: None,
        on_stall: StallCallback | None = None,
        on_stop: StopCallback | None = None,
        on_steps_held: StepsHeldCallback | None = None,
    ) -> None:
        check_not_importing()
        self._spec = spec
        self._event_bus = event_bus
        self._restart_count = restart_count
        self.keeps_ranks = keep_ranks
        self._on_outcome_change = on_outcome_change
        self._on_stall = on_stall
        self._on_stop = on_stop
        self._on_steps_held = on_steps_held
        self.stop_signals = tuple(spec.stop_policy.signals)
        self._pid = os.getpid()
        with ExitStack() as stack:
            self.commands = stack.enter_context(closing(CommandQueue()))
            self.deferred_log = DeferredLog(self.commands.wake_callers)
            self._event_bus.wake = self.commands.wake_callers
            assert isinstance(spec.nprocs, int)  # see GroupSpec
            nprocs = None if spec.is_multi_node else spec.nprocs
            self.output = RankOutput(spec.logs or default_logs(), nprocs, self.deferred_log)
            self._port_socket: socket.socket | None = None  # keeps MASTER_PORT reserved
            stack.callback(self._release_port)
            self._resources = stack.pop_all()
        self._debugger: DebuggerConsole | None = None
        self._setups: list[RankSetup] = []  # of the first start
        self.workers: tuple[Worker, ...] = ()  # of the latest start of each rank; empty until `prepare` has been called
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._emit_lock = threading.Lock()
        self._debugger_lock = threading.Lock()
        self._debugger_user: Callable[[], WaitingCall | None] = lambda: None  # the call that serves the debugger
        self.get_main_call: Callable[[], WaitingCall | None] = lambda: None  # the last call of the main thread
        self._is_cancelled = False
        self._closes_itself = False
        self.is_finished = False  # no rank is left, and none will be started
        self.error: BaseException | None = None  # what the event loop raised

    def prepare(self) -> None:
        """Prepare the first start of all ranks. This method calls the user's `env` function, in the caller's thread."""
        assert isinstance(self._spec.nprocs, int)  # see GroupSpec
        self._setups = self.prepare_restart(range(self._spec.nprocs), self._restart_count)

    def prepare_restart(self, ranks: Sequence[int], restart_count: int) -> list[RankSetup]:
        """Return the RankSetups for the next start of these ranks.

        If `ranks` contains all ranks, the ranks get a new MASTER_PORT. If `ranks` contains only some of the ranks,
        MASTER_PORT stays the same.
        """
        if self._port_socket is None or len(ranks) == self._spec.nprocs:
            # the new port is reserved before the old one is released, so the two differ
            earlier, self._port_socket = self._port_socket, reserve_port()
            if earlier is not None:
                earlier.close()
        port = self._port_socket.getsockname()[1]
        run_id = self._event_bus.run_id
        workers = build_workers(self._spec, ranks, port, run_id=run_id, restart_count=restart_count)
        setups = build_rank_setups(self._spec, workers)
        known = {worker.rank: worker for worker in self.workers}
        self.workers = tuple((known | {setup.worker.rank: setup.worker for setup in setups}).values())
        return setups

    def _release_port(self) -> None:
        if self._port_socket is not None:
            self._port_socket.close()

    def start(self) -> None:
        """Start the watcher thread, if it was not started before. The watcher thread starts the ranks.

        Any thread may call this method. If Python cannot start a thread, for example because the program is ending, this
        method usually executes the event loop in the caller's thread. In three cases, the event loop needs its own thread,
        so this method raises LaunchError instead: in a WorkerGroup, in a run of several nodes, and in a run that can
        continue after a failure of a rank.
        """
        with self._start_lock:
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        # The program may end while a WorkerGroup is open, and while a daemon thread runs ranks (program_end.py).
        daemon = self.keeps_ranks or threading.current_thread().daemon
        self._thread = threading.Thread(target=self._run, name="mpwatch", daemon=daemon)
        try:
            self._thread.start()
        except RuntimeError as error:  # Python is ending, or there is no room for one more
            self._thread = None
            if self.keeps_ranks or self._spec.has_decisions or self._spec.is_multi_node:
                self.is_finished = True
                raise LaunchError(with_remedy("the ranks cannot be watched", error)) from error
            self._run()

    def _run(self) -> None:
        try:
            if not self._is_cancelled:
                EventLoop(
                    self._spec,
                    self._setups,
                    self.commands,
                    self.deferred_log,
                    self._event_bus,
                    output=self.output,
                    keep_ranks=self.keeps_ranks,
                    on_outcome_change=self._on_outcome_change,
                    on_stall=self._on_stall,
                    on_stop=self._on_stop,
                    on_steps_held=self._on_steps_held,
                ).run()
        except BaseException as error:  # noqa: BLE001  the caller's thread raises it
            self.error = error
        finally:
            self.output.stop_when_drained()
            self.is_finished = True
            self.commands.wake_callers()
            if self._closes_itself:
                self.close()

    def emit_logs_and_events(self) -> None:
        """Emit the deferred log records and call the observers.

        In a WorkerGroup, if several threads call this method at the same time, only one thread emits the records
        and calls the observers. The other threads return at once.
        """
        if not self.keeps_ranks:
            self.deferred_log.emit()
            self._event_bus.dispatch()
            return
        while (self.deferred_log.has_records or self._event_bus.has_events) and self._emit_lock.acquire(blocking=False):
            try:
                self.deferred_log.emit()
                self._event_bus.dispatch()
            finally:
                self._emit_lock.release()

    @property
    def wants_progress(self) -> bool:
        """Whether an observer receives Progressed events."""
        return self._event_bus.wants(Progressed)

    def make_progress_events(self) -> ProgressEvents | None:
        """Return a View that publishes the progress reports of the ranks, or None if no observer asks for reports."""
        return ProgressEvents(self._event_bus) if self.wants_progress else None

    def drain_output(self, seconds: float | None, *, with_unfinished_lines: bool = True) -> None:
        """Wait until mpwatch has written everything that the ranks have printed so far.

        If the wait takes longer than `seconds`, log a warning. If `seconds` is None, the wait has no time limit.
        """
        if not self.output.drain_all(seconds, with_unfinished_lines=with_unfinished_lines):
            text = "the output of the ranks is incomplete: the reader of stdout or stderr did not read it in time"
            self.deferred_log.warning(text)
        self.emit_logs_and_events()

    def get_debugger(self, user: WaitingCall) -> "DebuggerConsole | None":
        """Return the debugger's console.

        Return None if no rank has reached a breakpoint, or if a different call uses the debugger's console. Only a call in
        the main thread can open the debugger's prompts. A call in the main thread opens the prompts of all ranks, including
        ranks that work for a call in another thread.
        """
        if self._debugger is None and not self.commands.has_debugger_sockets():
            return None
        with self._debugger_lock:
            main_call = self.get_main_call()
            other = self._debugger_user()
            server = next((call for call in (main_call, other) if call is not None and not call.is_over), user)
            if server is not user:
                return None
            self._debugger_user = ref(user)
            if self._debugger is None:
                from mpwatch.watcher.debugger.console import DebuggerConsole  # most runs never need it

                self._debugger = DebuggerConsole(self.commands, self.output, self.deferred_log)
            return self._debugger

    def has_started_ranks(self) -> bool:
        """Return whether every rank has a process."""
        return self.commands.state is not WorkerState.UNKNOWN

    def is_running(self) -> bool:
        """Return whether the event loop accepts commands. `is_running` is quicker than `is_alive`."""
        return self._thread is not None and not self.is_finished

    def take_stacks(self) -> Stacks:
        """Return the present stacks of all ranks. Any thread may call this method.

        Return an empty Stacks object if the watcher thread is not running.
        """
        request = StacksRequest()
        return request.stacks or Stacks() if self._wait_for_answer(request) else Stacks()

    def take_statuses(self) -> Sequence[RankStatus]:
        """Return the present status of each rank, or () if the watcher thread is not running.

        Any thread may call this method.
        """
        request = StatusRequest()
        return request.statuses or () if self._wait_for_answer(request) else ()

    def _wait_for_answer(self, request: StacksRequest | StatusRequest) -> bool:
        """Post a request to the event loop, and wait for the answer.

        Return False if the event loop ends without an answer.
        """
        self.commands.post(request)
        while not request.is_answered.wait(ANSWER_POLL_SECONDS):
            if not self.is_running():
                return request.is_answered.is_set()
        return True

    def is_alive(self) -> bool:
        """Return whether the thread is alive. See `has_come_up`."""
        return self._thread is not None and has_come_up(self._thread)

    def belongs_to_this_process(self) -> bool:
        """Return False in a process that the calling program has forked."""
        return os.getpid() == self._pid

    def cancel_start(self) -> None:
        """If the event loop does not run yet, prevent the start of the ranks."""
        self._is_cancelled = True
        set_spawning_popen(None)  # an exception may have interrupted the pickling of a call, which sets it

    def join(self) -> None:
        """Wait until the thread has ended, without a time limit.

        If `is_finished` is False, first post a command that ends the ranks, and then call `join`.
        """
        if self._thread is not None and self._thread.native_id is not None:
            self._thread.join()
            wait_for_thread_exit(self._thread.native_id)

    def close(self) -> None:
        """Release all resources.

        If the watcher thread was started, call `close` only when `is_finished` is True. Never call `start` after `close`.
        """
        self.is_finished = True
        try:
            self.output.close()
            if self._debugger is not None:
                self._debugger.close()
        finally:
            self._resources.close()

    def close_when_finished(self) -> None:
        """Make the watcher thread call `close` when all ranks have ended."""
        self._closes_itself = True
        if self.is_finished:
            self.close()

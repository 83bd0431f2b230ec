"""The watcher thread of a run or a WorkerGroup, and what other threads do with it.

    thread of the program:  prepare --> start --> post functions, wait for answers --> post `end` --> join --> close
    watcher thread:                       '--> EventLoop.run ------------------------------> is_finished, wake up

The event loop has a thread of its own, so that no exception of the program's code can interrupt it: a signal handler or
PyThreadState_SetAsyncExc can raise between any two bytecodes, for example while a rank is being started.
"""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from mpwatch.errors import LaunchError
from mpwatch.options.log_spec import default_logs
from mpwatch.options.spec import GroupSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.processes import wait_for_thread_exit
from mpwatch.results.model import RankStatus
from mpwatch.results.stacks import Stacks
from mpwatch.watcher.event_loop import EventLoop, Node
from mpwatch.watcher.inbox import Inbox, WaitingThread
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.output.rank_output import RankOutput
from mpwatch.watcher.processes.rank_environment import RankSetup, build_rank_setups, build_workers, reserve_port
from mpwatch.wire.resource_errors import with_remedy

if TYPE_CHECKING:
    from mpwatch.watcher.debugger.console import DebuggerConsole

T = TypeVar("T")
ANSWER_POLL_SECONDS = 0.05  # how often a thread that waits for an answer checks whether the ranks have ended meanwhile


class Watcher:
    """Lives as long as the run, or as long as the WorkerGroup unless the watcher itself fails.

    Post methods of `loop` to the watcher thread. The threads of the program run what is in `outbox`, see Caller. `workers`
    has the latest start of each rank. If `is_finished`, no rank is left, and none will be started.
    """

    def __init__(self, spec: GroupSpec, event_bus: EventBus, *, keep_ranks: bool, node: Node | None = None) -> None:
        assert isinstance(spec.nprocs, int)  # see GroupSpec
        self._spec, self._event_bus, self.keeps_ranks = spec, event_bus, keep_ranks
        self.outbox = event_bus.outbox
        self._port_socket: socket.socket | None = None  # keeps MASTER_PORT reserved
        with ExitStack() as stack:
            self._inbox = stack.enter_context(closing(Inbox()))
            nprocs = None if spec.is_multi_node else spec.nprocs
            self.output = stack.enter_context(closing(RankOutput(spec.logs or default_logs(), nprocs, self.outbox)))
            self.loop = EventLoop(spec, self._inbox, event_bus, self.output, keep_ranks=keep_ranks, node=node)
            stack.callback(self._release)
            self._resources = stack.pop_all()
        self.workers: tuple[Worker, ...] = ()
        self.is_finished = False
        self.error: BaseException | None = None
        self.stop_signals = tuple(spec.stop_policy.signals)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # two calls of a WorkerGroup may find the same new watcher, or its first breakpoint
        self._is_cancelled = False
        self._closes_itself = False
        self._debugger: DebuggerConsole | None = None

    def prepare(self, ranks: Sequence[int], restart_count: int) -> list[RankSetup]:
        """Return what is needed to start these ranks. This calls the user's `env` function, in this thread.

        All ranks together get a new MASTER_PORT. Some ranks get the present one.
        """
        if self._port_socket is None or len(ranks) == self._spec.nprocs:
            port = self.reserve_port()
        else:
            port = self._port_socket.getsockname()[1]
        run_id = self._event_bus.run_id
        workers = build_workers(self._spec, ranks, port, run_id=run_id, restart_count=restart_count)
        setups = build_rank_setups(self._spec, workers)
        known = {worker.rank: worker for worker in self.workers}
        self.workers = tuple((known | {setup.worker.rank: setup.worker for setup in setups}).values())
        return setups

    def reserve_port(self) -> int:
        """Return another port than before. One thread calls this."""
        earlier, self._port_socket = self._port_socket, reserve_port()
        if earlier is not None:
            earlier.close()
        return int(self._port_socket.getsockname()[1])

    def post(self, method: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Make the watcher thread call a method of `loop`. Any thread and any signal handler may call this."""
        self._inbox.post(partial(method, *args, **kwargs))

    def start(self) -> None:
        """Start the thread, unless it was started before. Raises LaunchError. Any thread may call this."""
        with self._lock:
            if self._thread is not None or self.is_finished:
                return
            # The program may end while a WorkerGroup is open, and while a daemon thread runs ranks (registry.py).
            daemon = self.keeps_ranks or threading.current_thread().daemon
            self._thread = threading.Thread(target=self._run, name="mpwatch", daemon=daemon)
            try:
                self._thread.start()
            except RuntimeError as error:  # Python is ending, or there is no room for one more
                self._thread, self.is_finished = None, True
                raise LaunchError(with_remedy("the ranks cannot be watched", error)) from error

    def _run(self) -> None:
        try:
            if not self._is_cancelled:
                self.loop.run()
        except BaseException as error:  # noqa: BLE001  a waiting thread raises it
            self.error = error
        finally:
            self.output.stop_when_drained()
            self.is_finished = True
            self.outbox.wake()
            if self._closes_itself:
                self.close()

    def use_current_streams(self) -> None:
        """Show what the ranks print from now on on the present sys.stdout and sys.stderr."""
        if not self.outbox.list_waiting():  # otherwise lines of ranks of other calls may be unfinished
            self.output.use_current_streams()

    def drain_output(self, seconds: float | None) -> None:
        """Wait until everything that the ranks have printed so far was written, or log a warning after `seconds`."""
        if not self.output.drain_all(seconds):
            text = "the output of the ranks is incomplete: the reader of stdout or stderr did not read it in time"
            self.outbox.warn(text)
        self.outbox.run_all()

    def take_stacks(self) -> Stacks:
        """Return the present stacks of all ranks, or none if the watcher does not answer. Any thread may call this."""
        return self._ask(self.loop.send_stacks) or Stacks()

    def take_statuses(self) -> Sequence[RankStatus]:
        """Return the present status of each rank, or () if the watcher does not answer. Any thread may call this."""
        return self._ask(self.loop.send_statuses) or ()

    def _ask(self, method: Callable[[Callable[[T], object]], object]) -> T | None:
        answers: SimpleQueue[T] = SimpleQueue()
        self.post(method, answers.put)
        while True:
            is_last = not self.is_running()
            with suppress(Empty):
                return answers.get(timeout=ANSWER_POLL_SECONDS)
            if is_last:
                return None

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self.is_finished

    def cancel_start(self) -> None:
        """If the event loop does not run yet, start no rank."""
        self._is_cancelled = True

    def join(self) -> None:
        """Wait until the thread has ended, without a limit. Post `end` or `shut_down` before."""
        if self._thread is not None and self._thread.native_id is not None:
            self._thread.join()
            wait_for_thread_exit(self._thread.native_id)

    def close(self) -> None:
        """Release all resources. If the thread was started, `is_finished` must be True."""
        self.is_finished = True
        try:
            if self._debugger is not None:
                self._debugger.close()
        finally:
            self._resources.close()

    def close_when_finished(self) -> None:
        """Make the watcher thread call `close` when all ranks have ended."""
        self._closes_itself = True
        if not self.is_running():
            self.close()

    def _release(self) -> None:
        for _, fd in self.take_debugger_sockets():
            os.close(fd)
        if self._port_socket is not None:
            self._port_socket.close()

    # ---- the debugger

    def get_debugger(self, user: WaitingThread) -> "DebuggerConsole | None":
        """Return the console, or None if no rank has reached a breakpoint, or if another thread serves the console.

        Only the main thread can open prompts. If it waits, it opens them for all ranks, those of other calls, too.
        """
        if self._debugger is None and not self.loop.debugger_sockets:
            return None
        waiting = self.outbox.list_waiting()
        if next((thread for thread in waiting if thread.is_in_main_thread), waiting[0]) is not user:
            return None
        with self._lock:
            if self._debugger is None:
                from mpwatch.watcher.debugger.console import DebuggerConsole  # most runs never need it

                self._debugger = DebuggerConsole(self)
            return self._debugger

    def take_debugger_sockets(self) -> list[tuple[int, int]]:
        sockets = self.loop.debugger_sockets
        return [sockets.popleft() for _ in range(len(sockets))]

    def suspend_limits(self, *, are_suspended: bool) -> None:
        self.post(self.loop.suspend_limits, are_suspended=are_suspended)

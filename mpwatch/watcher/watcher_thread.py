"""The life of some ranks, from their start to their end, and the thread that watches them meanwhile.

    caller's thread    prepare --> begin --> post calls, signals, the end -----------------> close
                                     |               |        ^                                ^
    thread of the life               `--> EventLoop.run ------' answers -----------> is over --'

Python may throw an exception into a thread between any two bytecodes: a signal handler that raises, in the main one, or
`PyThreadState_SetAsyncExc`. One that struck while a rank is being started or reaped would leave it behind. Nobody knows of
this thread, so nothing is thrown into what starts, watches and reaps.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from multiprocessing.context import set_spawning_popen

from mpwatch.errors import LaunchError
from mpwatch.options.log_spec import default_logs
from mpwatch.options.spec import GroupSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.processes import await_end_of_thread
from mpwatch.results.model import WorkerState
from mpwatch.watcher.commands import CommandQueue
from mpwatch.watcher.event_loop import EventLoop, VerdictCallback
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.output.rank_output import RankOutput
from mpwatch.watcher.processes.rank_environment import environments_of, reserve_port, workers_here
from mpwatch.watcher.restarts.restart_group import RankSetup

log = logging.getLogger("mpwatch")
THREAD_SECONDS = 1.0  # a thread needs microseconds to begin


class WatcherThread:
    """Its methods are the caller's threads', one at a time; each may be called again, should an exception have come.

    Args:
        spec: how many ranks, and under which limits.
        journal: of the run or the group that all its lives are of.
        restart_count: how many there were before.
        keep: whether the ranks stay after a call. Then the program may end without having closed this.
        herald: is told, in the thread, as soon as it is clear how an attempt ends.
    """

    def __init__(
        self, spec: GroupSpec, event_bus: EventBus, *, restart_count: int = 0, keep: bool, on_verdict: VerdictCallback = bool
    ) -> None:
        self._spec = spec
        self._event_bus = event_bus
        self._restart_count = restart_count
        self._keep = keep
        self._on_verdict = on_verdict
        self._pid = os.getpid()
        with ExitStack() as stack:
            self.commands = stack.enter_context(closing(CommandQueue()))
            self.deferred_log = DeferredLog(self.commands.caller_wakeup.wake)
            self._event_bus.wake = self.commands.caller_wakeup.wake
            assert isinstance(spec.nprocs, int)  # see GroupSpec
            nprocs = None if spec.is_on_nodes else spec.nprocs
            self.output = RankOutput(spec.logs or default_logs(), nprocs, self.deferred_log)
            self._keeper: socket.socket | None = None  # of the port
            stack.callback(self._free_port)
            self._held = stack.pop_all()
        self._setups: list[RankSetup] = []
        self._thread: threading.Thread | None = None
        self._is_cancelled = False
        self._is_forgotten = False
        self.is_over = False
        self.error: BaseException | None = None

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Who the ranks are, once they are prepared."""
        return tuple(worker for worker, _ in self._setups)

    def is_ours(self) -> bool:
        """False in a process that this program has forked."""
        return os.getpid() == self._pid

    def prepare(self) -> None:
        """What runs code of the user's runs it here, in the caller's thread: the `env` function."""
        assert isinstance(self._spec.nprocs, int)  # see GroupSpec
        self._setups = self.prepare_again(range(self._spec.nprocs), self._restart_count)

    def prepare_again(self, ranks: Sequence[int], restart_count: int) -> list[RankSetup]:
        """How these ranks are started the next time: on a new port, if it is all of them."""
        if self._keeper is None or len(ranks) == self._spec.nprocs:
            earlier, self._keeper = self._keeper, reserve_port()  # in this order, so that it is another one
            if earlier is not None:
                earlier.close()
        port = self._keeper.getsockname()[1]
        run_id = self._event_bus.run_id
        workers = workers_here(self._spec, ranks, port, run_id=run_id, restart_count=restart_count)
        return environments_of(self._spec, workers)

    def _free_port(self) -> None:
        if self._keeper is not None:
            self._keeper.close()

    def attend(self) -> None:
        """Say what is to be said, in the caller's thread."""
        self.deferred_log.say()
        self._event_bus.dispatch()

    def settle(self, seconds: float | None) -> None:
        """Wait until what the ranks have printed by now is where it belongs, and say what is to be said of that."""
        if not self.output.settle(seconds):
            log.warning("not all that the ranks have printed could be shown: nobody reads it")
        self.deferred_log.say()

    def begin(self) -> None:
        """Start the thread, which starts the ranks. Nothing if it has been started. Raises LaunchError."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._carry_out, name="mpwatch", daemon=self._keep)
        try:
            self._thread.start()
        except RuntimeError as error:  # Python is ending, or there is no room for one more
            self._thread = None
            self.is_over = self._keep
            if self._keep:
                raise LaunchError(f"the ranks cannot be watched: {error}") from error
            self._carry_out()

    def has_started(self) -> bool:
        """Whether there is a process for each rank."""
        return self.commands.state is not WorkerState.UNKNOWN

    def cancel(self) -> None:
        """Let nothing begin that has not begun."""
        self._is_cancelled = True
        set_spawning_popen(None)  # if packing a call was cut short

    def is_watched(self) -> bool:
        """Whether the thread is at work, for sure."""
        return self._thread is not None and not self.is_over

    def has_begun(self) -> bool:
        """Whether the thread is at work. If its start was interrupted, it may be about to be, and sees that it is late."""
        deadline = time.monotonic() + THREAD_SECONDS
        thread = self._thread
        while thread in threading.enumerate() and not thread.is_alive() and time.monotonic() < deadline:
            os.sched_yield()
        return thread is not None and thread.is_alive()

    def join(self) -> None:
        """Until the thread has ended, which has nothing more to do."""
        if self._thread is not None and self._thread.native_id is not None:
            self._thread.join()
            await_end_of_thread(self._thread.native_id)

    def close(self) -> None:
        """Give back what it held; when it is over, or has never begun, and now never will."""
        self.is_over = True
        try:
            self.output.close()
        finally:
            self._held.close()

    def forget(self) -> None:
        """Nobody will close it: the thread does so when all ranks have ended."""
        self._is_forgotten = True
        if self.is_over:
            self.close()

    def _carry_out(self) -> None:
        try:
            if not self._is_cancelled:
                EventLoop(
                    self._spec,
                    self._setups,
                    self.commands,
                    self.deferred_log,
                    self._event_bus,
                    output=self.output,
                    keep=self._keep,
                    on_verdict=self._on_verdict,
                ).run()
        except BaseException as error:  # noqa: BLE001  it is the caller's to raise
            self.error = error
        finally:
            self.output.finish()
            self.is_over = True
            self.commands.caller_wakeup.wake()
            if self._is_forgotten:
                self.close()

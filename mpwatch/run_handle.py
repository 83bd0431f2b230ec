"""`RunHandle` is the future of a run, and `CallHandle` is the future of a call of a WorkerGroup."""

import os
import signal
import threading
from collections.abc import Callable, Collection, Generator
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from mpwatch.errors import LaunchError, RunFailedError, raise_if_failed
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.processes import wait_for_thread_exit
from mpwatch.results.model import Progress, WorkerState
from mpwatch.results.run_result import RunResult
from mpwatch.results.stacks import Stacks
from mpwatch.watcher.machine.transitions import InterruptCause
from mpwatch.watcher.rank_queue import RankQueue, Ticket
from mpwatch.watcher.run import BlockingCall
from mpwatch.watcher.running_calls import add_call
from mpwatch.watcher.watcher_thread import has_come_up
from mpwatch.wire.resource_errors import with_remedy

T = TypeVar("T")
OnStart = Callable[[BlockingCall], object]  # see PersistentRanks.call


class _Handle(Future[RunResult[T]]):
    """The base class of RunHandle and CallHandle. Each handle is a future with a thread that executes the run or the call.

    Args:
        execute: runs the call in the new thread. Its argument is a function, which it must call with each new BlockingCall.
        check: whether `result` raises an error after a failure.
        name: name of the thread.
    """

    def __init__(self, execute: Callable[[OnStart], RunResult[T]], *, check: bool, name: str) -> None:
        super().__init__()
        self._run: Callable[[OnStart], RunResult[T]] | None = execute  # None: it has begun, or was cancelled
        self._check = check
        self._lock = threading.RLock()  # a signal handler may cancel or stop the call
        self._call: BlockingCall | None = None  # from the start of the ranks until the run is over
        self._is_ending = False
        self._interrupt: tuple[int, InterruptCause] | None = None  # the first one, which may come before `_call`
        self._stop_cause = ""  # of the first request to stop; empty: there was none
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._execute, name=name, daemon=True)

    def interrupt(self, signum: int = signal.SIGINT, cause: InterruptCause = InterruptCause.STOP) -> None:
        """Request the end of the call, and return immediately."""
        with self._lock:
            self._interrupt = self._interrupt or (signum, cause)
            if (call := self._call) is not None:
                call.signals.post_interrupt(signum, cause)

    def request_stop(self) -> None:
        """Ask the ranks to save their state, and to return from their function.

        After a call of `request_stop`, `should_stop` returns True on all ranks at the same step. This method does not wait
        for the ranks. If the ranks have not begun to run the function, they stop before their first step. If the run or the
        call is over, `request_stop` does nothing.

        Raises:
            RuntimeError: the method is called in a fork of the process that owns the run.
        """
        self._check_process("request_stop")
        self.ask_to_stop("request_stop() of its handle")

    def ask_to_stop(self, cause: str) -> bool:
        """Ask the ranks to save their state, and to return from their function. Return False if the call is over."""
        with self._lock:
            self._stop_cause = self._stop_cause or cause
            call, is_ending = self._call, self._is_ending  # in this order
            return call.ask_to_stop(cause) if call is not None else not is_ending

    def wait_for_end(self) -> None:
        """Wait until the call has a result and its thread has ended.

        In the thread of the call, this method waits only for the result, because a thread cannot wait for its own end.
        """
        wait([self])
        if threading.current_thread() is self._thread:
            return
        if self._thread.native_id is not None:  # the thread was started
            self._thread.join()
            wait_for_thread_exit(self._thread.native_id)

    def __await__(self) -> Generator[Any, None, RunResult[T]]:
        import asyncio  # takes time, and most programs do not use it

        return asyncio.wrap_future(self).__await__()

    def _execute(self) -> None:
        run, self._run = self._run, None
        if run is None:  # cancelled
            self._release_ranks()
            return
        try:
            result = run(self._begin)
            if self._check:
                raise_if_failed(result)
        except BaseException as error:  # noqa: BLE001  `result` raises it
            self._set_outcome(partial(self.set_exception, error))
        else:
            self._set_outcome(partial(self.set_result, result))

    def _set_outcome(self, set_it: Callable[[], None]) -> None:
        self._is_ending = True
        self._call = None
        set_it()

    def _release_ranks(self) -> None:
        """Let other calls of the WorkerGroup use the ranks of this call. `RunHandle._release_ranks` does nothing."""

    def _begin(self, call: BlockingCall) -> None:
        with self._lock:
            self._call = call
            if self._interrupt is not None:
                call.signals.post_interrupt(*self._interrupt)
            elif self._stop_cause:
                call.signals.request_stop(self._stop_cause)

    def _check_process(self, method: str) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"{method}() was called in a fork of the process that owns this run")


class RunHandle(_Handle[T]):
    """A run that `mpwatch.submit` has started. The handle is a `concurrent.futures.Future` of the RunResult.

    `result()` returns the same result as `mpwatch.run`, or raises the same exception. In asyncio, `await handle` gives the
    same result as `handle.result()`. `cancel()` always returns False, because the run has already begun. `stop()` ends the
    run. If the handle is used in a `with` statement, the end of the block calls `stop()`. Any thread may call any method of
    the handle.
    """

    def __init__(self, run: Callable[[OnStart], RunResult[T]], *, check: bool) -> None:
        super().__init__(run, check=check, name="mpwatch run")
        self.set_running_or_notify_cancel()
        self._submitted_at = monotonic()
        add_call(self)

    def stop(self) -> None:
        """Stop the run, and wait until all its ranks and threads have ended.

        The ranks get SIGINT, as after Ctrl-C. A rank that has not ended after `grace_period` gets SIGKILL. A second call of
        `stop` within `grace_period`, from any thread, sends SIGKILL immediately. If the run is already over, `stop` only
        waits for the thread of the run.

        If `stop` has ended the run, `result()` raises RunFailedError. With `check=False`, `result()` instead returns a
        result with the state STOPPED.

        If an observer (`on_event`) of the run calls `stop`, the method only requests the end of the run, and returns
        immediately.

        Raises:
            RuntimeError: the method is called in a fork of the process that owns the run.
        """
        self._check_process("stop")
        self.interrupt()
        if threading.current_thread() is not self._thread:
            self.wait_for_end()

    def stacks(self) -> Stacks:
        """Return the present stacks of each rank, as `WorkerGroup.stacks` does.

        The returned dict is empty before and after the run.

        Raises:
            RuntimeError: the method is called in a fork of the process that owns the run.
        """
        self._check_process("stacks")
        call = self._call
        return Stacks() if call is None else call.watcher_thread.take_stacks()

    def progress(self) -> dict[int, Progress]:
        """Return what each rank passed to its last call of `mpwatch.report()`. The keys of the dict are the global ranks.

        Ranks that have not called `mpwatch.report` are missing in the returned dict.

        Raises:
            RuntimeError: the method is called in a fork of the process that owns the run.
        """
        self._check_process("progress")
        if (result := self._get_result()) is not None:
            return dict(result.progress)
        call = self._call
        statuses = () if call is None else call.watcher_thread.take_statuses()
        return {
            status.rank: Progress(
                step=status.report.step,
                total=status.report.total,
                metrics=status.report.metrics,
                elapsed=status.report.at - self._submitted_at,
            )
            for status in statuses
            if status.report is not None
        }

    @property
    def state(self) -> WorkerState:
        """The state of the run, which is INIT until all ranks are ready, and after that HEALTHY or UNHEALTHY.

        When the run is over, its state is the state of the result, or FAILED if there is no result.
        """
        if self.done():
            result = self._get_result()
            return WorkerState.FAILED if result is None else result.state
        call = self._call
        state = WorkerState.UNKNOWN if call is None else call.watcher_thread.commands.state
        return WorkerState.INIT if state is WorkerState.UNKNOWN else state

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The identity of each rank of the run, as a Worker. The tuple is empty until the ranks are started.

        In a run on several nodes, `workers` is empty until the end of the run.
        """
        if (result := self._get_result()) is not None:
            return tuple(result.workers)
        call = self._call
        return () if call is None else call.watcher_thread.workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() == self._pid:  # not a fork that leaves the `with` block, too
            self.stop()

    def start(self) -> None:
        """Start the run. Raises LaunchError if Python cannot start a thread.

        `mpwatch.submit` calls this method before it returns the handle. If an exception such as KeyboardInterrupt interrupts
        this method, the method stops the run.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            raise LaunchError(with_remedy("the run cannot have a thread of its own", error)) from error
        except BaseException:
            self._interrupt = (signal.SIGINT, InterruptCause.STOP)
            if has_come_up(self._thread):
                self.stop()
            raise

    def _get_result(self) -> RunResult[T] | None:
        """Return the result of the run, or None if the run is not over or has no result."""
        if not self.done():
            return None
        error = self.exception()
        if error is None:
            return self.result()
        return error.result if isinstance(error, RunFailedError) else None


class CallHandle(_Handle[T]):
    """A call that `WorkerGroup.submit` has queued. The handle is a `concurrent.futures.Future` of the RunResult.

    `result()` returns the same result as `WorkerGroup.run`, or raises the same exception. In asyncio, `await handle` gives
    the same result as `handle.result()`. If the call has not begun, `cancel()` removes the call from the queue. If the call
    has begun, `cancel()` returns False. `stop()` ends a call that has begun. Any thread may call any method of the handle.

    Args:
        execute: makes the call in a new thread. It gets the ticket, and a function that it must call when the call begins.
        queue: the queue of the group.
        ranks: the ranks that the call needs.
        check: whether `result` raises an error after a failure.
        is_in_call: returns whether the current thread is inside a call of the group.
    """

    def __init__(
        self,
        execute: Callable[[Ticket, OnStart], RunResult[T]],
        queue: RankQueue,
        ranks: Collection[int],
        *,
        check: bool,
        is_in_call: Callable[[], bool],
    ) -> None:
        self._ticket = Ticket(ranks, self._start)
        super().__init__(partial(execute, self._ticket), check=check, name="mpwatch call")
        self._queue = queue
        self._is_in_call = is_in_call
        self._start_lock = threading.RLock()
        self._is_starting = False
        self._is_decided = False  # whether the call begins or is cancelled

    def cancel(self) -> bool:
        """Remove the call from the queue.

        Return False if the call has begun, is over, or was submitted by another process.
        """
        if os.getpid() != self._pid or not super().cancel():
            return False
        try:
            self._decide()
            self._run = None
            self._release_ranks()
        except BaseException:  # such as Ctrl-C: half of the ranks may have been released
            self._release_ranks()
            raise
        return True

    def stop(self) -> None:
        """Cancel the call if it has not begun. If the call has begun, stop the call, and return when the call is over.

        The ranks of the call get SIGINT, as after Ctrl-C. If the function ends on all ranks of the call within
        `grace_period`, the processes of these ranks stay alive. If the function still runs on a rank after `grace_period`,
        mpwatch stops all ranks of the group, and the next call restarts these ranks. With scope="worker", mpwatch stops only
        the ranks of the call, and restarts a stopped rank when another call needs this rank. A second call of `stop` within
        `grace_period`, from any thread, kills the ranks immediately.

        If `stop` has ended the call, `result()` raises RunFailedError. In a WorkerGroup with `check=False`, `result()`
        instead returns a result with the state STOPPED. If `stop` has cancelled the call, `result()` raises
        concurrent.futures.CancelledError.

        If an observer (`on_event`) of the group calls `stop`, `stop` does not wait for the end of the group's call.

        Raises:
            RuntimeError: the method is called in a fork of the process that owns the group.
        """
        self._check_process("stop")
        if not self.cancel():
            self.interrupt()
            if not self._is_in_call():
                self.wait_for_end()

    def enter_queue(self) -> None:
        """Put the call into the queue of the group.

        `WorkerGroup.submit` calls this method. If an exception such as KeyboardInterrupt interrupts this method, the method
        calls `stop`.
        """
        try:
            self._queue.enter(self._ticket)
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        """Start the thread of the call. The queue calls this method when all ranks that the call needs are free.

        Even if this method is called again, or in two threads at the same time, the thread of the call is started only once.
        """
        with self._start_lock:
            # a signal handler may come here while the thread is being started
            if self._is_starting or has_come_up(self._thread) or self._thread.native_id is not None:
                return
            self._is_starting = True
            try:
                self._thread.start()
                return
            except RuntimeError as error:
                launch_error = LaunchError(with_remedy("the call cannot have a thread of its own", error))
            finally:
                self._is_starting = False
        self._set_outcome(partial(self.set_exception, launch_error))

    def _decide(self) -> bool:
        """Return True if the call can begin, or False if the call was cancelled.

        After this method has returned True, the call can no longer be cancelled. If the call was cancelled, this method
        wakes up the threads that have called `concurrent.futures.wait` with the handle.
        """
        with self._lock:
            if not self._is_decided:
                self._is_decided = True  # first, since it must not be called twice, not even if an exception interrupts it
                self.set_running_or_notify_cancel()
            return not self.cancelled()

    def _begin(self, call: BlockingCall) -> None:
        if not self._decide():
            raise CancelledError
        super()._begin(call)

    def _set_outcome(self, set_it: Callable[[], None]) -> None:
        self._release_ranks()  # first, since a callback of the future may call the group again
        if self._decide():
            super()._set_outcome(set_it)

    def _release_ranks(self) -> None:
        self._queue.leave(self._ticket)

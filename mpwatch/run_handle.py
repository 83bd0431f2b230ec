"""`RunHandle` is the future of a run of `mpwatch.submit`, or of a call of `WorkerGroup.submit`."""

import os
import signal
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Self, TypeVar

from mpwatch.errors import LaunchError, RunFailedError, raise_if_failed
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.processes import wait_for_thread_exit
from mpwatch.results.model import Progress, WorkerState, make_progress
from mpwatch.results.run_result import RunResult
from mpwatch.results.stacks import Stacks
from mpwatch.results.texts import format_count
from mpwatch.watcher import registry
from mpwatch.watcher.caller import Caller, OnStart
from mpwatch.watcher.machine.transitions import InterruptCause
from mpwatch.wire.resource_errors import with_remedy

T = TypeVar("T")
V = TypeVar("V")


class RunHandle(Future[RunResult[T]]):
    """A run that `mpwatch.submit` has started, or a call that `WorkerGroup.submit` has queued.

    The handle is a `concurrent.futures.Future` of the RunResult. `result()` returns the same result as `mpwatch.run` or
    `WorkerGroup.run`, or raises the same exception. In asyncio, `await handle` gives the same result as `handle.result()`.
    If the handle is used in a `with` statement, the end of the block calls `terminate()`.

    Any thread may call any method of the handle. In a fork of the process that owns the run or the call, `terminate`,
    `request_stop`, `progress` and `stacks` raise RuntimeError, and `cancel` returns False.
    """

    # A thread executes the run or the call. It starts when the ranks of the call are free; that of a run starts at once.
    def __init__(
        self,
        execute: Callable[[OnStart], RunResult[T]],  # must call its argument with each new Caller
        ranks: Collection[int] = (),
        *,
        check: bool,
        is_in_call: Callable[[], bool] = lambda: False,  # whether the current thread is inside a call of the group
    ) -> None:
        super().__init__()
        registry.prepare()
        self._run: Callable[[OnStart], RunResult[T]] | None = execute  # None: it has begun, or never will
        self._ranks = ranks
        self._check = check
        self._is_in_call = is_in_call
        self._lock = threading.RLock()  # a signal handler may cancel or end the call
        self._call: Caller | None = None  # from the start of the ranks until the run is over
        self._is_decided = False  # whether the call begins or is cancelled
        self._is_interrupted = False  # perhaps before there is a `_call`
        self._stop_cause = ""  # of the first request to stop; empty: there was none
        self._started_at = 0.0
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._execute, name="mpwatch call", daemon=True)

    def terminate(self) -> None:
        """End the run or the call now, and return when it is over. If it is over already, do nothing.

        A call that has not begun is cancelled, and `result()` then raises concurrent.futures.CancelledError. Otherwise the
        ranks get SIGINT, as after Ctrl-C. A second call of `terminate` within `grace_period`, from any thread, sends SIGKILL
        immediately. When `terminate` has ended a run or a call, `result()` raises RunFailedError. With `check=False`, it
        returns a result with the state STOPPED.

        In a run, a rank that has not ended after `grace_period` gets SIGKILL. When `terminate` returns, all ranks and
        threads of the run have ended.

        In a call of a WorkerGroup, the processes of the ranks stay alive if the function ends on all ranks of the call
        within `grace_period`. Otherwise mpwatch stops all ranks of the group, and the next call restarts them. With
        scope="worker", mpwatch stops only the ranks of the call, and restarts a rank when another call needs it.

        If an observer (`on_event`) of the run or of the group calls `terminate`, the method does not wait.
        """
        self._check_process("terminate")
        if not self.cancel():
            self._interrupt()
            if not self._is_in_call():
                self._wait_for_end()

    def cancel(self) -> bool:
        """Remove a call of a WorkerGroup from the queue.

        Return True if the call has not begun, and now never will. Return False if the call has begun or is over. For a run,
        `cancel` always returns False, because the run has begun when `mpwatch.submit` returns.
        """
        if os.getpid() != self._pid or not super().cancel():
            return False
        self._decide()
        self._run = None
        return True

    def request_stop(self) -> None:
        """Ask the ranks to save their state, and to return from their function.

        After a call of `request_stop`, `should_stop` returns True on all ranks at the same step. This method does not wait
        for the ranks. If the ranks have not begun to run the function, they stop before their first step. If the run or the
        call is over, `request_stop` does nothing.
        """
        self._check_process("request_stop")
        self._ask_to_stop("request_stop() of its handle")

    def stacks(self) -> Stacks:
        """Return the present stacks of each rank, as `WorkerGroup.stacks` does.

        The returned dict is empty before the ranks are started, before a call begins, and when the run or the call is over.
        """
        self._check_process("stacks")
        call = self._call
        stacks = Stacks() if call is None else call.watcher.take_stacks()
        return Stacks(self._select(stacks), self._select(stacks.collectives), stacks.verdict)

    def progress(self) -> dict[int, Progress]:
        """Return what each rank passed to its last call of `mpwatch.report()`. The keys of the dict are the global ranks.

        Ranks that have not called `mpwatch.report` in this run or call are missing in the returned dict.
        """
        self._check_process("progress")
        if (result := self._get_result()) is not None:
            return dict(result.progress)
        call = self._call
        statuses = () if call is None else call.watcher.take_statuses()
        reports = self._select({status.rank: status.report for status in statuses})
        return {
            rank: make_progress(report, self._started_at)
            for rank, report in reports.items()
            if report is not None and report.at >= self._started_at  # not of an earlier call of the rank
        }

    @property
    def state(self) -> WorkerState:
        """The state of the run: INIT until all ranks are ready, and after that HEALTHY or UNHEALTHY.

        The state of a call is INIT until the call begins. While the call runs, its state is the state of its WorkerGroup.

        When the run or the call is over, its state is the state of the result, or FAILED if there is no result. The state of
        a cancelled call is STOPPED.
        """
        if self.done():
            result = self._get_result()
            no_result = WorkerState.STOPPED if self.cancelled() else WorkerState.FAILED
            return no_result if result is None else result.state
        call = self._call
        state = WorkerState.UNKNOWN if call is None else call.watcher.loop.state
        return WorkerState.INIT if state is WorkerState.UNKNOWN else state

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The identity of each rank, as a Worker. The tuple is empty until the ranks are started, or until a call begins.

        In a run on several nodes, `workers` is empty until the end of the run.
        """
        if (result := self._get_result()) is not None:
            return tuple(result.workers)
        call = self._call
        workers = () if call is None else call.watcher.workers
        return tuple(self._select({worker.rank: worker for worker in workers}).values())

    def __repr__(self) -> str:
        return f"<RunHandle {self.state.name}: {format_count(len(self.workers), 'rank')}>"

    def _repr_html_(self) -> str:
        from mpwatch.results.html import make_table

        if (result := self._get_result()) is not None:
            return result._repr_html_()
        steps = [(f"rank {rank}", f"step {report.step}") for rank, report in self.progress().items()]
        return make_table(repr(self)[1:-1], steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() == self._pid:  # not a fork that leaves the `with` block, too
            self.terminate()

    def __await__(self) -> Generator[Any, None, RunResult[T]]:
        import asyncio  # takes time, and most programs do not use it

        return asyncio.wrap_future(self).__await__()

    def _interrupt(self) -> None:
        with self._lock:
            self._is_interrupted = True
            if (call := self._call) is not None:
                call.signals.post_interrupt(signal.SIGINT, InterruptCause.STOP)

    def _ask_to_stop(self, cause: str) -> bool:
        """Return False if the call is over."""
        with self._lock:
            self._stop_cause = self._stop_cause or cause
            call = self._call
            return not self.done() if call is None else call.signals.request_stop(cause)

    def _wait_for_end(self) -> None:
        """Wait for the result and for the end of the thread. A callback in the thread itself does not wait."""
        if threading.current_thread() is self._thread:
            return
        wait([self])
        if self._thread.native_id is not None:  # the thread was started
            self._thread.join()
            wait_for_thread_exit(self._thread.native_id)

    def _start(self) -> None:
        """Start the thread, once. The queue calls this when the ranks are free, maybe again and in two threads."""
        with self._lock:
            if self._thread.native_id is not None:
                return
            try:
                self._thread.start()
                return
            except RuntimeError as error:
                launch_error = LaunchError(with_remedy("the call cannot have a thread of its own", error))
        if self._decide():
            self.set_exception(launch_error)

    def _execute(self) -> None:
        run, self._run = self._run, None
        if run is None or not self._decide():  # cancelled
            return
        self._started_at = monotonic()
        try:
            try:
                result = run(self._begin)
                if self._check:
                    raise_if_failed(result)
            finally:
                self._call = None
        except BaseException as error:  # noqa: BLE001  `result` raises it
            self.set_exception(error)
        else:
            self.set_result(result)

    def _decide(self) -> bool:
        """Return whether the call begins. If it does not, wake up the threads in `concurrent.futures.wait`."""
        with self._lock:
            if not self._is_decided:
                self._is_decided = True  # first, since it must not be called twice, not even if an exception interrupts it
                self.set_running_or_notify_cancel()
            return not self.cancelled()

    def _begin(self, call: Caller) -> None:
        with self._lock:
            self._call = call
            if self._is_interrupted:
                self._interrupt()
            elif self._stop_cause:
                call.signals.request_stop(self._stop_cause)

    def _select(self, by_rank: Mapping[int, V]) -> dict[int, V]:
        ranks = self._ranks or by_rank
        return {rank: value for rank, value in by_rank.items() if rank in ranks}

    def _get_result(self) -> RunResult[T] | None:
        if not self.done() or self.cancelled():
            return None
        error = self.exception()
        if error is None:
            return self.result()
        return error.result if isinstance(error, RunFailedError) else None

    def _check_process(self, method: str) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"{method}() was called in a fork of the process that owns this run")

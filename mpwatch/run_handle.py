"""`RunHandle`: a run in a thread of its own, as a future."""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from mpwatch.errors import LaunchError, RunFailedError, raise_if_failed
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.processes import wait_for_thread_exit
from mpwatch.results.model import Progress, WorkerState
from mpwatch.results.report import format_stopped_by_caller
from mpwatch.results.run_result import RunResult
from mpwatch.results.stacks import Stacks
from mpwatch.watcher.run import BlockingCall
from mpwatch.watcher.watcher_thread import has_come_up
from mpwatch.wire.resource_errors import with_remedy

T = TypeVar("T")


class RunHandle(Future[RunResult[T]]):
    """A run that `mpwatch.submit` has started: a `concurrent.futures.Future` of its RunResult.

    `result()` returns or raises as `mpwatch.run` does. `await handle` works in asyncio. `cancel()` returns False, as for any
    call that has begun; `stop()` ends the run. At the end of a `with` block the run is stopped if it has not ended. Any
    thread may call any method.
    """

    def __init__(self, run: Callable[[Callable[[BlockingCall], object]], RunResult[T]], *, check: bool) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._run = run
        self._check = check
        self._lock = threading.Lock()
        self._call: BlockingCall | None = None  # from the start of the ranks until the run is over
        self._is_stopped = False
        self._pid = os.getpid()
        self._submitted_at = time.monotonic()
        self._thread = threading.Thread(target=self._execute, name="mpwatch run", daemon=True)

    def stop(self) -> None:
        """Stop the run, and return when no rank and no thread of it is left. If it is over, only wait for its thread.

        The ranks get SIGINT, as at Ctrl-C, and SIGKILL after `grace_period`. A second `stop` before that sends SIGKILL at
        once: from another thread, or after Ctrl-C has ended the first one. `result()` then raises RunFailedError, or returns
        a result of the state STOPPED with `check=False`.

        An observer of the run may call it, too. Then it only asks for the end, and returns at once.

        Raises:
            RuntimeError: it is called in a fork of the process that owns the run.
        """
        self._check_process("stop")
        with self._lock:
            self._is_stopped = True
            if self._call is not None:
                self._call.signals.post_interrupt(signal.SIGINT)
        if threading.current_thread() is not self._thread:
            wait([self])
            self._thread.join()
            if self._thread.native_id is not None:  # the thread was started
                wait_for_thread_exit(self._thread.native_id)

    def stacks(self) -> Stacks:
        """Return where each rank is now, as `WorkerGroup.stacks` does. The ranks go on. Empty before and after the run.

        Raises:
            RuntimeError: it is called in a fork of the process that owns the run.
        """
        self._check_process("stacks")
        call = self._call
        return Stacks() if call is None else call.watcher_thread.take_stacks()

    def progress(self) -> dict[int, Progress]:
        """Return the last `mpwatch.report()` of each rank, by global rank. Ranks that have not reported are missing.

        Raises:
            RuntimeError: it is called in a fork of the process that owns the run.
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
        """The state of all ranks together: INIT until all are ready, then HEALTHY or UNHEALTHY.

        When the run is over it is the state of the result, or FAILED if there is none.
        """
        if self.done():
            result = self._get_result()
            return WorkerState.FAILED if result is None else result.state
        call = self._call
        state = WorkerState.UNKNOWN if call is None else call.watcher_thread.commands.state
        return WorkerState.INIT if state is WorkerState.UNKNOWN else state

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The identities of the ranks. Empty until they are started. On several nodes: until the run is over."""
        if (result := self._get_result()) is not None:
            return tuple(result.workers)
        call = self._call
        return () if call is None else call.watcher_thread.workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() == self._pid:  # not a fork that leaves the `with` block, too
            self.stop()

    def __await__(self) -> Generator[Any, None, RunResult[T]]:
        import asyncio  # takes time, and most programs do not use it

        return asyncio.wrap_future(self).__await__()

    def start(self) -> None:
        """Start the run. `mpwatch.submit` has done so. Raises LaunchError if Python can start no thread.

        An exception that is thrown into this thread meanwhile, as by Ctrl-C, ends the run.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            raise LaunchError(with_remedy("the run cannot have a thread of its own", error)) from error
        except BaseException:
            self._is_stopped = True
            if has_come_up(self._thread):
                self.stop()
            raise

    def _execute(self) -> None:
        try:
            result = self._run(self._begin)
            if result.state is WorkerState.STOPPED and self._is_stopped:
                result = replace(result, reason=format_stopped_by_caller())
            if self._check:
                raise_if_failed(result)
        except BaseException as error:  # noqa: BLE001  `result` raises it
            self._call = None
            self.set_exception(error)
        else:
            self._call = None
            self.set_result(result)

    def _begin(self, call: BlockingCall) -> None:
        with self._lock:
            self._call = call
            if self._is_stopped:
                call.signals.post_interrupt(signal.SIGINT)

    def _get_result(self) -> RunResult[T] | None:
        """Return the result of a run that is over. None: it is not over, or has none."""
        if not self.done():
            return None
        error = self.exception()
        if error is None:
            return self.result()
        return error.result if isinstance(error, RunFailedError) else None

    def _check_process(self, method: str) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"{method}() was called in a fork of the process that owns this run")

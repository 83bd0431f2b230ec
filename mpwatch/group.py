"""`WorkerGroup`: ranks that stay, for as many calls as one likes."""

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, Self, TypeVar

from mpwatch.errors import raise_if_failed
from mpwatch.live_view.select import view_for
from mpwatch.options.log_spec import LogSpec
from mpwatch.options.spec import GroupSpec, Nprocs, Observers, check_call
from mpwatch.options.validation import check_flag, check_seconds
from mpwatch.options.worker_info import Worker
from mpwatch.results.html import group_table
from mpwatch.results.model import WorkerState
from mpwatch.results.report import summary_of
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.persistent_ranks import PersistentRanks

T = TypeVar("T")
R = TypeVar("R")


class WorkerGroup:
    """`nprocs` processes that stay, and in which functions can be called, one after another, each in all of them.

    A call costs a fraction of a millisecond, not a start-up: modules stay imported, `current_worker().state` keeps what a
    function puts there, and so does the process group of `backend`. The ranks are started when the group is made; use it
    in a `with` statement, or `close` it. One that is forgotten ends with its last reference, or with the program.

    It may be made in one thread and used in another. Calls take turns.

    Args:
        nprocs: number of ranks, as for `mpwatch.run`, like all options.
        backend: of torch.distributed: the default process group is made before the first function is called, and kept. It
            is made anew after a call that failed, since the ranks may be out of step.
        env: extra environment variables for the ranks, or a function that gives them for a Worker.
        timeout: seconds for each call, unless `run` is given another limit, then RunTimeoutError. None: no limit.
        heartbeat_timeout: seconds that a rank may go without `mpwatch.heartbeat()` or `mpwatch.report()` in a call, from its
            first one on. None: no limit.
        grace_period: seconds that a rank has between SIGTERM and SIGKILL when it is stopped, for answering when it is
            interrupted by Ctrl-C, and for ending after `close`.
        start_timeout: seconds that an interpreter may take to start.
        role: name of this kind of worker.
        logs: where the ranks' stdout and stderr go: see LogSpec. None: they have the caller's own; in a notebook they are
            captured, and shown in the cell that runs.
        on_event: a function, or several, called with each `mpwatch.Event` by the thread that waits for a call, or `close`.
        progress: a live view of each call, as for `mpwatch.run`.
        check: False: `run` returns the result of a failed call instead of raising.

    Raises:
        LaunchError: the ranks could not be started; none is left.
        TypeError, ValueError: an argument is not what it should be.
    """

    def __init__(
        self,
        nprocs: Nprocs = "auto",
        *,
        backend: str | None = None,
        env: Mapping[str, str] | Callable[[Worker], Mapping[str, str]] | None = None,
        timeout: float | None = None,
        heartbeat_timeout: float | None = None,
        grace_period: float = 10.0,
        start_timeout: float = 300.0,
        role: str = "default",
        logs: LogSpec | None = None,
        on_event: Observers | None = None,
        progress: bool | None = None,
        check: bool = True,
    ) -> None:
        check_flag("check", check)
        self._check = check
        self._spec = GroupSpec(
            nprocs=nprocs,
            backend=backend,
            env=env,
            timeout=timeout,
            heartbeat_timeout=heartbeat_timeout,
            grace_period=grace_period,
            start_timeout=start_timeout,
            role=role,
            logs=logs,
            on_event=on_event,
            progress=progress,
        )
        self._pid = os.getpid()
        self._turn = threading.RLock()  # other threads wait for it
        self._call = threading.Lock()  # for which its own thread would wait for ever
        self._is_closed = False
        self._team = PersistentRanks(self._spec, partial(view_for, progress))
        # Multiprocessing, which would wait for the ranks for ever, calls this first; in processes of its own, too, which
        # know no atexit.
        self._at_end = Finalize(None, self._team.end_with_program, exitpriority=10)
        self._finalizer = weakref.finalize(self, _forget, self._team, self._at_end, self._pid)
        self._finalizer.atexit = False
        try:
            self._team.start()
        except BaseException as error:
            self._close(summary_of(error))
            raise

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> RunResult[T]:
        """Call `fn(*args, **kwargs)` in every rank, and return what they returned: as `mpwatch.run`, but the ranks stay.

        If a rank raises, the others may finish within a second, and if they do, all stay as they are. Those that do not
        are stopped, as they are when a rank dies or hangs; then the next call starts all ranks anew, without what
        `current_worker().state` held, and logs a warning that says why. A rank that dies between two calls is noticed
        when it happens, with the same consequence.

        Args:
            fn: see `mpwatch.run`.
            args: positional arguments, the same for every rank.
            kwargs: keyword arguments.
            timeout: seconds for this call, then RunTimeoutError. None: what the group has been given for each.

        Returns:
            The values by rank.

        Raises:
            RunFailedError: a rank failed; raised from that rank's own exception.
            RunTimeoutError: `timeout` ran out.
            LaunchError: the function or its arguments cannot be sent, and the ranks are as they were; or the ranks had to
                be started anew, and could not be.
            TypeError, ValueError: an argument is not what it should be.
            RuntimeError: the group is closed, or is that of another process, or this is called from within a call of it.
            KeyboardInterrupt: Ctrl-C; the ranks got it too, and stay if all of them answered within grace_period.
        """
        __tracebackhide__ = True  # as in mpwatch.run
        check_call(fn, args, kwargs)
        if timeout is None:
            timeout = self._spec.timeout
        else:
            check_seconds("timeout", timeout, at_least="more than 0")
        return self._in_turn("run", partial(self._run, fn, tuple(args), dict(kwargs or {}), timeout))

    def close(self) -> None:
        """End the ranks, as any Python program ends, and wait for that. Nothing if they have been ended.

        One that does not end within `grace_period` is stopped. Raises RuntimeError in a process that is not the group's.
        """
        self._in_turn("close", self._close)

    @property
    def state(self) -> WorkerState:
        """INIT until all ranks are ready, then HEALTHY; UNHEALTHY if they must be started anew, which the next call does, or
        while one is late with its heartbeat; STOPPED once the group is closed.
        """
        return WorkerState.STOPPED if self._is_closed else self._team.state

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Who the ranks are; `restart_count` says how often they have been started anew."""
        return self._team.workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() == self._pid:  # and this is not a fork that leaves the block, too
            self.close()

    def __repr__(self) -> str:
        return f"<WorkerGroup {self.state.name}: {self._spec.nprocs} ranks>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return group_table(self.state, self.workers, self._spec.backend)

    def _run(
        self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None
    ) -> RunResult[T]:
        __tracebackhide__ = True
        if self._is_closed:
            raise RuntimeError("this WorkerGroup is closed; make another one")
        result = self._team.call(fn, args, kwargs, timeout)
        if self._check:
            raise_if_failed(result)
        return result

    def _close(self, reason: str = "") -> None:
        self._is_closed = True
        try:
            self._team.close()
        finally:
            if not self._team.has_ranks:  # else something was thrown before that began: they have yet to be ended
                self._finalizer.detach()
                self._at_end.cancel()
                self._team.tell_end(reason)

    def _in_turn(self, what: str, do: Callable[[], R]) -> R:
        __tracebackhide__ = True
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{what}() was called in a fork of the process that the WorkerGroup belongs to; make one there"
            )
        with self._turn:
            if self._call.locked():
                raise RuntimeError(f"{what}() was called by something that a call of the same WorkerGroup has called")
            with self._call:
                return do()


def _forget(team: PersistentRanks, at_end: Finalize, pid: int) -> None:
    if os.getpid() == pid:  # and this is not the end of a fork
        at_end.cancel()
        team.forget()
        # last, since it is raised where warnings are errors
        warnings.warn("a WorkerGroup was not closed; its ranks are told to end", ResourceWarning, stacklevel=2)

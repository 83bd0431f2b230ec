"""A `WorkerGroup` has ranks that stay alive for any number of calls."""

import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.util import Finalize, is_exiting
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, TypeVar, Unpack

from mpwatch.errors import raise_if_failed
from mpwatch.live_view.select import select_view
from mpwatch.options.per_rank import check_ranks, spread_per_rank
from mpwatch.options.spec import GroupOptions, Nprocs, PersistentGroupSpec, check_call
from mpwatch.options.validation import check_flag, check_seconds, refuse_unknown
from mpwatch.options.worker_info import Worker
from mpwatch.results.failure import summarize_exception
from mpwatch.results.model import WorkerState
from mpwatch.results.run_result import RunResult
from mpwatch.results.stacks import Stacks
from mpwatch.results.texts import format_count
from mpwatch.watcher.caller import OnStart
from mpwatch.watcher.group_ranks import GroupCall, GroupRanks
from mpwatch.watcher.host_check import check_host
from mpwatch.watcher.rank_queue import RankQueue, Ticket

if TYPE_CHECKING:
    from mpwatch.run_handle import RunHandle

T = TypeVar("T")
R = TypeVar("R")


class WorkerGroup:
    """A group of `nprocs` processes that stay alive.

    A call of the group runs a function in all of its processes, or in some of them.

    A call adds less than a millisecond to the time of the function, because no process is started for the call. Imported
    modules, `current_worker().state` and torch's process group are kept between calls. The ranks are started when the group
    is made. Use the group in a `with` statement, or call its method `close` at the end. If a group is not closed, its ranks
    end when the last reference to the group is gone, or when the program ends.

    While the main thread waits for a call, Ctrl-Z (SIGTSTP) suspends the calling process and the ranks until SIGCONT resumes
    them. The time for which Ctrl-Z suspends the ranks does not count towards `timeout` and the other time limits. Between
    calls, Ctrl-Z does not suspend the ranks.

    A group can be made in one thread and used in another thread. Calls that need the same rank run one after another, in the
    order in which they were made. Several threads can call `run` and `submit` at the same time. Calls that use different
    ranks run at the same time.

    Args:
        nprocs: number of ranks, as for `mpwatch.run`.
        preload: names of modules that the ranks import as soon as they have started, in this order, while the caller goes
            on. For example, the first call then does not wait for `import torch`, which takes a second of CPU time on each
            rank. If an import raises, the first call fails with that exception.
        scope: with "group", the loss of a rank stops all ranks, and the next call restarts all ranks. Ranks that communicate
            need this value. With "worker", the loss of a rank ends its call and stops the other ranks of that call. All
            other ranks go on. The next call that needs a lost rank restarts that rank. "worker" cannot be combined with
            `backend`.
        check: False means that `run` returns the result of a failed call, and raises no RunFailedError.
        options: these options of `mpwatch.run`: `backend`, `env`, `timeout`, `heartbeat_timeout`, `grace_period`, `stop`,
            `placement`, `logs`, `progress`, `on_event`, `on_progress` and `debug`. The limits hold for each call, and
            `grace_period` also for the exit of the ranks after `close`. A call of all ranks makes the process group of
            `backend`, and the ranks keep it. After a failed call of all ranks, the next one makes a new process group,
            because the ranks may be in different collectives. A call of some ranks makes none. The functions in `on_event`
            and `on_progress` are called in the thread that waits for a call or for `close`.

    Raises:
        LaunchError: the ranks could not be started, and no rank is left.
        TypeError, ValueError: an argument is not valid.
    """

    def __init__(
        self,
        nprocs: Nprocs,
        *,
        preload: Sequence[str] = (),
        scope: Literal["group", "worker"] = "group",
        check: bool = True,
        **options: Unpack[GroupOptions],
    ) -> None:
        check_flag("check", check)
        self._check = check
        refuse_unknown("WorkerGroup", options, GroupOptions.__annotations__)
        self._spec = PersistentGroupSpec(nprocs=nprocs, preload=preload, scope=scope, **options)
        check_host()
        self._pid = os.getpid()
        self._queue = RankQueue(len(self._all_ranks))
        self._handles: set[RunHandle[Any]] = set()  # of calls of `submit` that are not over
        self._call_lock = _LockOfThread()  # not reentrant, so that a call within a call of the same thread is noticed
        self._ranks = GroupRanks(self._spec, partial(select_view, self._spec.progress))
        # Called when the group is deleted, and at the end of the program: before multiprocessing joins its children without
        # a limit, and also in processes of multiprocessing, which do not run atexit functions. Not in a fork.
        self._finalizer = Finalize(self, _end_unclosed_group, (self._handles, self._ranks), exitpriority=10)
        try:
            self._ranks.start()
        except BaseException as error:
            self._close(summarize_exception(error))
            raise

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        ranks: SupportsIndex | Iterable[SupportsIndex] | None = None,
    ) -> RunResult[T]:
        """Call `fn(*args, **kwargs)` in every rank and return the results, as `mpwatch.run` does. The ranks stay alive.

        If a rank raises an exception, the other ranks of the call have one second to finish. If all ranks of the call finish
        within one second after the exception, all ranks of the group stay alive. If a rank of the call still runs the
        function one second after the exception, mpwatch stops all ranks and ends all running calls of the group. All ranks
        are also stopped if a rank hangs, or if a rank dies during a call or between two calls. If all ranks were stopped,
        the next call restarts the ranks, and mpwatch logs a warning that says why. Restarted ranks have an empty
        `current_worker().state`. With scope="worker", only the ranks of the failed call are stopped and restarted.

        Args:
            fn: see `mpwatch.run`.
            args: positional arguments, the same for every rank, except those that are a PerRank.
            kwargs: keyword arguments.
            timeout: limit for this call in seconds, from its beginning. None means the `timeout` of the group.
            ranks: the rank or the ranks to call. None means all ranks. The process group of `backend` contains all ranks. A
                call of some ranks uses the one that is there, and makes none, so call all ranks once before: at first, and
                when a call of all ranks has failed or a rank was lost. For collectives of some ranks, make another group
                with `torch.distributed.new_group`, in a call of all ranks. A PerRank has a value for each rank of the group,
                or for each rank that is called, in ascending order.

        Returns:
            The return values by rank.

        Raises:
            RunFailedError: a rank failed. `__cause__` is the rank's own exception.
            RunTimeoutError: `timeout` was exceeded.
            LaunchError: the function or its arguments cannot be pickled (then the ranks stay alive), or lost ranks could
                not be restarted.
            TypeError, ValueError: an argument is not valid, or fn does not take these args and kwargs.
            RuntimeError: the group is closed, or belongs to another process. Or the call is made within a call of the group.
            KeyboardInterrupt: the user pressed Ctrl-C. The ranks received SIGINT, too. The ranks stay alive if all of them
                answer SIGINT within grace_period.
        """
        __tracebackhide__ = True  # as in mpwatch.run
        call = self._prepare_call(fn, args, kwargs, timeout, ranks)
        result = self._run_exclusively("run", call.ranks, partial(self._ranks.call, call))
        if self._check:
            raise_if_failed(result)
        return result

    def submit(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        ranks: SupportsIndex | Iterable[SupportsIndex] | None = None,
    ) -> "RunHandle[T]":
        """Add a call to the group's queue, and return at once. A new thread runs the call when its ranks are free.

        Do not change the arguments before the call begins, because mpwatch pickles the arguments when the call begins. If
        two calls run at the same time, the thread of one call can pass events of the other call to `on_event`. A submitted
        call has no live view, and Ctrl-C does not stop the call. When the program ends, mpwatch stops the ranks, and does
        not wait for submitted calls.

        Args:
            fn: the function. All arguments mean the same as in `run`.
            args: positional arguments.
            kwargs: keyword arguments.
            timeout: limit for this call in seconds, from its beginning.
            ranks: the rank or the ranks to call. None means all ranks.

        Returns:
            A RunHandle, which is a `concurrent.futures.Future` of the RunResult. It can also end and inspect the call.

        Raises:
            TypeError, ValueError: an argument is not valid, or fn does not take these args and kwargs.
            RuntimeError: the group is closed, or belongs to another process.
        """
        from mpwatch.run_handle import RunHandle  # imports concurrent.futures

        __tracebackhide__ = True
        call = self._prepare_call(fn, args, kwargs, timeout, ranks)
        self._check_process("submit")
        self._ranks.check_open()

        def execute(on_start: OnStart) -> RunResult[T]:
            with self._call_lock.lock:
                return self._ranks.call(call, on_start)

        handle: RunHandle[T] = RunHandle(execute, call.ranks, check=self._check, is_in_call=self._call_lock.is_locked)
        queue, ticket = self._queue, Ticket(call.ranks, handle._start, handle.done)
        handle.add_done_callback(lambda _: queue.update())  # first, since another callback may call the group again
        self._handles.add(handle)
        handle.add_done_callback(self._handles.discard)
        try:
            queue.enter(ticket)
        except BaseException:
            handle.terminate()
            raise
        return handle

    def close(self) -> None:
        """Ask the ranks to exit normally, and wait until they have exited. A second `close` does nothing.

        Submitted calls that have not begun are cancelled. `close` waits for running calls. If a rank has not exited after
        `grace_period`, mpwatch sends SIGTERM to the rank. Raises RuntimeError in a fork of the process that made the group,
        or within a call of the group.
        """
        self._check_caller("close")
        handles = list(self._handles)
        for handle in handles:
            handle.cancel()
        self._run_exclusively("close", self._all_ranks, self._close)
        for handle in handles:
            handle._wait_for_end()

    def stacks(self) -> Stacks:
        """Return the stacks of all threads of each rank, which show where the rank is now. The ranks go on.

        Any thread can call `stacks`, both while a call runs and between calls. An `on_event` function of this group can call
        `stacks`, too. `stacks` takes a few milliseconds, or at most 0.2 s if a rank does not answer. `print(group.stacks())`
        prints equal stacks only once, with the numbers of all ranks that have these stacks. To request the stacks of a rank,
        mpwatch sends a signal to the rank. If this signal interrupts a system call in the rank (EINTR), Python repeats the
        system call.

        Returns:
            The stacks by global rank, in the format of `RunResult.stacks`. If a rank runs no function, or does not answer,
            the text is a line that says so. The dict is empty if the next call has to restart the ranks.

        Raises:
            RuntimeError: the group is closed, or belongs to another process.
        """
        self._check_process("stacks")
        self._ranks.check_open()
        return self._ranks.take_stacks()

    @property
    def state(self) -> WorkerState:
        """The state of the group: INIT until all ranks are ready, then HEALTHY, and STOPPED after `close`.

        The state is UNHEALTHY if the next call must restart the ranks, or if the heartbeat of a rank is late.
        """
        return self._ranks.state

    @property
    def workers(self) -> tuple[Worker, ...]:
        """A tuple with one Worker for each rank. `restart_count` of a Worker says how often its rank was restarted."""
        return self._ranks.workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() == self._pid:  # not a fork that leaves the `with` block, too
            if error is not None:  # nobody waits for the calls any more
                begun = [handle for handle in list(self._handles) if not handle.cancel()]
                for handle in begun:  # not before: its end lets the next one begin
                    handle._interrupt()
            self.close()

    def __repr__(self) -> str:
        return f"<WorkerGroup {self.state.name}: {format_count(len(self.workers), 'rank')}>"

    @property
    def _all_ranks(self) -> range:
        return range(int(self._spec.nprocs))

    def _prepare_call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float | None,
        ranks: SupportsIndex | Iterable[SupportsIndex] | None,
    ) -> GroupCall:
        __tracebackhide__ = True
        check_call(fn, args, kwargs)
        called = check_ranks(ranks, len(self._all_ranks))
        arguments = spread_per_rank(args, kwargs or {}, called, len(self._all_ranks))
        if timeout is None:
            timeout = self._spec.timeout
        else:
            check_seconds("timeout", timeout, at_least="more than 0")
        return GroupCall(fn, *arguments, timeout, called)

    def _close(self, reason: str = "") -> None:
        try:
            self._ranks.close()
        finally:
            if not self._ranks.has_ranks:  # otherwise an exception came before they were asked to exit
                self._finalizer.cancel()
                self._ranks.publish_run_ended(reason)

    def _run_exclusively(self, method: str, ranks: Collection[int], action: Callable[[], R]) -> R:
        """Wait until the ranks are free, and call `action` while they are reserved."""
        __tracebackhide__ = True
        self._check_caller(method)
        ticket = Ticket(ranks)
        try:
            with self._call_lock.lock:
                self._queue.enter(ticket)
                ticket.wait()
                return action()
        finally:
            ticket.has_left = True  # if an exception prevents the rest, the call is in nobody's way
            self._queue.update()

    def _check_caller(self, method: str) -> None:
        __tracebackhide__ = True
        self._check_process(method)
        if self._call_lock.is_locked():
            raise RuntimeError(
                f"{method}() was called within a call of the same WorkerGroup; call it when that call has returned"
            )

    def _check_process(self, method: str) -> None:
        __tracebackhide__ = True
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{method}() was called in a fork of the process that owns this WorkerGroup; make another group in the fork"
            )


class _LockOfThread(threading.local):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def is_locked(self) -> bool:
        return self.lock.locked()


def _end_unclosed_group(handles: "set[RunHandle[Any]]", ranks: GroupRanks) -> None:
    if is_exiting():
        for handle in list(handles):
            handle.cancel()
        ranks.shut_down_at_exit()
    else:
        ranks.shut_down_in_background()
        # This comes last, since it raises where warnings are errors.
        warnings.warn("a WorkerGroup was not closed; its ranks are asked to exit", ResourceWarning, stacklevel=2)

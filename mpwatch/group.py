"""`WorkerGroup`: ranks that stay alive for any number of calls."""

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, TypeVar

from mpwatch.errors import raise_if_failed
from mpwatch.live_view.select import select_view
from mpwatch.options.log_spec import LogSpec
from mpwatch.options.per_rank import check_ranks, spread_per_rank
from mpwatch.options.spec import Bind, Nprocs, Observers, PersistentGroupSpec, VisibleDevices, check_call
from mpwatch.options.validation import check_flag, check_seconds
from mpwatch.options.worker_info import Worker
from mpwatch.results.failure import summarize_exception
from mpwatch.results.model import WorkerState
from mpwatch.results.report import format_count
from mpwatch.results.run_result import RunResult
from mpwatch.results.stacks import Stacks
from mpwatch.watcher.persistent_ranks import OnStart, PersistentRanks
from mpwatch.watcher.rank_queue import RankQueue, Ticket

if TYPE_CHECKING:
    from mpwatch.run_handle import CallHandle

T = TypeVar("T")
R = TypeVar("R")


class WorkerGroup:
    """`nprocs` processes that stay alive. Each call runs a function in all of them.

    A call takes less than a millisecond, since no process is started for it. Imported modules, `current_worker().state`
    and the process group of `backend` are kept between calls. The ranks are started when the group is made. Use the group
    in a `with` statement, or `close` it. The ranks of a group that was not closed are ended with its last reference, or at
    the end of the program.

    Ctrl-Z (SIGTSTP) suspends the ranks together with this process until SIGCONT, if the main thread waits for a call. No
    limit counts that time. Between calls this process stops alone.

    A group may be made in one thread and used in another. Calls from several threads, and those of `submit`, run one after
    another if they need the same rank, in the order in which they came. Calls of different ranks run at the same time.

    Args:
        nprocs: number of ranks, as for `mpwatch.run`, like all options.
        backend: backend of torch.distributed. The default process group is made before the first call and kept. After a call
            that failed a new one is made, since the ranks may be in different collectives.
        env: extra environment variables for the ranks, or a function that returns them for a Worker.
        timeout: limit for each call in seconds, unless `run` sets another one. None: no limit.
        heartbeat_timeout: seconds without `mpwatch.heartbeat()` or `mpwatch.report()` in a call, counted from the rank's
            first one. None: no limit.
        grace_period: seconds between SIGTERM and SIGKILL when a rank is stopped. A rank has the same time to answer after
            Ctrl-C, and to exit after `close`.
        start_timeout: limit in seconds for the start of an interpreter.
        role: name of this kind of worker.
        logs: where stdout and stderr of the ranks go. See LogSpec. None: to the caller's stdout and stderr. In a notebook
            None means that the output is captured and shown in the calling cell.
        on_event: a function or several functions, called with each `mpwatch.Event` in the thread that waits for a call or
            for `close`. A function that raises is dropped, as for `mpwatch.run`.
        progress: live view of each call, as for `mpwatch.run`.
        capture_locals: True: the frames of a rank's exception have the text of their local variables. Debuggers (`%debug`,
            `pdb.post_mortem`), pytest's `-l` and `traceback.TracebackException(capture_locals=True)` show them. The rank
            makes the texts with `repr`, and waits one second for them. A text has 2,000 characters at most, and a frame
            100 variables. False is the default because variables can hold secrets.
        post_mortem: True: if a rank raises an exception, a prompt of pdb opens where it was raised, before any rank is
            stopped. The other ranks run or wait meanwhile, and `rank N` shows the stack and the variables of another
            rank. When the prompt is left (`q`), the run fails as without it. It needs a terminal or a notebook. Elsewhere it
            has no effect.
        stall_after: seconds. If ranks have waited so long in a collective of torch.distributed for a rank that has not
            joined it, mpwatch logs one warning that names that rank, and goes on; if that rank has returned, the run
            ends. If ranks call different collectives with the same number, the run ends within a few seconds
            (FailureKind.MISMATCH). None: none of this.
        backend_timeout: limit in seconds for each collective of the process group that `backend` makes. None: torch's
            default, which is 30 minutes for gloo and 10 for nccl.
        stop_signals: signals to this process that ask the ranks of a call to save and return, as for `mpwatch.run`. They do
            so while the main thread is in `run`. At any other time, such as during a call of `submit`, a signal does what it
            does in the program.
        stop_timeout: seconds from a request to stop until the ranks of the call must have returned. None: no limit.
        preload: names of modules that the ranks import as soon as they have started, in this order, while the caller goes
            on. So the first call does not wait for `import torch`, which takes a second of CPU time on each rank. If an
            import raises, the first call fails with that exception.
        bind: the CPUs on which each rank runs: "cores", "numa", or a function that returns them for a Worker. As for
            `mpwatch.run`.
        visible_devices: "own": each rank sees one GPU only, as device 0. As for `mpwatch.run`.
        forward_signals: signals that are passed on to the ranks of a call, as for `mpwatch.run`, while the main thread waits
            for the call. Between calls, and during calls of other threads, such a signal does what it does without a group.
        scope: "group": if a rank is lost, all ranks are stopped, and the next call restarts all of them. Ranks that
            communicate need this. "worker": a lost rank ends its own call and the other ranks of that call. All other ranks
            go on. The next call that needs a lost rank restarts that rank. This cannot be combined with `backend`.
        check: False: `run` returns the result of a failed call instead of raising.

    Raises:
        LaunchError: the ranks could not be started; none is left.
        TypeError, ValueError: an argument is not valid.
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
        capture_locals: bool = False,
        post_mortem: bool = False,
        stall_after: float | None = 60.0,
        backend_timeout: float | None = None,
        stop_signals: Collection[int] = (),
        stop_timeout: float | None = None,
        preload: Sequence[str] = (),
        bind: Bind | None = None,
        visible_devices: VisibleDevices | None = None,
        forward_signals: Collection[int] = (),
        scope: Literal["group", "worker"] = "group",
        check: bool = True,
    ) -> None:
        check_flag("check", check)
        self._check = check
        self._spec = PersistentGroupSpec(
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
            capture_locals=capture_locals,
            post_mortem=post_mortem,
            stall_after=stall_after,
            backend_timeout=backend_timeout,
            stop_signals=stop_signals,
            stop_timeout=stop_timeout,
            preload=preload,
            bind=bind,
            visible_devices=visible_devices,
            forward_signals=forward_signals,
            scope=scope,
        )
        self._pid = os.getpid()
        self._queue = RankQueue(len(self._all_ranks))
        self._handles: set[CallHandle[Any]] = set()  # of calls of `submit` that are not over
        self._joining_lock = threading.Lock()
        self._joining: Ticket | None = None  # of the call in which all ranks make the process group of `backend`
        self._call_lock = _LockOfThread()  # not reentrant, so that a call within a call of the same thread is noticed
        self._is_closed = False
        self._ranks = PersistentRanks(self._spec, partial(select_view, progress))
        # At the end of a program multiprocessing joins its children without a limit. It runs this finalizer before, also in
        # processes of multiprocessing, which do not run atexit functions.
        self._at_end = Finalize(None, _end_at_exit, (self._handles, self._ranks), exitpriority=10)
        self._finalizer = weakref.finalize(self, _end_unclosed_group, self._ranks, self._at_end, self._pid)
        self._finalizer.atexit = False
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

        If a rank raises, the other ranks of the call have one second to finish. If all of them finish, all ranks stay alive.
        Otherwise all ranks of the group are stopped. The same happens if a rank dies or hangs. Then other calls that run
        end, too. The next call restarts all ranks, without the content of `current_worker().state`, and logs a warning with
        the reason. The watcher notices at once if a rank dies between two calls, with the same consequence. With
        scope="worker" all this holds for the ranks of the call alone.

        Args:
            fn: see `mpwatch.run`.
            args: positional arguments, the same for every rank, except for those that are PerRank.
            kwargs: keyword arguments.
            timeout: limit for this call in seconds, from its beginning. None: the group's own `timeout`.
            ranks: the rank or the ranks to call. None: all. The process group of `backend` has all ranks: for collectives
                of some ranks make a group with `torch.distributed.new_group`, in a call of all ranks. If the process group
                does not exist yet, all ranks make it before, in a call of its own. A PerRank has a value for each rank of
                the group, or for each rank that is called, in ascending order.

        Returns:
            The return values by rank.

        Raises:
            RunFailedError: a rank failed. `__cause__` is the rank's own exception.
            RunTimeoutError: `timeout` was exceeded.
            LaunchError: the function or its arguments cannot be pickled; the ranks stay alive. Or the ranks had to be
                restarted and could not be.
            TypeError, ValueError: an argument is not valid, or fn does not take these args and kwargs.
            RuntimeError: the group is closed, or belongs to another process, or the call is made within a call of the group.
            KeyboardInterrupt: Ctrl-C. The ranks received SIGINT, too, and stay alive if all answered within grace_period.
        """
        __tracebackhide__ = True  # as in mpwatch.run
        call = self._prepare_call(fn, args, kwargs, timeout, ranks)
        return self._run_exclusively("run", call.ranks, partial(self._run, call, on_start=None, check=self._check))

    def submit(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        ranks: SupportsIndex | Iterable[SupportsIndex] | None = None,
    ) -> "CallHandle[T]":
        """Queue a call, and return at once. The call runs in a thread of its own when its ranks are free.

        The arguments are pickled when the call begins: do not change them before. Observers of the group are called in the
        thread of any call that is running. A call in the background has no live view, and Ctrl-C does not stop it. A program
        that ends stops the ranks, and does not wait for the call.

        Args:
            fn: see `run`, as for all arguments.
            args: positional arguments.
            kwargs: keyword arguments.
            timeout: limit for this call in seconds, from its beginning.
            ranks: the rank or the ranks to call. None: all.

        Returns:
            A `concurrent.futures.Future` of the RunResult, which can also stop the call: see CallHandle.

        Raises:
            TypeError, ValueError: an argument is not valid, or fn does not take these args and kwargs.
            RuntimeError: the group is closed, or belongs to another process.
        """
        from mpwatch.run_handle import CallHandle  # imports concurrent.futures

        __tracebackhide__ = True
        call = self._prepare_call(fn, args, kwargs, timeout, ranks)
        self._check_process("submit")
        self._check_open()
        handle: CallHandle[T] = CallHandle(
            partial(self._run_submitted, call),
            self._queue,
            call.ranks,
            check=self._check,
            is_in_call=self._call_lock.is_locked,
        )
        self._handles.add(handle)
        handle.add_done_callback(self._handles.discard)
        handle.enter_queue()
        return handle

    def close(self) -> None:
        """Ask the ranks to exit as any Python program exits, and wait for that. A second `close` does nothing.

        Calls of `submit` that have not begun are cancelled. `close` waits for calls that run. A rank that does not exit
        within `grace_period` is stopped. Raises RuntimeError in a process that does not own the group.
        """
        self._check_caller("close")
        handles = list(self._handles)
        for handle in handles:
            handle.cancel()
        self._run_exclusively("close", self._all_ranks, lambda _: self._close())
        for handle in handles:
            handle.wait_for_end()

    def stacks(self) -> Stacks:
        """Return where each rank is now: the stacks of all its threads. The ranks go on.

        Any thread may call it, during a call and between calls, and so may an observer of this group. It takes a few
        milliseconds, or 0.2 s at most if a rank does not answer. `print(group.stacks())` shows ranks with the same stacks
        together. Like any signal with a handler, the request ends a system call of the rank early (EINTR), which Python
        repeats.

        Returns:
            The stacks by global rank, in the format of `RunResult.stacks`. Of a rank that runs no function, and of one that
            does not answer, it is a line that says so. Empty if the next call has to restart the ranks.

        Raises:
            RuntimeError: the group is closed, or belongs to another process.
        """
        self._check_process("stacks")
        self._check_open()
        return self._ranks.take_stacks()

    @property
    def state(self) -> WorkerState:
        """INIT until all ranks are ready, then HEALTHY. STOPPED after `close`.

        UNHEALTHY: the next call must restart the ranks, or the heartbeat of a rank is late.
        """
        return WorkerState.STOPPED if self._is_closed else self._ranks.state

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The identities of the ranks. Their `restart_count` is the number of restarts."""
        return self._ranks.workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() == self._pid:  # not a fork that leaves the `with` block, too
            if error is not None:  # nobody waits for the calls any more
                for handle in list(self._handles):
                    if not handle.cancel():
                        handle.interrupt()
            self.close()

    def __repr__(self) -> str:
        return f"<WorkerGroup {self.state.name}: {format_count(len(self.workers), 'rank')}>"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows for the group."""
        from mpwatch.results.html import make_group_table  # imported on use

        return make_group_table(self.state, self.workers, self._spec.backend)

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
    ) -> "_GroupCall":
        __tracebackhide__ = True
        check_call(fn, args, kwargs)
        called = check_ranks(ranks, len(self._all_ranks))
        arguments = spread_per_rank(args, kwargs or {}, called, len(self._all_ranks))
        if timeout is None:
            timeout = self._spec.timeout
        else:
            check_seconds("timeout", timeout, at_least="more than 0")
        return _GroupCall(fn, *arguments, timeout, called)

    def _run_submitted(self, call: "_GroupCall", ticket: Ticket, on_start: OnStart) -> RunResult[Any]:
        with self._call_lock.lock:
            return self._run(call, ticket, on_start=on_start, check=False)

    def _run(self, call: "_GroupCall", ticket: Ticket, *, on_start: OnStart | None, check: bool) -> RunResult[Any]:
        __tracebackhide__ = True
        result: RunResult[Any] | None = None
        while result is None:
            self._check_open()
            if len(call.ranks) == len(self._all_ranks):
                result = self._ranks.call(call.fn, call.args, call.kwargs, call.timeout, on_start=on_start)
            elif self._ranks.lacks_process_group:
                result = self._make_process_group(call, ticket)
            else:
                result = self._ranks.call(call.fn, call.args, call.kwargs, call.timeout, call.ranks, on_start=on_start)
        if check:
            raise_if_failed(result)
        return result

    def _make_process_group(self, call: "_GroupCall", ticket: Ticket) -> RunResult[Any] | None:
        """Let all ranks make the process group of `backend`, for a call of some ranks. Return the result if they fail.

        If several calls need the process group, one of them has it made. `ticket` was granted; the call keeps its place.
        """
        from concurrent.futures import CancelledError  # its import takes time

        result, is_first, joining = None, False, None
        try:
            with self._joining_lock:
                is_first = self._joining is None
                joining = self._joining = self._joining or Ticket(self._all_ranks)
                self._queue.step_back(ticket, joining)
            if is_first:
                joining.wait()
                self._check_open()
                result = self._ranks.call(do_nothing, (), {}, call.timeout, has_view=False)
        finally:
            if is_first and joining is not None:
                try:
                    self._end_joining(joining)
                finally:
                    self._end_joining(joining)  # again: an exception may have interrupted the first time
        if not ticket.wait():
            raise CancelledError
        return None if result is None or result.state is WorkerState.SUCCEEDED else result

    def _end_joining(self, joining: Ticket) -> None:
        with self._joining_lock:
            if self._joining is joining:
                self._joining = None
        self._queue.leave(joining)

    def _close(self, reason: str = "") -> None:
        self._is_closed = True
        try:
            self._ranks.close()
        finally:
            if not self._ranks.has_ranks:  # otherwise an exception came before they were asked to exit
                self._finalizer.detach()
                self._at_end.cancel()
                self._ranks.publish_run_ended(reason)

    def _run_exclusively(self, method: str, ranks: Collection[int], action: Callable[[Ticket], R]) -> R:
        """Wait for these ranks, and return what `action` returns. It gets the ticket. No other call has them meanwhile."""
        __tracebackhide__ = True
        self._check_caller(method)
        ticket = Ticket(ranks)
        try:
            with self._call_lock.lock:
                self._queue.enter(ticket)
                ticket.wait()
                return action(ticket)
        finally:
            try:
                self._queue.leave(ticket)
            except BaseException:
                self._queue.leave(ticket)  # again: the exception may have interrupted the first time
                raise

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

    def _check_open(self) -> None:
        __tracebackhide__ = True
        if self._is_closed:
            raise RuntimeError("this WorkerGroup is closed; make another one")


@dataclass(frozen=True)
class _GroupCall:
    """A call as `WorkerGroup.run` passes it on."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timeout: float | None
    ranks: tuple[int, ...]


class _LockOfThread(threading.local):
    """A lock of each thread's own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def is_locked(self) -> bool:
        """Return whether this thread has locked its lock."""
        return self.lock.locked()


def do_nothing() -> None:
    """Return. Before the ranks call it, they make the process group of `backend`."""


def _end_at_exit(handles: "set[CallHandle[Any]]", ranks: PersistentRanks) -> None:
    for handle in list(handles):
        handle.cancel()
    ranks.shut_down_at_exit()


def _end_unclosed_group(ranks: PersistentRanks, at_end: Finalize, pid: int) -> None:
    if os.getpid() == pid:  # not at the end of a fork
        at_end.cancel()
        ranks.shut_down_in_background()
        # This comes last, since it raises where warnings are errors.
        warnings.warn("a WorkerGroup was not closed; its ranks are asked to exit", ResourceWarning, stacklevel=2)

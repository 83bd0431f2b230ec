"""`map` calls a function with each item of an iterable. A rank gets its next items as soon as the rank is free.

    caller's thread: ItemMap --- WorkerGroup.submit: serve_items (worker/item_loop.py) ---> each rank
                             --- items -----------------------------------------------> |  over an item channel
                             <-- a value for each item -------------------------------- |  (wire/item_channel.py)

A WorkerGroup with scope="worker" starts and watches the ranks, and restarts a rank that has died. If a call of `serve_items`
fails, so does the item on which the rank was working. The rank's other items go back into the queue (watcher/item_queue.py),
and `serve_items` is called again.

ItemMap takes items from the iterable, and receives values from the ranks, only while the caller waits for the next value.
"""
# ruff: noqa: A001  `map` does what the built-in function does

import errno
import os
import platform
import selectors
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from logging import WARNING
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar, Unpack, overload

from mpwatch.errors import ItemFailedError, LaunchError, make_error
from mpwatch.group import WorkerGroup
from mpwatch.live_view.item_view import ItemView
from mpwatch.options.placement import Cpus, Placement
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.options.spec import Env, Nprocs, OutputOptions, PersistentGroupSpec, as_restart_policy, check_call
from mpwatch.options.validation import check_count, check_flag, check_word, refuse_unknown
from mpwatch.os_support.clock import monotonic
from mpwatch.results.failure import FailureKind, ProcessFailure, format_failure
from mpwatch.results.item_failure import ItemFailure, name_item
from mpwatch.results.model import WorkerState
from mpwatch.results.report import format_ended_ranks, format_signal
from mpwatch.results.run_result import RunResult
from mpwatch.run_handle import RunHandle
from mpwatch.watcher.caller import log_last_report
from mpwatch.watcher.diagnosis.diagnose import load_value
from mpwatch.watcher.end_signals import EndSignals
from mpwatch.watcher.item_queue import ItemQueue, Task
from mpwatch.watcher.machine.transitions import InterruptCause
from mpwatch.watcher.observers.deferred_log import log_now
from mpwatch.watcher.pack_call import pack_items
from mpwatch.watcher.restarts.merge_results import merge_results_of_calls
from mpwatch.watcher.restarts.restart_budget import FailedAttempt
from mpwatch.watcher.wakeup_pipe import WakeupPipe
from mpwatch.wire.item_channel import ItemKind, open_item_channel, receive_message, send_message
from mpwatch.wire.messages import MAX_DESCRIPTORS
from mpwatch.wire.pickling.packed import map_packed
from mpwatch.wire.resource_errors import with_remedy
from mpwatch.worker.item_loop import serve_items

T = TypeVar("T")
R = TypeVar("R")
IndexedValue = tuple[int, Any]  # the index of an item, and its value or ItemFailure

BUFFER_PER_RANK = 256  # items
REPR_LENGTH = 200  # of an item in an ItemFailure
MAX_LOSSES_AT_START = 3  # for each rank, if no rank has loaded the function meanwhile
NO_OPTIONS = {  # of WorkerGroup
    "backend": "ranks of map do not communicate",
    "timeout": "use heartbeat_timeout, the limit for an item",
    "keep_going": "use on_error='yield'",
    "stop": "a map goes on when a stop is requested; leave its loop to end it",
    "scope": "each rank is restarted alone",
    "check": "use on_error",
}


class SharedOptions(OutputOptions, total=False):
    env: Env | None
    heartbeat_timeout: float | None
    grace_period: float
    placement: Placement | Cpus | None
    debug: Literal["locals"] | None
    preload: Sequence[str]


class MapOptions(SharedOptions, total=False):
    chunksize: int | None
    buffersize: int | None
    max_restarts: int | RestartPolicy


@overload
def map(
    fn: Callable[[T], R],
    items: Iterable[T],
    nprocs: Nprocs,
    *,
    ordered: Literal[True] = ...,
    on_error: Literal["raise"] = ...,
    **options: Unpack[MapOptions],
) -> Generator[R, None, None]: ...
@overload
def map(
    fn: Callable[[T], R],
    items: Iterable[T],
    nprocs: Nprocs,
    *,
    ordered: Literal[True] = ...,
    on_error: Literal["yield"],
    **options: Unpack[MapOptions],
) -> Generator[R | ItemFailure, None, None]: ...
@overload
def map(
    fn: Callable[[T], R],
    items: Iterable[T],
    nprocs: Nprocs,
    *,
    ordered: Literal[False],
    on_error: Literal["raise"] = ...,
    **options: Unpack[MapOptions],
) -> Generator[tuple[int, R], None, None]: ...
@overload
def map(
    fn: Callable[[T], R],
    items: Iterable[T],
    nprocs: Nprocs,
    *,
    ordered: Literal[False],
    on_error: Literal["yield"],
    **options: Unpack[MapOptions],
) -> Generator[tuple[int, R | ItemFailure], None, None]: ...


def map(
    fn: Callable[[Any], Any],
    items: Iterable[Any],
    nprocs: Nprocs,
    *,
    ordered: bool = True,
    on_error: Literal["raise", "yield"] = "raise",
    chunksize: int | None = None,
    buffersize: int | None = None,
    max_restarts: int | RestartPolicy = 0,
    **options: Unpack[SharedOptions],
) -> Generator[Any, None, None]:
    """Call `fn(item)` for each item, on `nprocs` ranks, and yield the values.

    A rank gets the next items as soon as it is free. The ranks start at the
    first `next` and stop when the iterator ends or is closed.
    `current_worker().state` lasts from item to item, so `fn` can load a model
    once and keep it there, but not in an attribute of `fn`: after a failed item
    the rank gets a new copy.

    An item fails if `fn` raises, or if the rank dies in it. A rank that dies is
    restarted, and at most one item fails with it, since a rank sends each value
    before it begins the next item. `fn` is called again for an item only if it
    has failed and `max_restarts` allows another try.

    Items are taken from `items`, and values received, only during `next`;
    between two calls a rank works on what it already has. If the body of a
    `for` loop raises, the ranks stay alive, unless the loop is in `with
    contextlib.closing(mpwatch.map(...)) as values:`.

    Args:
        fn: a function of one argument. For more use `functools.partial`, or
            items that are tuples.
        items: any iterable, also an endless one. It is iterated in the caller's
            thread, only as far as the ranks need.
        nprocs: number of ranks, as for `mpwatch.run`.
        ordered: True yields the values in the order of the items. False yields
            `(index, value)` as soon as there is a value; `index` counts the
            items from 0.
        on_error: "raise" raises ItemFailedError as soon as an item has failed,
            stops all ranks and drops values that were not yielded. "yield"
            yields an ItemFailure in place of the value.
        chunksize: the most items that are sent to a rank together. None means
            256. There are as many as take about 20 ms; a rank that has worked
            so long gives back those that it has not begun.
        buffersize: with ordered=True, the most items that are in work, or whose
            values wait to be yielded. It limits how many later values are kept
            while an item is slow. Below `nprocs`, some ranks have nothing to
            do. None means 256 for each rank.
        max_restarts: how often an item is tried again after it has failed. A
            RestartPolicy also sets delays and `retry_if`, for each item
            separately; its `scope`, `reset_after` and `max_no_progress` have no
            effect.
        options: of `mpwatch.run`: `env`, `heartbeat_timeout`, `grace_period`,
            `placement`, `logs`, `progress`, `on_event`, `on_progress`,
            `debug="locals"`; of WorkerGroup: `preload`. `progress` shows a bar
            of the items: None in a terminal or a notebook, after one second;
            True everywhere, from the start. `heartbeat_timeout` limits an item,
            including the time to pickle its value: each begins with a
            heartbeat, and `fn` may send more.

    Yields:
        The values, or with ordered=False the pairs of index and value.

    Raises:
        ItemFailedError: an item failed, and `on_error` is "raise". `__cause__`
            is the rank's own exception.
        RunFailedError: the ranks cannot load the function, or die before they
            have loaded it.
        LaunchError: the ranks could not be started, or an item cannot be
            pickled.
        TypeError, ValueError: an argument is not valid, or fn does not take one
            argument.
        KeyboardInterrupt: Ctrl-C. All ranks are stopped.
        Exception: the iteration of `items` raised this exception. Values that
            were not yielded are dropped.
    """
    check_call(
        fn, (None,), None, advice="An item is one argument: use functools.partial for others, or items that are tuples"
    )
    try:
        iterator = iter(items)
    except TypeError:
        raise TypeError(f"items must be an iterable, not {items!r:.200}") from None
    check_flag("ordered", ordered)
    if on_error not in ("raise", "yield"):
        raise ValueError(f"on_error must be 'raise' or 'yield', not {on_error!r}")
    if chunksize is not None:
        chunksize = check_count("chunksize", chunksize, at_least=1)
    if buffersize is not None:
        buffersize = check_count("buffersize", buffersize, at_least=1)
    for name in options.keys() & NO_OPTIONS.keys():
        raise TypeError(f"map() has no option {name!r}: {NO_OPTIONS[name]}")
    refuse_unknown("map", options, MapOptions.__annotations__)
    check_word("debug", options.get("debug"), ("locals",))
    spec = PersistentGroupSpec(nprocs=nprocs, scope="worker", **options)  # checks the values
    options["on_event"], options["on_progress"] = spec.observers, spec.progress_observers  # they may be iterators
    queue = ItemQueue(iterator, chunksize=chunksize, policy=as_restart_policy(max_restarts))
    total = None
    with suppress(Exception):  # a length is not needed, and `__len__` may raise anything
        total = len(items)  # type: ignore[arg-type]
    item_map = ItemMap(
        fn,
        queue,
        lambda: ItemView(spec.progress, total),
        {"nprocs": nprocs, **options, "progress": False},  # the view is that of the items
        buffersize=buffersize,
        ordered=ordered,
        on_error=on_error,
    )
    return item_map.run_in_order() if ordered else item_map.run()


@dataclass(eq=False)
class _Feed:
    """A rank, and the items that were sent to it together and have no value yet."""

    rank: int
    handle: RunHandle[None] | None = None  # the call of `serve_items`; None: there is none
    called_at: float = 0.0  # CLOCK_MONOTONIC: when this call was made
    channel: socket.socket | None = None
    rank_end: socket.socket | None = None  # the rank's end of it, until the call has been sent
    has_loaded: bool = False  # whether the call has loaded the function
    tasks: deque[Task] = field(default_factory=deque)
    sent: int = 0  # how many items there were at first
    has_begun: bool = False  # whether the rank has unpickled them

    def takes_items(self) -> bool:
        return self.has_loaded and self.channel is not None and not self.tasks

    def take_back(self) -> list[Task]:
        tasks = list(self.tasks)
        self.tasks.clear()
        return tasks


class _EndedBySignalError(Exception):
    """A signal ends the program. `handles` are those of the calls that were interrupted for that."""

    def __init__(self, signum: int, handles: Sequence[RunHandle[Any]]) -> None:
        super().__init__(signum)
        self.signum = signum
        self.handles = handles


class _ItemGroup(WorkerGroup):
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            # after a signal, the calls are being stopped already, and another interrupt would kill the ranks at once
            super().__exit__(kind, None if isinstance(error, _EndedBySignalError) else error, trace)
        except BaseException:  # a second Ctrl-C
            for handle in list(self._handles):
                handle._interrupt()
            self.close()
            raise

    def end_by_signal(self, signum: int) -> NoReturn:
        """Cancel the calls that have not begun, interrupt the others without waiting for them, and raise."""
        handles = [handle for handle in list(self._handles) if not handle.cancel()]
        for handle in handles:
            handle._interrupt(signum, InterruptCause.SIGNAL)
        raise _EndedBySignalError(signum, handles)

    def explain_loss(self, rank: int, reason: str) -> None:
        """Set the reason that mpwatch logs when it restarts this rank."""
        self._ranks.explain_loss(rank, reason)


class ItemMap:
    """One call of `map`. `options` are those of its WorkerGroup; `make_view` is called when the ranks are started."""

    def __init__(
        self,
        fn: Callable[[Any], Any],
        queue: ItemQueue,
        make_view: Callable[[], ItemView],
        options: dict[str, Any],
        *,
        buffersize: int | None,
        ordered: bool,
        on_error: Literal["raise", "yield"],
    ) -> None:
        self._fn = fn
        self._queue = queue
        self._make_view = make_view
        self._buffersize = buffersize
        self._options = options
        self._ordered = ordered
        self._yields_failures = on_error == "yield"
        self._early: list[IndexedValue] = []  # outcomes of items that could not be sent
        self._next_index = 0  # of the value that is yielded next, if they are yielded in order
        self._feeds: list[_Feed] = []
        self._ended: deque[tuple[_Feed, RunHandle[None]]] = deque()
        self._done_count = self._failed_count = 0
        self._pid = os.getpid()
        self._losses_at_start = 0  # since a rank has loaded the function
        self._group: _ItemGroup
        self._view: ItemView
        self._selector: selectors.BaseSelector
        self._wakeup: WakeupPipe
        self._end_signals: EndSignals

    def run_in_order(self) -> Generator[Any, None, None]:
        __tracebackhide__ = True
        waiting: dict[int, Any] = {}
        with closing(self.run()) as outcomes:
            for index, outcome in outcomes:
                waiting[index] = outcome
                while self._next_index in waiting:
                    self._next_index += 1
                    yield waiting.pop(self._next_index - 1)

    def run(self) -> Generator[IndexedValue, None, None]:
        """Yield the index of each item with its value or ItemFailure, in the order in which they arrive."""
        __tracebackhide__ = True
        try:
            yield from self._run()
            return
        except ItemFailedError as error:
            raise error.with_traceback(None)  # noqa: B904  the same error, without the frames of this module
        except _EndedBySignalError as error:
            end = error
        calls = [_get_result(handle) for handle in end.handles if handle.exception() is None]
        result = merge_results_of_calls([*calls, RunResult(WorkerState.STOPPED, reason=format_signal(end.signum))])
        log_last_report(result)
        signal.raise_signal(end.signum)
        raise make_error(result)  # the program has set a handler meanwhile

    def _run(self) -> Generator[IndexedValue, None, None]:
        __tracebackhide__ = True
        with ExitStack() as stack:
            self._group = stack.enter_context(_ItemGroup(scope="worker", check=False, **self._options))
            # A fork of this program may close it, which changes nothing here. It would with epoll.
            self._selector = stack.enter_context(selectors.PollSelector())
            self._wakeup = stack.enter_context(closing(WakeupPipe()))
            self._selector.register(self._wakeup, selectors.EVENT_READ)
            self._end_signals = EndSignals(self._wakeup.wake)
            stack.callback(self._close_feeds)
            self._view = self._make_view()
            stack.callback(self._close_view)
            self._feeds = [_Feed(worker.rank) for worker in self._group.workers]
            try:
                while self._deal():
                    yield from self._receive()
            except GeneratorExit:
                # The end of the program, or garbage collection in a thread that `close` waits for: the group ends by itself.
                if sys.is_finalizing() or threading.current_thread().name.startswith("mpwatch"):
                    stack.pop_all()
                raise

    def _deal(self) -> bool:
        """Give items to free ranks. Return whether there are more outcomes to come."""
        end = 1 << 62
        if self._ordered:
            end = self._next_index + (self._buffersize or BUFFER_PER_RANK * len(self._feeds))
        may_have_items = not self._queue.is_exhausted or self._queue.has_waiting
        for feed in self._feeds:
            if feed.handle is None and may_have_items:
                self._start(feed)
        for feed in self._feeds:
            while feed.takes_items() and (tasks := self._queue.take_chunk(monotonic(), end)):
                self._send(feed, tasks)  # or put them back, to be sent one by one
        has_items = self._queue.has_waiting or not self._queue.is_exhausted
        return has_items or bool(self._early) or any(feed.tasks for feed in self._feeds)

    def _start(self, feed: _Feed) -> None:
        """Call `serve_items` in a rank. If the rank has died, the WorkerGroup restarts the rank before the call."""
        try:
            feed.channel, feed.rank_end = open_item_channel()
        except OSError as error:
            raise LaunchError(with_remedy(f"items cannot be sent to rank {feed.rank}", error)) from error
        feed.has_loaded = False
        self._selector.register(feed.channel, selectors.EVENT_READ, feed)
        feed.called_at = monotonic()
        handle = feed.handle = self._group.submit(
            serve_items, args=(feed.rank_end,), kwargs={"fn": self._fn}, ranks=feed.rank
        )
        handle.add_done_callback(lambda handle: self._note_end(feed, handle))

    def _note_end(self, feed: _Feed, handle: Any) -> None:
        self._ended.append((feed, handle))
        self._wakeup.wake()

    def _send(self, feed: _Feed, tasks: Sequence[Task]) -> None:
        assert feed.channel is not None  # it takes items
        try:
            payload = pack_items({f"items[{task.index}]": task.item for task in tasks})
        except LaunchError as error:
            self._refuse(feed, tasks, error)
            return
        with closing(payload):
            if len(payload.fds) > MAX_DESCRIPTORS:
                text = f"items[{tasks[0].index}] has {len(payload.fds)} descriptors, such as sockets or shared tensors"
                self._refuse(feed, tasks, LaunchError(f"{text}; an item may have {MAX_DESCRIPTORS} at most: divide it"))
                return
            kind = ItemKind.ITEM if len(tasks) == 1 else ItemKind.ITEMS
            try:
                is_sent = send_message(feed.channel, kind, payload.body, payload.fds)
            except OSError as error:
                raise LaunchError(with_remedy(f"items[{tasks[0].index}] cannot be sent to the rank", error)) from error
        if is_sent:
            feed.tasks.extend(tasks)
            feed.sent, feed.has_begun = len(tasks), False
        else:
            self._close_channel(feed)  # its call is ending; all that it has sent was read
            self._queue.put_back(tasks)

    def _refuse(self, feed: _Feed, tasks: Sequence[Task], error: LaunchError) -> None:
        """Let several items that cannot be sent together be sent one by one. A single item fails."""
        if len(tasks) > 1:
            self._queue.put_back(tasks, singly=True)
        elif self._yields_failures:
            self._early += self._fail_without_call(feed, tasks[0], error)
        else:
            raise error

    def _receive(self) -> list[IndexedValue]:
        """Wait until a value arrives or a call of `serve_items` ends, and return the new outcomes."""
        __tracebackhide__ = True
        outcomes, self._early = self._early, []
        self._update_view()
        due_at, now = self._queue.due_at, monotonic()
        waits = [0.0] if outcomes else []
        waits += [due_at - now] if due_at is not None and due_at > now else []  # else it waits for a free rank
        waits += [] if (seconds := self._view.seconds_to_next_update) is None else [seconds]
        with self._end_signals.defer():
            ready = self._selector.select(min(waits, default=None))
        if self._end_signals.received is not None:
            self._group.end_by_signal(self._end_signals.received)
        for key, _ in ready:
            if key.data is None:
                self._wakeup.drain()
            else:
                outcomes += self._read(key.data)
        while self._ended:
            outcomes += self._end(*self._ended.popleft())
        self._done_count += len(outcomes)
        return outcomes

    def _update_view(self) -> None:
        self._view.update(self._done_count, self._failed_count)

    def _close_view(self) -> None:
        if os.getpid() == self._pid:  # not a fork that leaves the loop, too
            self._view.close(self._done_count, self._failed_count)

    def _read(self, feed: _Feed) -> list[IndexedValue]:
        __tracebackhide__ = True
        outcomes = []
        while feed.channel is not None:
            try:
                message = receive_message(feed.channel)
            except BlockingIOError:
                break
            if message is None:
                self._close_channel(feed)
                break
            kind, body, fds = message
            if kind is ItemKind.READY:
                feed.has_loaded = True
                self._losses_at_start = 0
                self._close_rank_end(feed)
            elif kind is ItemKind.BEGUN:
                feed.has_begun = True
            elif kind is ItemKind.REST:
                rest = feed.take_back()
                self._queue.put_back(rest, singly=not feed.has_begun)
                self._queue.shrink_chunks(feed.sent - len(rest))
            else:
                task = feed.tasks.popleft()  # a rank sends its values in the order of its items
                if not feed.tasks:
                    self._queue.enlarge_chunks(feed.sent)
                outcomes += self._load(feed, task, body, fds)
        return outcomes

    def _load(self, feed: _Feed, task: Task, body: bytes, fds: list[int] | None) -> list[IndexedValue]:
        __tracebackhide__ = True
        content: bytes | memoryview | OSError = body
        if fds is None:
            content = OSError(errno.EMFILE, "the file with the value could not be received; see `ulimit -n`")
        elif fds:
            try:
                content = map_packed(fds[0])
            except OSError as unreadable:
                content = unreadable
            finally:
                os.close(fds[0])
        loaded = load_value(content)
        if loaded.error is None:
            return [(task.index, loaded.value)]
        return self._fail_without_call(feed, task, loaded.error)

    def _fail_without_call(self, feed: _Feed, task: Task, error: BaseException) -> list[IndexedValue]:
        """Let an item fail, although no call has failed, for example because its value cannot be unpickled."""
        __tracebackhide__ = True
        worker = self._group.workers[feed.rank]
        elapsed = monotonic() - feed.called_at  # from the start of the call, as in a failure of the call itself
        failure = ProcessFailure(
            rank=worker.rank,
            local_rank=worker.local_rank,
            pid=None,
            hostname=platform.node(),
            kind=FailureKind.EXCEPTION,
            exit_code=1,
            exception=error,
            summary=f"{type(error).__name__}: {error}",
            elapsed=elapsed,
        )
        result: RunResult[None] = RunResult(
            WorkerState.FAILED, failures={worker.rank: failure}, root_cause=failure, workers=(worker,), elapsed=elapsed
        )
        return self._fail(task, failure, result)

    def _end(self, feed: _Feed, handle: RunHandle[None]) -> list[IndexedValue]:
        __tracebackhide__ = True
        outcomes = self._read(feed)
        tasks = feed.take_back()
        # If a rank dies while it unpickles several items, any of them may be to blame. They are sent again one by one.
        begun, unbegun = (tasks[:1], tasks[1:]) if feed.has_begun or feed.sent == 1 else ([], tasks)
        self._close_feed(feed)
        result = _get_result(handle)
        cause = result.root_cause
        if result.state is WorkerState.SUCCEEDED:
            self._queue.put_back(unbegun)
            for task in begun:
                text = "fn has shut down the socket of mpwatch.map; shut down only sockets that fn has opened"
                outcomes += self._fail_without_call(feed, task, RuntimeError(text))
        elif cause is None:  # the program ends, for example
            raise make_error(result)
        elif not feed.has_loaded:
            self._losses_at_start += 1
            if cause.exception is not None or self._losses_at_start == MAX_LOSSES_AT_START * len(self._feeds):
                raise make_error(result)
        else:
            self._queue.put_back(unbegun, singly=not feed.has_begun)
            for task in begun:
                item = name_item(task.index, _format_item(task.item))
                self._group.explain_loss(feed.rank, f"{item} failed: {format_failure(cause)}")
                outcomes += self._fail(task, cause, result)
        return outcomes

    def _fail(self, task: Task, failure: ProcessFailure, result: RunResult[None]) -> list[IndexedValue]:
        """Return the item's failure, or nothing if it will be tried again. Can raise ItemFailedError."""
        __tracebackhide__ = True
        failed_attempt = FailedAttempt(cause=failure, had_heartbeat=True)  # each item begins with one
        decision = self._queue.fail(task, failed_attempt, monotonic())
        text = _format_item(task.item)
        if decision.delay is not None:
            log_now(
                WARNING,
                "%s is tried again (attempt %d of %d): %s",
                name_item(task.index, text),
                *(task.attempts + 1, task.attempts + 1 + decision.restarts_left, format_failure(failure)),
            )
            return []
        reason = decision.no_restart_reason
        item_failure = ItemFailure(index=task.index, item=text, failure=failure, attempts=task.attempts, reason=reason)
        self._failed_count += 1
        if not self._yields_failures:
            raise ItemFailedError(result, item_failure)
        return [(task.index, item_failure)]

    def _close_channel(self, feed: _Feed) -> None:
        if feed.channel is not None:
            self._selector.unregister(feed.channel)
            feed.channel.close()
            feed.channel = None

    def _close_rank_end(self, feed: _Feed) -> None:
        if feed.rank_end is not None:
            feed.rank_end.close()
            feed.rank_end = None

    def _close_feed(self, feed: _Feed) -> None:
        feed.handle = None
        self._close_channel(feed)
        self._close_rank_end(feed)

    def _close_feeds(self) -> None:
        for feed in self._feeds:
            self._close_feed(feed)


def _get_result(handle: RunHandle[None]) -> RunResult[None]:
    """Return the result without the note about the next call of the group, which a map makes by itself or not at all."""
    result = handle.result()
    note = format_ended_ranks([worker.rank for worker in result.workers])
    return replace(result, notes=tuple(each for each in result.notes if each != note))


def _format_item(item: object) -> str:
    try:
        text = repr(item[:REPR_LENGTH] if isinstance(item, str | bytes) else item)
    except Exception as error:  # noqa: BLE001  code of the user
        text = f"<{type(item).__qualname__} whose repr raises {type(error).__name__}>"
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= REPR_LENGTH else f"{text[:REPR_LENGTH]}..."

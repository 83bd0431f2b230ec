"""`map` calls a function with each item of an iterable. A rank gets its next items as soon as the rank is free.

    caller's thread: ItemMap --- a call of `run_items`, with some items ---> a rank (worker/item_loop.py)
                             <-- a value for each item, then the answer ---

A WorkerGroup with scope="worker" starts and watches the ranks. If a call fails, so does the item on which the rank was
working. The rank's other items go back into the queue (watcher/item_queue.py). A rank that has died is started again.

ItemMap takes items from the iterable, and receives values from the ranks, only while the caller waits for the next value.
"""
# ruff: noqa: A001  `map` does what the built-in function does

import math
import os
import platform
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from logging import WARNING
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from mpwatch.errors import ItemFailedError, LaunchError, make_error
from mpwatch.group import WorkerGroup
from mpwatch.live_view.select import select_item_view
from mpwatch.options.placement import Cpus, Placement
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.options.spec import Env, Nprocs, OutputOptions, PersistentGroupSpec, as_restart_policy, check_call
from mpwatch.options.validation import check_count, check_flag, check_word, refuse_unknown
from mpwatch.os_support.clock import monotonic
from mpwatch.results.failure import FailureKind, ItemFailure, ProcessFailure, format_failure, name_item
from mpwatch.results.model import WorkerState
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.call import Call
from mpwatch.watcher.diagnosis.diagnose import load_value
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.group_ranks import LOST_RANK
from mpwatch.watcher.item_queue import ItemQueue, Task
from mpwatch.watcher.log import log_now
from mpwatch.watcher.machine.transitions import StopReason
from mpwatch.watcher.pack_call import pack_call, pack_items
from mpwatch.watcher.restarts.restart_budget import FailedAttempt
from mpwatch.wire.pickling.call_payload import FunctionCall, Payload
from mpwatch.worker.item_loop import load, run_items

if TYPE_CHECKING:
    from mpwatch.live_view.live import LiveView

T = TypeVar("T")
R = TypeVar("R")
IndexedValue = tuple[int, Any]  # the index of an item, and its value or ItemFailure

BUFFER_PER_RANK = 256  # items
REPR_LENGTH = 200  # of an item in an ItemFailure
MAX_LOSSES_AT_START = 3  # for each rank, if no rank has loaded the function meanwhile
NO_OPTIONS = {  # of `run` and WorkerGroup
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
    once and keep it there.

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
            True everywhere, from the start. `heartbeat_timeout` limits an item:
            each begins with a heartbeat, and `fn` may send more.

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
        fn=fn,
        queue=queue,
        options={"nprocs": nprocs, **options, "progress": False},  # the view is that of the items
        progress=spec.progress,
        total=total,
        buffersize=buffersize,
        ordered=ordered,
        yields_failures=on_error == "yield",
    )
    return item_map.run()


@dataclass(eq=False)
class _Feed:
    """A rank, its present call, and the items of this call that have no value yet."""

    rank: int
    call: Call | None = None
    has_loaded: bool = False  # whether the rank has the function
    loss: str = ""  # why the rank must be started again; empty: it need not
    tasks: deque[Task] = field(default_factory=deque)
    sent: int = 0  # how many items there were at first

    def lose(self, reason: str) -> None:
        self.has_loaded, self.loss = False, reason


@dataclass(eq=False, kw_only=True)
class ItemMap:
    """One call of `map`. `options` are those of its WorkerGroup."""

    fn: Callable[[Any], Any]
    queue: ItemQueue
    options: dict[str, Any]
    progress: bool | None
    total: int | None  # items; None: it is not known
    buffersize: int | None
    ordered: bool
    yields_failures: bool
    _outcomes: list[IndexedValue] = field(default_factory=list)  # that were not yielded yet
    _next_index: int = 0  # of the value that is yielded next, if they are yielded in order
    _feeds: list[_Feed] = field(default_factory=list)
    _done_count: int = 0
    _failed_count: int = 0
    _losses_at_start: int = 0  # since a rank has loaded the function
    _dealt_at: float = 0.0  # CLOCK_MONOTONIC
    _group: WorkerGroup = field(init=False)
    _load_payload: Payload = field(init=False)  # the call of `load`
    _bar: "LiveView | None" = None

    def run(self) -> Generator[Any, None, None]:
        """Yield the value or the ItemFailure of each item in order, or else with the item's index, as they arrive."""
        __tracebackhide__ = True
        try:
            yield from self._run()
        except ItemFailedError as error:
            raise error.with_traceback(None)  # noqa: B904  the same error, without the frames of this module

    def _run(self) -> Generator[Any, None, None]:
        waiting: dict[int, Any] = {}
        with ExitStack() as stack:
            self._load_payload = stack.enter_context(closing(pack_call(FunctionCall(load, (), {"fn": self.fn}, None))))
            self._group = stack.enter_context(WorkerGroup(scope="worker", check=False, **self.options))
            self._bar = select_item_view(self.progress, self.total, lambda: (self._done_count, self._failed_count))
            stack.callback(self._close_bar, os.getpid())
            self._feeds = [_Feed(worker.rank) for worker in self._group.workers]
            try:
                while self._deal():
                    self._receive()
                    outcomes, self._outcomes = self._outcomes, []
                    if not self.ordered:
                        yield from outcomes
                        continue
                    waiting.update(outcomes)
                    while self._next_index in waiting:
                        self._next_index += 1
                        yield waiting.pop(self._next_index - 1)
            except GeneratorExit:
                # Garbage collection in a thread that `close` waits for: the group ends by itself.
                if threading.current_thread().name.startswith("mpwatch"):
                    stack.pop_all()
                raise

    def _close_bar(self, pid: int) -> None:
        if self._bar is not None and os.getpid() == pid:  # not a fork that leaves the loop, too
            self._bar.close(())

    def _deal(self) -> bool:
        """Give items to free ranks. Return whether there are more outcomes to come."""
        self._dealt_at = monotonic()
        end = 1 << 62
        if self.ordered:
            end = self._next_index + (self.buffersize or BUFFER_PER_RANK * len(self._feeds))
        for feed in self._feeds:
            if feed.call is None and not feed.has_loaded and self.queue.has_items:
                self._start(feed)
        for feed in self._feeds:
            while feed.call is None and feed.has_loaded and (tasks := self.queue.take_chunk(end)):
                self._send(feed, tasks)  # or put them back, to be sent one by one
        return (
            self.queue.has_items or bool(self._outcomes) or any(feed.call is not None and feed.sent for feed in self._feeds)
        )

    def _start(self, feed: _Feed) -> None:
        """Let the rank load the function. If the rank has died, it is started before."""
        if feed.loss:
            self._group._ranks.restart(feed.rank, feed.loss)
            feed.loss = ""
        feed.call, feed.sent = self._group._ranks.make_call(self._load_payload, feed.rank), 0

    def _send(self, feed: _Feed, tasks: list[Task]) -> None:
        try:
            payload = pack_items(run_items, {f"items[{task.index}]": task.item for task in tasks})
        except LaunchError as error:
            if len(tasks) > 1:
                self.queue.put_back_singly(tasks)
            elif self.yields_failures:
                self._fail_without_call(feed, tasks[0], error)
            else:
                raise
        else:
            feed.call = self._group._ranks.make_call(payload, feed.rank)
            feed.tasks.extend(tasks)
            feed.sent = len(tasks)

    def _receive(self) -> None:
        """Wait until a value arrives or a call ends, unless there are outcomes already."""
        self._group._check_process("map")
        if self._bar is not None:
            self._bar.update()
        if not self._outcomes:
            # Items that were due when the free ranks got theirs wait for a free rank.
            due_at = self.queue.due_at if self.queue.due_at > self._dealt_at else math.inf
            deadline = due_at if self._bar is None else min(due_at, self._bar.next_update_at)
            calls = [feed.call for feed in self._feeds if feed.call is not None]
            has_news = lambda: any(call.values or call.has_ended() for call in calls)  # noqa: E731
            self._group._ranks.follow(calls, has_news, deadline)
        for feed in self._feeds:
            if feed.call is not None:
                self._read(feed, feed.call)
        self._done_count += len(self._outcomes)

    def _read(self, feed: _Feed, call: Call) -> None:
        has_ended = call.has_ended()  # before the values are read: none comes later
        while call.values:
            value, error = load_value(call.values.popleft())
            task = feed.tasks.popleft()  # a rank sends its values in the order of its items
            if error is None:
                self._outcomes.append((task.index, value))
            else:
                self._fail_without_call(feed, task, error)
        if has_ended:
            self._end(feed, call)

    def _fail_without_call(self, feed: _Feed, task: Task, error: BaseException) -> None:
        """Let an item fail, although no call has failed, for example because its value cannot be unpickled."""
        worker = self._group.workers[feed.rank]
        elapsed = 0.0 if feed.call is None else monotonic() - feed.call.started_at
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
        self._fail(task, failure, result)

    def _end(self, feed: _Feed, call: Call) -> None:
        if call.payload is not None and call.payload is not self._load_payload:
            call.payload.close()
        evidence = call.evidence
        if evidence is None:  # it was refused
            feed.lose(LOST_RANK)
        elif evidence.stop_reason is StopReason.SUCCEEDED:
            if feed.has_loaded:
                self.queue.adapt_chunks(feed.sent, feed.sent - len(feed.tasks))
            feed.has_loaded, self._losses_at_start = True, 0
            if call.ended_ranks:
                feed.lose("it ended after it had returned")
        else:
            self._end_failure(feed, call, evidence)
        self.queue.put_back([*feed.tasks])
        feed.tasks.clear()
        feed.call = None

    def _end_failure(self, feed: _Feed, call: Call, evidence: AttemptObservations) -> None:
        """The item on which the rank was working has failed, if there was one."""
        result = self._group._ranks.diagnose(call)
        cause = result.root_cause
        if cause is None:  # the program ends, for example
            raise make_error(result)
        reason = result.verdict
        if not feed.has_loaded:
            self._losses_at_start += 1
            if cause.exception is not None or self._losses_at_start == MAX_LOSSES_AT_START * len(self._feeds):
                raise make_error(result)
        elif feed.sent > 1 and evidence.ranks[feed.rank].heartbeat.beat_at is None:
            # The rank could not unpickle the items. Any of them may be to blame, so they are sent again one by one.
            self.queue.put_back_singly(feed.tasks)
            feed.tasks.clear()
        elif feed.tasks:
            task = feed.tasks.popleft()
            reason = f"{name_item(task.index, _format_item(task.item))} failed: {format_failure(cause)}"
            self._fail(task, cause, result)
        if call.ended_ranks:
            feed.lose(reason)

    def _fail(self, task: Task, failure: ProcessFailure, result: RunResult[None]) -> None:
        """Let an item fail, or be tried again. Can raise ItemFailedError."""
        failed_attempt = FailedAttempt(cause=failure, had_heartbeat=True)  # each item begins with one
        decision = self.queue.fail(task, failed_attempt)
        text = _format_item(task.item)
        if decision.delay is not None:
            log_now(
                WARNING,
                "%s is tried again (attempt %d of %d): %s",
                name_item(task.index, text),
                *(task.attempts + 1, task.attempts + 1 + decision.restarts_left, format_failure(failure)),
            )
            return
        reason = decision.no_restart_reason
        item_failure = ItemFailure(index=task.index, item=text, failure=failure, attempts=task.attempts, reason=reason)
        self._failed_count += 1
        if not self.yields_failures:
            raise ItemFailedError(result, item_failure)
        self._outcomes.append((task.index, item_failure))


def _format_item(item: object) -> str:
    try:
        text = repr(item[:REPR_LENGTH] if isinstance(item, str | bytes) else item)
    except Exception as error:  # noqa: BLE001  code of the user
        text = f"<{type(item).__qualname__} whose repr raises {type(error).__name__}>"
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= REPR_LENGTH else f"{text[:REPR_LENGTH]}..."

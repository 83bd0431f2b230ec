"""Decides which items of `mpwatch.map` a rank gets next. No I/O, but it iterates over the user's items.

    items of the user --> take_chunk --> a rank --> a value of each item
                             ^             |
                             |             |-- it died at the first item without a value --> fail --> give up, or later again
                             `-------------'-- the items after that one: put_back

Items are taken in this order: failed items whose delay is over, items that were put back, new items.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.os_support.clock import monotonic
from mpwatch.watcher.restarts.restart_budget import FailedAttempt, RestartBudget, RestartDecision

CHUNK_SECONDS = 0.02  # how long the items of a chunk should take: a chunk costs the caller about 0.2 ms
MAX_CHUNKSIZE = 256
GROWTH = 2  # of the chunk size from one chunk to the next, at most
WEIGHT = 0.3  # of the latest chunk in the estimate of the time that an item takes


@dataclass(eq=False)
class Task:
    """An item that has no value yet."""

    index: int
    item: Any
    attempts: int = 0  # how many times the item has failed
    losses: int = 0  # how many ranks have died while this item was their next item
    is_single: bool = False  # whether the item must be sent without other items
    budget: RestartBudget | None = None


class ItemQueue:
    """The items that no rank has at present.

    Args:
        items: iterated only as far as ranks need items.
        chunksize: items for a rank at once, at most MAX_CHUNKSIZE. None: as many as take about CHUNK_SECONDS.
        policy: how often an item is tried again, and after which failures.
    """

    def __init__(
        self,
        items: Iterable[Any],
        *,
        chunksize: int | None,
        policy: RestartPolicy,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._new: Iterator[tuple[int, Any]] = enumerate(items)
        self._chunksize = chunksize
        self._policy = policy
        self._clock = clock
        self._limit = min(chunksize or 1, MAX_CHUNKSIZE)
        self._seconds_per_item: float | None = None
        self._returned: deque[Task] = deque()
        self._delayed: list[tuple[float, int, Task]] = []  # a heap: due time, index
        self._next_index = 0
        self.is_exhausted = False  # whether all items have been taken once

    def take_chunk(self, now: float, end: int) -> list[Task]:
        """Return the next items for a rank, or none if there are none at present. New ones have an index below `end`."""
        if self._delayed and self._delayed[0][0] <= now:
            return [heapq.heappop(self._delayed)[2]]
        if self._returned and self._returned[0].is_single:
            return [self._returned.popleft()]
        chunk: list[Task] = []
        while self._returned and not self._returned[0].is_single and len(chunk) < self._limit:
            chunk.append(self._returned.popleft())
        if chunk or self.is_exhausted:
            return chunk
        deadline = self._clock() + CHUNK_SECONDS  # `items` may be slow, and ranks wait
        while len(chunk) < self._limit and not self.is_exhausted and self._next_index < end:
            if chunk and self._clock() > deadline:
                break
            try:
                index, item = next(self._new)
            except StopIteration:
                self.is_exhausted = True
            else:
                self._next_index = index + 1
                chunk.append(Task(index, item))
        return chunk

    def put_back(self, tasks: Sequence[Task], *, singly: bool = False) -> None:
        for task in reversed(tasks):
            task.is_single = task.is_single or singly
            self._returned.appendleft(task)

    def fail(self, task: Task, failed_attempt: FailedAttempt, now: float) -> RestartDecision:
        """Try a failed item again later if the policy allows it. Raises what `retry_if` raises."""
        task.attempts += 1
        task.budget = task.budget or RestartBudget(self._policy)
        decision = task.budget.decide(failed_attempt)
        if decision.delay is not None:
            heapq.heappush(self._delayed, (now + decision.delay, task.index, task))
        return decision

    def add_duration(self, count: int, seconds: float) -> None:
        latest = seconds / count
        known = self._seconds_per_item
        self._seconds_per_item = latest if known is None else known + WEIGHT * (latest - known)
        if self._chunksize is None:
            wanted = int(CHUNK_SECONDS / max(self._seconds_per_item, CHUNK_SECONDS / MAX_CHUNKSIZE))
            self._limit = max(1, min(wanted, self._limit * GROWTH))

    def shrink_chunks(self) -> None:
        """Make the next chunks small: some ranks are idle while others still have items."""
        if self._chunksize is None:
            self._limit = 1

    @property
    def may_prefetch(self) -> bool:
        """Whether a rank gets its next chunk while it works on the present one, since it takes little time."""
        return self._seconds_per_item is not None and self._seconds_per_item * self._limit <= 2 * CHUNK_SECONDS

    @property
    def has_waiting(self) -> bool:
        return bool(self._returned or self._delayed)

    @property
    def due_at(self) -> float | None:
        """When the next failed item can be tried again, if any."""
        return self._delayed[0][0] if self._delayed else None

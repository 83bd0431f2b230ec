"""Decides which items of `mpwatch.map` a rank gets next. No I/O, but it iterates over the user's items.

    items of the user --> take_chunk --> a rank --> a value of each item
                             ^             |
                             |             |-- it died at the first item without a value --> fail --> give up, or later again
                             `-------------'-- the items after that one: put_back

Items are taken in this order: failed items whose delay is over, items that were put back, new items.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.os_support.clock import monotonic
from mpwatch.watcher.restarts.restart_budget import FailedAttempt, RestartBudget, RestartDecision

MAX_CHUNKSIZE = 256
COLLECT_SECONDS = 0.02  # `items` may be slow, and ranks wait


@dataclass(eq=False)
class Task:
    index: int
    item: Any
    attempts: int = 0  # how many times the item has failed
    is_single: bool = False  # whether the item must be sent without other items
    budget: RestartBudget | None = None


class ItemQueue:
    """The items that no rank has at present. Ranks get at most `chunksize` items at once."""

    def __init__(self, items: Iterable[Any], *, chunksize: int | None, policy: RestartPolicy) -> None:
        self._new: Iterator[tuple[int, Any]] = enumerate(items)
        self._max_limit = chunksize or MAX_CHUNKSIZE
        self._policy = policy
        self._limit = chunksize or 1
        self._returned: deque[Task] = deque()
        self._delayed: list[tuple[float, int, Task]] = []  # a heap: due time, index
        self._next_index = 0
        self.is_exhausted = False  # whether all items have been taken once

    def take_chunk(self, end: int) -> list[Task]:
        if self._delayed and self._delayed[0][0] <= monotonic():
            return [heapq.heappop(self._delayed)[2]]
        if self._returned and self._returned[0].is_single:
            return [self._returned.popleft()]
        chunk: list[Task] = []
        while self._returned and not self._returned[0].is_single and len(chunk) < self._limit:
            chunk.append(self._returned.popleft())
        if chunk or self.is_exhausted:
            return chunk
        deadline = monotonic() + COLLECT_SECONDS
        while len(chunk) < self._limit and not self.is_exhausted and self._next_index < end:
            if chunk and monotonic() > deadline:
                break
            try:
                index, item = next(self._new)
            except StopIteration:
                self.is_exhausted = True
            else:
                self._next_index = index + 1
                chunk.append(Task(index, item))
        return chunk

    def put_back(self, tasks: Sequence[Task]) -> None:
        self._returned.extendleft(reversed(tasks))

    def fail(self, task: Task, failed_attempt: FailedAttempt) -> RestartDecision:
        """Try a failed item again later if the policy allows it. Raises what `retry_if` raises."""
        task.attempts += 1
        task.budget = task.budget or RestartBudget(self._policy)
        decision = task.budget.decide(failed_attempt)
        if decision.delay is not None:
            heapq.heappush(self._delayed, (monotonic() + decision.delay, task.index, task))
        return decision

    def enlarge_chunks(self, size: int) -> None:
        """A rank has done all items of a chunk of this size, in about 20 ms at most (worker/item_loop.py)."""
        self._limit = max(self._limit, min(2 * size, self._max_limit))

    def shrink_chunks(self, done: int) -> None:
        """A rank has done only so many items of a chunk in this time."""
        self._limit = max(1, done)

    @property
    def has_waiting(self) -> bool:
        return bool(self._returned or self._delayed)

    @property
    def due_at(self) -> float | None:
        """When the next failed item can be tried again, if any."""
        return self._delayed[0][0] if self._delayed else None

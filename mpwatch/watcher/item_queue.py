"""Decides which items of `mpwatch.map` a rank gets next. No I/O, but it iterates over the user's items.

    items of the user --> take_chunk --> a rank --> a value of each item
                             ^             |
                             |             |-- it died at the first item without a value --> fail --> give up, or later again
                             `-------------'-- the items after that one: put_back

What was put back, or waits for another try, comes before new items.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
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
    budget: RestartBudget | None = None


class ItemQueue:
    """The items that no rank has at present. Ranks get at most `chunksize` items at once."""

    def __init__(self, items: Iterable[Any], *, chunksize: int | None, policy: RestartPolicy) -> None:
        self._new: Iterator[tuple[int, Any]] = enumerate(items)
        self._next_index = 0
        self._is_exhausted = False  # there are no new items
        self._waiting: list[tuple[float, int, list[Task]]] = []  # a heap: when they are due, the index of the first
        self._policy = policy
        self._max_limit = chunksize or MAX_CHUNKSIZE
        self._limit = chunksize or 1

    @property
    def has_items(self) -> bool:
        return bool(self._waiting) or not self._is_exhausted

    @property
    def due_at(self) -> float:
        """When the next waiting items are due, by CLOCK_MONOTONIC, or infinity if none wait."""
        return self._waiting[0][0] if self._waiting else math.inf

    def take_chunk(self, end: int) -> list[Task]:
        """Of new items, take only those before the index `end`."""
        now = monotonic()
        if self.due_at <= now:
            _, _, waiting = heapq.heappop(self._waiting)
            self.put_back(waiting[self._limit :])
            return waiting[: self._limit]
        chunk: list[Task] = []
        while not self._is_exhausted and self._next_index < end and len(chunk) < self._limit:
            if chunk and monotonic() > now + COLLECT_SECONDS:
                break
            try:
                index, item = next(self._new)
            except StopIteration:
                self._is_exhausted = True
            else:
                self._next_index = index + 1
                chunk.append(Task(index, item))
        return chunk

    def put_back(self, tasks: list[Task], due_at: float = 0.0) -> None:
        """No other items are sent together with these."""
        if tasks:
            heapq.heappush(self._waiting, (due_at, tasks[0].index, tasks))

    def put_back_singly(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self.put_back([task])

    def fail(self, task: Task, failed_attempt: FailedAttempt) -> RestartDecision:
        """Try a failed item again later if the policy allows it. Raises what `retry_if` raises."""
        task.attempts += 1
        task.budget = task.budget or RestartBudget(self._policy)
        decision = task.budget.decide(failed_attempt)
        if decision.delay is not None:
            self.put_back([task], monotonic() + decision.delay)
        return decision

    def adapt_chunks(self, sent: int, done: int) -> None:
        """In about 20 ms at most, a rank has done so many of the items of a chunk (worker/item_loop.py)."""
        self._limit = max(self._limit, min(2 * sent, self._max_limit)) if done == sent else max(1, done)

"""Functions that the watcher thread calls at a time of CLOCK_MONOTONIC."""

import heapq
import math
from collections.abc import Callable


class Timers:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0  # functions that are due at the same time are called in their order

    @property
    def due_at(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def call_at(self, due_at: float, function: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (due_at, self._count, function))

    def run_due(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()

    def shift(self, seconds: float) -> None:
        self._heap = [(due_at + seconds, number, function) for due_at, number, function in self._heap]

"""Computes the numbers in the live view from the statuses of the ranks. Pure.

statuses of the ranks, again and again --> SnapshotBuilder.update --> Snapshot: overall progress, and a RankRow for each
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpwatch.results.model import RankStatus, WorkerState

RATE_SECONDS = 10.0  # a rate is the mean over this number of seconds
CPU_SECONDS = 2.0  # the same for CPU use, which the kernel counts in hundredths of a second
MIN_POINTS = 2  # a rate needs this number of points


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """How far a rank, a run or a map is. A value that is not known is None, here and below."""

    unit: str = "step"
    step: int | None = None
    total: int | None = None
    rate: float | None = None
    """Steps per second."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def fraction_done(self) -> float | None:
        if self.step is None or self.total is None or self.total <= 0:
            return None
        return min(1.0, max(0.0, self.step / self.total))

    @property
    def seconds_left(self) -> float | None:
        if self.step is None or self.total is None or not self.rate or self.step > self.total:
            return None
        return (self.total - self.step) / self.rate


@dataclass(frozen=True, kw_only=True)
class RankRow(StepProgress):
    status: RankStatus
    memory: int | None = None
    """In bytes."""
    cpu: float | None = None
    """The number of CPUs that the rank uses: 1.5 means one and a half."""

    @property
    def heartbeat_age(self) -> float | None:
        """Seconds since the last heartbeat of a running rank."""
        if self.status.heartbeat_at is None or not self.status.state.is_running:
            return None
        return max(0.0, self.status.seen_at - self.status.heartbeat_at)

    @property
    def sort_key(self) -> tuple[float, int, int]:
        """Put the slowest rank first, and ranks that report no `total` last."""
        return (math.inf if self.fraction_done is None else self.fraction_done), self.step or 0, self.status.rank


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    overall: StepProgress
    """Of the slowest running rank, as the others wait for it; if no rank runs, of the slowest of all. Metrics are means."""
    rows: Sequence[RankRow]
    """The ranks in order. It is empty before the rendezvous of several nodes."""
    elapsed: float | None = None
    """Seconds since the start. It is set at the end only."""
    shows_ranks: bool = True
    """If it is False, only the overall progress is shown."""

    @property
    def counts(self) -> dict[WorkerState, int]:
        """The number of ranks in each state, in the order of the states."""
        found = Counter(row.status.state for row in self.rows)
        return {state: found[state] for state in WorkerState if found[state]}


class SnapshotBuilder:
    """Makes snapshots, and keeps what later ones need, for example to compute rates."""

    def __init__(self) -> None:
        # By node, local rank and process. On several nodes, the global rank of the next process may differ.
        self._histories: dict[tuple[int, int, int | None], _RankHistory] = defaultdict(_RankHistory)

    def update(self, statuses: Sequence[RankStatus], elapsed: float | None = None) -> Snapshot:
        rows = [self._histories[status.node, status.local_rank, status.pid].update(status) for status in statuses]
        return Snapshot(overall=_find_overall_progress(rows), rows=rows, elapsed=elapsed)


class _RankHistory:
    def __init__(self) -> None:
        self._steps = RateEstimator(RATE_SECONDS)
        self._cpu = RateEstimator(CPU_SECONDS)
        self._memory: int | None = None

    def update(self, status: RankStatus) -> RankRow:
        report = status.report
        if report is not None and report.step is not None:
            self._steps.add(report.at, report.step)
        if status.cpu_seconds is not None:
            self._cpu.add(status.seen_at, status.cpu_seconds)
        self._memory = status.memory or self._memory  # it is 0 for a dead process
        return RankRow(
            status=status,
            step=report.step if report is not None else None,
            total=report.total if report is not None else None,
            rate=self._steps.rate(status.seen_at) if status.state.is_running else None,
            metrics=report.metrics if report is not None else {},
            memory=self._memory,
            cpu=self._cpu.rate(status.seen_at) if status.cpu_seconds is not None else None,
        )


class RateEstimator:
    """The growth of a value per second over the last `seconds`, or if that is too short, between the two newest values."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._points: deque[tuple[float, float]] = deque()

    def add(self, at: float, value: float) -> None:
        points = self._points
        if points and (value < points[-1][1] or at < points[-1][0]):  # the rank counts from the beginning again
            points.clear()
        if not points or at > points[-1][0]:
            points.append((at, value))
        while len(points) > MIN_POINTS and points[1][0] <= at - self._seconds:
            points.popleft()

    def rate(self, now: float) -> float | None:
        """The rate falls when no new value has arrived for a long time."""
        if len(self._points) < MIN_POINTS:
            return None
        (first_at, first), (last_at, last) = self._points[0], self._points[-1]
        return (last - first) / max(last_at - first_at, now - last_at)


def _find_overall_progress(rows: Sequence[RankRow]) -> StepProgress:
    with_steps = [row for row in rows if row.step is not None]
    slowest = min(
        [row for row in with_steps if row.status.state.is_running] or with_steps, key=lambda row: row.sort_key, default=None
    )
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.metrics.items():
            values.setdefault(name, []).append(value)
    metrics = {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
    if slowest is None:
        return StepProgress(metrics=metrics)
    return StepProgress(step=slowest.step, total=slowest.total, rate=slowest.rate, metrics=metrics)

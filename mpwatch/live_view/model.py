"""Compute the numbers in the live view, such as rates and the overall progress, from the statuses of the ranks.

    statuses of the ranks, again and again --> SnapshotBuilder.update --> Snapshot: OverallProgress, and a RankRow for each

The rate of steps is computed from the times at which the ranks reported their steps. All code in this module is pure.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mpwatch.results.model import WorkerState
from mpwatch.results.rank_status import RankStatus

RATE_SECONDS = 10.0  # a rate is the mean over this number of seconds
CPU_SECONDS = 2.0  # the same for CPU use, which the kernel counts in hundredths of a second
MIN_POINTS = 2  # a rate needs this number of points
MAX_SLOWEST = 3  # a summary names at most this number of slow ranks


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """The facts about one rank at one moment. A value that is not known is None."""

    rank: int
    state: WorkerState
    restart_count: int = 0
    must_report_step: bool = False
    """Whether the rank has reported steps before its restart, and no step after its restart."""
    step: int | None = None
    total: int | None = None
    rate: float | None = None
    """Steps per second."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    memory: int | None = None
    """The memory of the rank in bytes."""
    cpu: float | None = None
    """Number of CPUs that the rank uses. The value 1.5 means one and a half CPUs."""
    heartbeat_age: float | None = None
    """Seconds since the last heartbeat."""

    @property
    def fraction_done(self) -> float | None:
        """The part of the work that the rank has done: `step` divided by `total`, from 0 to 1."""
        if self.step is None or self.total is None or self.total <= 0:
            return None
        return min(1.0, max(0.0, self.step / self.total))


@dataclass(frozen=True, kw_only=True)
class OverallProgress:
    """The progress of the slowest running rank. The other ranks wait for the slowest rank.

    If no rank is running, the overall progress is the progress of the slowest of all ranks. After a restart the progress is
    not known until each restarted rank has reported a step again. Each metric is the mean over the ranks that report this
    metric.
    """

    unit: str = "step"
    """The name of one step in texts. It is "step" in a run and "item" in a map."""
    step: int | None = None
    total: int | None = None
    fraction_done: float | None = None
    rate: float | None = None
    seconds_left: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All data that a display shows at one moment."""

    overall: OverallProgress
    rows: Sequence[RankRow]
    """The ranks in order. It is empty before the rendezvous of several nodes."""
    shows_ranks: bool = True
    """If it is False, only the overall progress is shown."""

    @property
    def counts(self) -> dict[WorkerState, int]:
        """The number of ranks in each state, in the order of the states. States without ranks are left out."""
        found = Counter(row.state for row in self.rows)
        return {state: found[state] for state in WorkerState if found[state]}


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """A summary of the facts about many ranks. A value that is not known is None."""

    steps: tuple[int, int, int] | None
    """The minimum, the median and the maximum of the ranks' steps."""
    slowest: Sequence[RankRow]
    """The slowest running ranks. It is empty if all have the same progress."""
    total_memory: int | None
    """The memory of all ranks in bytes."""
    max_memory: int | None
    """The memory of the rank that uses the most memory, in bytes."""
    cpu: float | None
    """Number of CPUs that all ranks use together."""
    max_heartbeat_age: float | None
    """The greatest `heartbeat_age` of a rank, in seconds."""


class SnapshotBuilder:
    """Makes snapshots, and keeps data of earlier statuses that later snapshots need, for example to compute rates."""

    def __init__(self) -> None:
        # The key is the node and the local rank, since the global rank of the next process may differ on several nodes.
        self._histories: dict[tuple[int, int], _RankHistory] = {}

    def update(self, statuses: Sequence[RankStatus]) -> Snapshot:
        """Return the snapshot for these statuses."""
        rows = [self._history_of(status).update(status) for status in statuses]
        return Snapshot(overall=_find_overall_progress(rows), rows=rows)

    def _history_of(self, status: RankStatus) -> "_RankHistory":
        key = status.node, status.local_rank
        history = self._histories.get(key)
        if history is None or history.pid != status.pid:  # the first status of this process
            must_report_step = history is not None and history.has_steps
            history = self._histories[key] = _RankHistory(status.pid, must_report_step=must_report_step)
        return history


class _RankHistory:
    """The data that a SnapshotBuilder keeps about one process of a rank."""

    def __init__(self, pid: int | None, *, must_report_step: bool) -> None:
        self.pid = pid
        self.has_steps = must_report_step  # whether this process or an earlier process of the rank has reported a step
        self._must_report_step = must_report_step
        self._steps = RateEstimator(RATE_SECONDS)
        self._cpu = RateEstimator(CPU_SECONDS)
        self._memory: int | None = None

    def update(self, status: RankStatus) -> RankRow:
        report = status.report
        if report is not None and report.step is not None:
            self._steps.add(report.at, report.step)
            self.has_steps, self._must_report_step = True, False
        if status.cpu_seconds is not None:
            self._cpu.add(status.seen_at, status.cpu_seconds)
        if status.memory:  # it is 0 for a dead process
            self._memory = status.memory
        is_running = status.state.is_running
        heartbeat_age = None if status.heartbeat_at is None else max(0.0, status.seen_at - status.heartbeat_at)
        return RankRow(
            rank=status.rank,
            state=status.state,
            restart_count=status.restart_count,
            must_report_step=self._must_report_step,
            step=report.step if report is not None else None,
            total=report.total if report is not None else None,
            rate=self._steps.rate(status.seen_at) if is_running else None,
            metrics=report.metrics if report is not None else {},
            memory=self._memory,
            cpu=self._cpu.rate(status.seen_at) if status.cpu_seconds is not None else None,
            heartbeat_age=heartbeat_age if is_running else None,
        )


class RateEstimator:
    """Computes the growth rate of a value over the last `seconds`.

    If fewer than two values have arrived within `seconds`, the rate is computed from the two newest values.
    """

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
        """Return the growth per second.

        The rate falls when no new value has arrived for a long time.
        """
        if len(self._points) < MIN_POINTS:
            return None
        (first_at, first), (last_at, last) = self._points[0], self._points[-1]
        return (last - first) / max(last_at - first_at, now - last_at)


def summarize_ranks(rows: Sequence[RankRow]) -> RankSummary:
    """Return a summary of the ranks."""
    steps = sorted(row.step for row in rows if row.step is not None)
    running = sorted((row for row in rows if row.state.is_running and row.step is not None), key=_progress_key)
    is_uneven = bool(running) and _progress_key(running[0])[:2] != _progress_key(running[-1])[:2]
    memory = [row.memory for row in rows if row.memory is not None]
    return RankSummary(
        steps=(steps[0], steps[len(steps) // 2], steps[-1]) if steps else None,
        slowest=running[:MAX_SLOWEST] if is_uneven else [],
        total_memory=sum(memory) if memory else None,
        max_memory=max(memory, default=None),
        cpu=_sum_known(row.cpu for row in rows),
        max_heartbeat_age=max((row.heartbeat_age for row in rows if row.heartbeat_age is not None), default=None),
    )


def _find_overall_progress(rows: Sequence[RankRow]) -> OverallProgress:
    with_steps = [row for row in rows if row.step is not None]
    slowest = min([row for row in with_steps if row.state.is_running] or with_steps, key=_progress_key, default=None)
    metrics = _mean_metrics(row.metrics for row in rows)
    if slowest is None or any(row.must_report_step and _has_not_ended(row) for row in rows):
        return OverallProgress(metrics=metrics)
    return OverallProgress(
        step=slowest.step,
        total=slowest.total,
        fraction_done=slowest.fraction_done,
        rate=slowest.rate,
        seconds_left=_seconds_left(slowest),
        metrics=metrics,
    )


def _has_not_ended(row: RankRow) -> bool:
    return row.state is WorkerState.INIT or row.state.is_running


def _progress_key(row: RankRow) -> tuple[float, int, int]:
    """Return a sort key that puts the slowest rank first. Ranks that report no `total` come after all other ranks."""
    assert row.step is not None
    return (math.inf if row.fraction_done is None else row.fraction_done), row.step, row.rank


def _seconds_left(row: RankRow) -> float | None:
    if row.step is None or row.total is None or not row.rate or row.step > row.total:
        return None
    return (row.total - row.step) / row.rate


def _mean_metrics(all_metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for metrics in all_metrics:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def _sum_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None

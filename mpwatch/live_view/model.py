"""What is to be shown, from how the ranks fared at one look after another: rates, the bar, what is left to do. Pure.

    RankStatus of each look --> Tracker.see --> Picture:  the overall line, and a Line for each rank

Rates come of the ranks' own stamps, so that it does not matter when they are looked at.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mpwatch.results.model import WorkerState
from mpwatch.results.rank_status import RankStatus

RATE_SECONDS = 10.0  # that a rate is the mean of
CPU_SECONDS = 2.0  # the same for the use of the CPU, which the kernel counts in hundredths of a second
A_SLOPE = 2  # points at least
SLOWEST = 3  # ranks that are named where there are too many for a line each


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """Of one rank. What is not known is None."""

    rank: int
    state: WorkerState
    restart_count: int = 0
    is_anew: bool = False
    """It reported steps before it was started again, and has yet to say where it goes on."""
    step: int | None = None
    total: int | None = None
    rate: float | None = None
    """Steps a second."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    memory: int | None = None
    """In bytes."""
    cpu: float | None = None
    """CPUs that it keeps busy."""
    silence: float | None = None
    """Seconds since it was last heard of."""

    @property
    def done(self) -> float | None:
        """The fraction of its steps."""
        if self.step is None or self.total is None or self.total <= 0:
            return None
        return min(1.0, max(0.0, self.step / self.total))


@dataclass(frozen=True, kw_only=True)
class OverallProgress:
    """How far all have come: as far as the one that is furthest behind of those at work, for the others wait for it, or will
    have to, and nothing is over before it is. While one that was started again has yet to say where it goes on nobody knows.
    Metrics are the means of those that report them.
    """

    step: int | None = None
    total: int | None = None
    done: float | None = None
    rate: float | None = None
    seconds_left: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that there is to show."""

    overall: OverallProgress
    lines: Sequence[RankRow]
    """By rank."""

    @property
    def counts(self) -> dict[WorkerState, int]:
        """How many ranks are in each state, in the order of the states; those that none is in are not there."""
        found = Counter(line.state for line in self.lines)
        return {state: found[state] for state in WorkerState if found[state]}


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """Of many ranks together."""

    steps: tuple[int, int, int] | None
    """The least, the one in the middle, the most."""
    slowest: Sequence[RankRow]
    """Those at work that are furthest behind, if not all are equally far."""
    memory: int | None
    """Of all together, in bytes; and the most of one."""
    most_memory: int | None
    cpu: float | None
    """CPUs that all of them keep busy."""
    silence: float | None
    """Of the one that was heard of least recently, in seconds."""


class Tracker:
    """Remembers as much of the earlier looks as the next picture needs."""

    def __init__(self) -> None:
        self._lives: dict[
            int, _RankHistory
        ] = {}  # by local rank: among several nodes another one may have the rank next time

    def see(self, statuses: Sequence[RankStatus]) -> Snapshot:
        """The picture of now."""
        lines = [self._life_of(status).see(status) for status in statuses]
        return Snapshot(overall=_overall(lines), lines=lines)

    def _life_of(self, status: RankStatus) -> "_RankHistory":
        life = self._lives.get(status.local_rank)
        if life is None or life.pid != status.pid:  # it was started again
            life = self._lives[status.local_rank] = _RankHistory(status.pid, is_anew=life is not None and life.has_steps)
        return life


class _RankHistory:
    """What was seen of a rank in its present life."""

    def __init__(self, pid: int | None, *, is_anew: bool) -> None:
        self.pid = pid
        self.has_steps = is_anew  # in this life or an earlier one
        self._is_anew = is_anew
        self._steps = _RateEstimator(RATE_SECONDS)
        self._cpu = _RateEstimator(CPU_SECONDS)
        self._memory: int | None = None

    def see(self, status: RankStatus) -> RankRow:
        report = status.report
        if report is not None and report.step is not None:
            self._steps.add(report.at, report.step)
            self.has_steps, self._is_anew = True, False
        if status.cpu_seconds is not None:
            self._cpu.add(status.seen_at, status.cpu_seconds)
        if status.memory:  # a dead one has none
            self._memory = status.memory
        is_at_work = status.state.is_running
        silence = None if status.heartbeat_at is None else max(0.0, status.seen_at - status.heartbeat_at)
        return RankRow(
            rank=status.rank,
            state=status.state,
            restart_count=status.restart_count,
            is_anew=self._is_anew,
            step=report.step if report is not None else None,
            total=report.total if report is not None else None,
            rate=self._steps.rate(status.seen_at) if is_at_work else None,
            metrics=report.metrics if report is not None else {},
            memory=self._memory,
            cpu=self._cpu.rate(status.seen_at) if status.cpu_seconds is not None else None,
            silence=silence if is_at_work else None,
        )


class _RateEstimator:
    """How fast something grows: over so many seconds, or, if it is told more seldom, from one time to the next."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._points: deque[tuple[float, float]] = deque()

    def add(self, at: float, value: float) -> None:
        points = self._points
        if points and (value < points[-1][1] or at < points[-1][0]):  # it counts anew
            points.clear()
        if not points or at > points[-1][0]:
            points.append((at, value))
        while len(points) > A_SLOPE and points[1][0] <= at - self._seconds:
            points.popleft()

    def rate(self, now: float) -> float | None:
        """A second. If there was nothing new for longer than all that is remembered, it falls from then on."""
        if len(self._points) < A_SLOPE:
            return None
        (first_at, first), (last_at, last) = self._points[0], self._points[-1]
        return (last - first) / max(last_at - first_at, now - last_at)


def spread_of(lines: Sequence[RankRow]) -> RankSummary:
    """What is told of ranks that are too many for a line each."""
    steps = sorted(line.step for line in lines if line.step is not None)
    at_work = sorted((line for line in lines if line.state.is_running and line.step is not None), key=_how_far)
    is_uneven = bool(at_work) and _how_far(at_work[0])[:2] != _how_far(at_work[-1])[:2]
    memory = [line.memory for line in lines if line.memory is not None]
    return RankSummary(
        steps=(steps[0], steps[len(steps) // 2], steps[-1]) if steps else None,
        slowest=at_work[:SLOWEST] if is_uneven else [],
        memory=sum(memory) if memory else None,
        most_memory=max(memory, default=None),
        cpu=_sum(line.cpu for line in lines),
        silence=max((line.silence for line in lines if line.silence is not None), default=None),
    )


def _overall(lines: Sequence[RankRow]) -> OverallProgress:
    counting = [line for line in lines if line.step is not None]
    hindmost = min([line for line in counting if line.state.is_running] or counting, key=_how_far, default=None)
    metrics = _means(line.metrics for line in lines)
    if hindmost is None or any(line.is_anew and _is_under_way(line) for line in lines):
        return OverallProgress(metrics=metrics)
    return OverallProgress(
        step=hindmost.step,
        total=hindmost.total,
        done=hindmost.done,
        rate=hindmost.rate,
        seconds_left=_seconds_left(hindmost),
        metrics=metrics,
    )


def _is_under_way(line: RankRow) -> bool:
    return line.state is WorkerState.INIT or line.state.is_running


def _how_far(line: RankRow) -> tuple[float, int, int]:
    """Those that know how much there is to do by the fraction of it, before those that do not."""
    assert line.step is not None
    return (math.inf if line.done is None else line.done), line.step, line.rank


def _seconds_left(line: RankRow) -> float | None:
    if line.step is None or line.total is None or not line.rate or line.step > line.total:
        return None
    return (line.total - line.step) / line.rate


def _means(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for metrics in found:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None

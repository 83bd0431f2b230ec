"""How each rank fares at one moment, as the watcher sees it, for who shows that. Frozen data, and no I/O.

Times are of CLOCK_MONOTONIC, in seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpwatch.results.model import WorkerState


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank last said by `mpwatch.report()`."""

    at: float
    """When it did."""
    step: int | None = None
    total: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Of one rank."""

    rank: int
    """Global rank."""
    local_rank: int
    state: WorkerState
    """INIT until its function is called; HEALTHY at work, or UNHEALTHY if late with its heartbeat; then SUCCEEDED, FAILED,
    or STOPPED by the watcher."""
    restart_count: int = 0
    pid: int | None = None
    report: Report | None = None
    """None if it has made none."""
    heartbeat_at: float | None = None
    """When it was last heard of; None if it has never beaten, or its function has returned."""
    memory: int | None = None
    """Bytes of it that are in memory, those that it shares with others included; None if nobody knows."""
    cpu_seconds: float | None = None
    """CPU time that it has used since it was started."""
    seen_at: float
    """When all that was so."""

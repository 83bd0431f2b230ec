"""The status of a rank at one moment, for the live view. Frozen data, without I/O.

All times in this module are seconds of CLOCK_MONOTONIC.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpwatch.results.model import Lateness, WorkerState


@dataclass(frozen=True, kw_only=True)
class RankReport:
    at: float
    """The time at which the rank called `mpwatch.report()`."""
    step: int | None = None
    total: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    rank: int
    """Global rank."""
    local_rank: int
    state: WorkerState
    """It is INIT until the function is called. While the function runs, it is HEALTHY, or UNHEALTHY if the heartbeat is
    late. After that it is SUCCEEDED, FAILED, or STOPPED if the watcher stopped the rank."""
    restart_count: int = 0
    pid: int | None = None
    report: RankReport | None = None
    """The last report. It is None if the rank has not called `report()`."""
    heartbeat_at: float | None = None
    """Time of the last heartbeat. It is None if there was no heartbeat yet, or if the function has returned."""
    memory: int | None = None
    """Resident memory in bytes, shared pages included. It is None if it is not known."""
    cpu_seconds: float | None = None
    """CPU time that the process has used, in seconds. It is None if it is not known."""
    lateness: Lateness | None = None
    """Set if the other ranks wait for this one in most collectives."""
    seen_at: float
    """The time at which the watcher read this status."""
    node: int = 0
    """Number of the node, in a view of several nodes."""

"""The status of a rank at one moment, for the live view. Frozen data, without I/O.

Times are seconds of CLOCK_MONOTONIC.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpwatch.results.model import WorkerState


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The last `mpwatch.report()` of a rank."""

    at: float
    """When the rank called it."""
    step: int | None = None
    total: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The status of one rank."""

    rank: int
    """Global rank."""
    local_rank: int
    state: WorkerState
    """INIT until the function is called. While it runs: HEALTHY, or UNHEALTHY if the heartbeat is late. Then SUCCEEDED,
    FAILED, or STOPPED if the watcher stopped the rank."""
    restart_count: int = 0
    pid: int | None = None
    report: RankReport | None = None
    """None: the rank has not called `report()`."""
    heartbeat_at: float | None = None
    """Time of the last heartbeat. None: there was no heartbeat yet, or the function has returned."""
    memory: int | None = None
    """Resident memory in bytes, shared pages included. None: not known."""
    cpu_seconds: float | None = None
    """CPU time that the process has used. None: not known."""
    seen_at: float
    """When this status was read."""
    node: int = 0
    """Number of the node, in a view of several nodes."""

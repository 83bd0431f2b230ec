"""The states of ranks and runs, and what is known about one attempt. Frozen data, without I/O.

texts  <--  collective, places  <--  failure  <--  model  <--  events.types, report  <--  run_result
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from mpwatch.results.failure import ProcessFailure, format_root_cause
from mpwatch.wire.shared_memory import Report


class WorkerState(Enum):
    """The state of a rank, a run or a WorkerGroup. The names of the states are the same as in torch.distributed.elastic.

    Attributes:
        UNKNOWN: the ranks are being started.
        INIT: there is a process for each rank, and not all of them are ready.
        HEALTHY: all ranks are ready, or run their function.
        UNHEALTHY: a rank is late with its heartbeat. Or a rank has failed, and the other ranks are being stopped.
        STOPPED: the run was stopped, or the group was closed. As the state of one rank, it means that the watcher
            stopped the rank.
        SUCCEEDED: all ranks have returned.
        FAILED: a rank has failed, and is not restarted.
    """

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def is_running(self) -> bool:
        """Whether ranks in this state run their function. The property is True for HEALTHY and UNHEALTHY."""
        return self in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a rank passed to its last call of `mpwatch.report()`.

    Attributes:
        step: number of steps done. It is None if the rank has not reported it.
        total: number of all steps. It is None if the rank has not reported it.
        metrics: the other numbers, by name.
        elapsed: seconds from the start of the run to this report.
    """

    step: int | None
    total: int | None
    metrics: Mapping[str, float]
    elapsed: float


def make_progress(report: Report, run_started_at: float) -> Progress:
    elapsed = max(0.0, report.at - run_started_at)
    return Progress(step=report.step, total=report.total, metrics=report.metrics, elapsed=elapsed)


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """The slow rank: the one for which the others wait in the collectives of torch.distributed.

    `str(lateness)` is a sentence such as "rank 3 kept the others waiting for 42 % of the time (data.py:41 in load)". mpwatch
    reads the records of torch's flight recorder every few seconds, so it may not see all collectives.

    Attributes:
        rank: the slow rank, as a global rank.
        share: the share of the time that each other rank waits in collectives, at least, beyond what the slow rank waits.
            The run would take that much less if the slow rank were as quick as the next one.
        place: the line of the user's code where the rank was most often when the others waited for it, such as "data.py:41
            in load". It is empty if it is not known.
        stack: the stack of its main thread there, once, with the most recent call first, in the format of faulthandler.
    """

    rank: int
    share: float
    place: str = ""
    stack: str = field(default="", repr=False)

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"rank {self.rank} kept the others waiting for {self.share * 100:.0f} % of the time{place}"


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The status of a rank at one moment, for the live view. All times are seconds of CLOCK_MONOTONIC."""

    rank: int
    """Global rank."""
    local_rank: int
    state: WorkerState
    """It is INIT until the function is called. While the function runs, it is HEALTHY, or UNHEALTHY if the heartbeat is
    late. After that it is SUCCEEDED, FAILED, or STOPPED if the watcher stopped the rank."""
    restart_count: int = 0
    pid: int | None = None
    report: Report | None = None
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


@dataclass(frozen=True, kw_only=True, repr=False)
class Attempt:
    """One start of ranks, with its duration and its outcome.

    With scope="group", an attempt contains all ranks. With scope="worker", an attempt contains only one rank. `str(attempt)`
    is a sentence such as "first start, 1.2 s: rank 3 was killed by SIGKILL".

    Attributes:
        number: how often these ranks had been started before. It is 0 for the first attempt. In the ranks it is
            `restart_count`.
        ranks: the global ranks of the attempt.
        started_at: the time of the start, in seconds since 1970 (UTC).
        elapsed: seconds from the start of the ranks to the end of the last rank.
        state: SUCCEEDED, FAILED or STOPPED.
        failures: the failures by global rank.
        root_cause: the failure that came first. It is None if no rank failed, or if the timeout expired.
        reason: what ended the attempt, if no failure ended it: the timeout, or a signal to the calling program. Otherwise it
            is empty.
        is_counted: whether the start of the attempt counts as one of the restarts that the policy allows. It is False for
            the first attempt, and after nodes have joined or left a job.
    """

    number: int
    ranks: tuple[int, ...]
    started_at: float
    elapsed: float
    state: WorkerState
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    root_cause: ProcessFailure | None = None
    reason: str = ""
    is_counted: bool = False

    @property
    def name(self) -> str:
        """The number and the duration of the attempt as a text, such as `restart 2, 1.5 s`."""
        which = f"restart {self.number}" if self.is_counted else f"start {self.number + 1}" if self.number else "first start"
        return f"{which}, {self.elapsed:.1f} s"

    def __repr__(self) -> str:
        return f"<Attempt {self.number}: {self}>"

    def __str__(self) -> str:
        return f"{self.name}: {format_end(self.root_cause, self.reason) or self.state.name}"


def format_end(root_cause: ProcessFailure | None, reason: str) -> str:
    return reason if root_cause is None else format_root_cause(root_cause)

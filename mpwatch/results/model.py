"""The data of a run that has ended: states, failures, attempts, and the return values by rank.

The watcher creates these objects in the caller's process. This module does no I/O. The modules that make text, HTML and
traces import only these types. run_result.py imports those modules:

    places  <--  failure  <--  model
    model  <--  events.types  <--  events.chrome_trace  <--  run_result
    model  <--  report        <--  html          <--  run_result
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from mpwatch.options.worker_info import Worker
from mpwatch.results.collective import Collective
from mpwatch.results.failure import ProcessFailure

T = TypeVar("T")


class WorkerState(Enum):
    """The state of a rank, or of all ranks together. The names are those of torch.distributed.elastic."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def is_running(self) -> bool:
        """Whether ranks in this state run their function: HEALTHY or UNHEALTHY."""
        return self in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The last `mpwatch.report()` of a rank."""

    step: int | None
    """Steps done. None: not reported."""
    total: int | None
    """Steps to do in all. None: not reported."""
    metrics: Mapping[str, float]
    """The other numbers, by name."""
    elapsed: float
    """Seconds from the start of the run to this report."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of ranks until all of them are gone: of all ranks, or of one rank that is restarted alone."""

    number: int
    """How often these ranks had been started before: 0 for the first attempt. The ranks know it as `restart_count`."""
    ranks: tuple[int, ...]
    """Global ranks."""
    started_at: float
    """Seconds since 1970 (UTC)."""
    elapsed: float
    """Seconds from the start of the ranks to the end of the last one."""
    state: WorkerState
    """SUCCEEDED, FAILED or STOPPED."""
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    """The failures by global rank."""
    root_cause: ProcessFailure | None = None
    """The failure that came first. None: no rank failed, or the timeout expired."""
    reason: str = ""
    """What ended the attempt, if no failure did: the timeout, or a signal to the host program. Else empty."""


@dataclass(frozen=True, repr=False)
class RunData(Generic[T]):
    """Everything known about a run that has ended, except its events. `mpwatch.run` returns its subclass `RunResult`.

    There are two classes because the modules that make text, HTML and traces import this one, and `RunResult` imports them.
    """

    state: WorkerState
    """SUCCEEDED, FAILED, or STOPPED. STOPPED: a signal to the host program ended the run."""
    return_values: Mapping[int, T] = field(default_factory=dict)
    """The return values by global rank. Empty unless all ranks succeeded. With `keep_going`: of all ranks that returned."""
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    """The failures by global rank."""
    root_cause: ProcessFailure | None = None
    """The failure that came first. None: no rank failed, or the timeout expired."""
    workers: tuple[Worker, ...] = ()
    """The ranks, in order."""
    worker_states: Mapping[int, WorkerState] = field(default_factory=dict)
    """The state by global rank: SUCCEEDED, FAILED, or STOPPED if the watcher stopped the rank."""
    progress: Mapping[int, Progress] = field(default_factory=dict)
    """The last `mpwatch.report()` by global rank. Ranks without a report are missing."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """The Python stacks by global rank, of the ranks that were running just before the watcher stopped them. The main thread
    and the innermost frames are first. Instead of stacks there may be a line that says why there are none. Ranks that wrote
    no stacks in time are missing."""
    collectives: Mapping[int, Collective] = field(default_factory=dict)
    """The collective of torch.distributed that each rank waited in, or else its last one, by global rank. Only if the run
    did not succeed, and of ranks that have a process group and answered in time. Torch's flight recorder has them."""
    helpers_oom: str = ""
    """Text that shows that the kernel's out-of-memory killer killed a process that is no rank. Else empty. The process may
    be one that a rank had started, such as a DataLoader's worker, or another one in the same memory cgroup."""
    reason: str = ""
    """What ended the run, if no failure did: the timeout, or a signal to the host program. Else empty."""
    log_dir: str = ""
    """The folder of the log files: a file for each attempt, rank and stream. Empty without log files. See `LogSpec`."""
    attempts: tuple[Attempt, ...] = ()
    """All attempts, in the order in which they ended. All other fields, except `RunResult.events`, describe the last attempt
    of each rank."""
    not_restarted: str = ""
    """Why failed ranks were not restarted, if restarts were allowed. Else empty."""
    keep_going: bool = False
    """Whether ranks that failed did not stop the others."""
    dropped_values: tuple[int, ...] = ()
    """The ranks whose return values were dropped, since another rank failed. `keep_going` would have kept these values. A
    rank that returned None does not count."""

    @property
    def restarts(self) -> int:
        """How often ranks were restarted."""
        return sum(attempt.number > 0 for attempt in self.attempts)

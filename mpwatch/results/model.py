"""The data of a run that has ended: states, failures, attempts, and the return values by rank.

This module does no I/O. The modules that make text, HTML and traces import the types of this module, and run_result.py
imports those modules:

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
from mpwatch.results.failure import ProcessFailure, format_root_cause

T = TypeVar("T")


class WorkerState(Enum):
    """The state of a rank, a run or a WorkerGroup. The names of the states are the same as in torch.distributed.elastic.

    Attributes:
        UNKNOWN: the ranks are being started.
        INIT: there is a process for each rank, and not all of them are ready.
        HEALTHY: all ranks are ready, or run their function.
        UNHEALTHY: a rank is late with its heartbeat. Or a rank has failed, and the other ranks are being stopped.
        STOPPED: the run was interrupted, or the group was closed. As the state of one rank, it means that the watcher
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


@dataclass(frozen=True, kw_only=True)
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

    def __str__(self) -> str:
        what = self.reason or self.state.name if self.root_cause is None else format_root_cause(self.root_cause)
        return f"{self.name}: {what}"


# There are two classes because the modules that make text, HTML and traces import this one, and `RunResult` imports them.
@dataclass(frozen=True, repr=False)
class RunData(Generic[T]):
    """Everything known about a run that has ended, except its events. The subclass `RunResult` has the events, too.

    Attributes:
        state: SUCCEEDED, FAILED, or STOPPED. It is STOPPED if a signal to the calling program ended the run.
        return_values: the return values by global rank, of the ranks that have returned. After a failure, too, it has the
            values of the ranks that had returned before. In a job of several nodes, it has the values of this node's ranks
            only, except in a job that was started on a cluster by one call.
        failures: the failures by global rank.
        root_cause: the failure that came first. It is None if no rank failed, or if the timeout expired.
        workers: the ranks, in order.
        worker_states: the state by global rank: SUCCEEDED, FAILED, or STOPPED if the watcher stopped the rank.
        progress: the last `mpwatch.report()` by global rank. Ranks without a report are missing.
        stacks: the Python stacks of the ranks that the watcher stopped, by global rank. The stacks are from the moment just
            before the watcher stopped the rank. The main thread and the innermost frames are first. Instead of stacks, there
            may be a line that says why there are no stacks. Ranks that wrote no stacks in time are missing.
        collectives: the collective of torch.distributed in which each rank waited, or otherwise the last collective of the
            rank, by global rank. It is empty if the run succeeded. Ranks without a process group, and ranks that did not
            answer in time, are missing. The data comes from torch's flight recorder.
        reason: what ended the run, if no failure ended it: the timeout, or a signal to the calling program. Otherwise it is
            empty.
        log_dir: the folder of the log files, with a file for each attempt, rank and stream. It is empty without log files.
            See `LogSpec`.
        attempts: all attempts, in the order in which they ended. All other fields, except `RunResult.events`, describe the
            last attempt of each rank.
        notes: sentences for people, which are also lines of the report: why failed ranks were not restarted, that ranks of a
            WorkerGroup have ended with this call, that a value could not be rebuilt, or that the kernel's out-of-memory
            killer killed a process that is not a rank.
        keep_going: whether the run went on with the other ranks after a rank had failed.
        stopped_at: the step at which `should_stop` returned True after a request to stop. It is None if `should_stop`
            returned True on no rank. With scope="worker", each rank has its own step, and this is the highest of these
            steps.
        stop_cause: what requested the stop, such as "SIGUSR1", "request_stop() in rank 3" or "StopPolicy(after=3600)". It is
            empty if nothing requested a stop. If all ranks returned before they called `should_stop` again, there is a
            `stop_cause`, but `stopped_at` is None.
        elapsed: seconds of the whole run, from its start to the exit of its last rank, with all restarts. For a call of a
            WorkerGroup, it is the time of the call. For a job on a cluster, it is the time of the node that took longest.
    """

    state: WorkerState
    return_values: Mapping[int, T] = field(default_factory=dict)
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    root_cause: ProcessFailure | None = None
    workers: tuple[Worker, ...] = ()
    worker_states: Mapping[int, WorkerState] = field(default_factory=dict)
    progress: Mapping[int, Progress] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)
    collectives: Mapping[int, Collective] = field(default_factory=dict)
    reason: str = ""
    log_dir: str = ""
    attempts: tuple[Attempt, ...] = ()
    notes: tuple[str, ...] = ()
    keep_going: bool = False
    stopped_at: int | None = None
    stop_cause: str = ""
    elapsed: float = 0.0

    @property
    def restarts(self) -> int:
        """The number of restarts in this run. A restart of all ranks together counts as one restart.

        If nodes have joined or left a job, the next start of the ranks does not count as a restart.
        """
        return sum(attempt.is_counted for attempt in self.attempts)

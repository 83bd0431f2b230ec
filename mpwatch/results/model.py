"""Plain data about a run that has ended: states, failures, attempts, and the values by rank.

The watcher creates these objects in the caller's process. This module does no I/O. It imports `wire` only to pickle
exceptions. The modules that make text, HTML and traces need only these types. `RunResult` is built on top of them:

    model  <--  events.types  <--  events.chrome_trace  <--  run_result
    model  <--  report        <--  html          <--  run_result
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from mpwatch.options.worker_info import Worker
from mpwatch.wire.exceptions import decoder
from mpwatch.wire.exceptions.encoder import ExceptionEncoder

T = TypeVar("T")


class WorkerState(Enum):
    """The state of a rank, or of all ranks together, in the words of torch.distributed.elastic."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def is_running(self) -> bool:
        """Whether ranks in this state are at work: HEALTHY or UNHEALTHY."""
        return self in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


class FailureKind(Enum):
    """Why a rank has no result."""

    EXCEPTION = "EXCEPTION"  # its function raised, or its value could not be sent back
    EXIT = "EXIT"  # it ended by an exit code of its own
    SIGNAL = "SIGNAL"  # a signal that the watcher did not send killed it
    OOM = "OOM"  # the kernel's out-of-memory killer killed it, and that is proved
    HANG = "HANG"  # it was silent for longer than `heartbeat_timeout`, or kept its peers waiting in a collective
    START = "START"  # it never came to call the function
    LOST = "LOST"  # it ended with status 0 or an unknown one, and left no result
    TIMEOUT = "TIMEOUT"  # it was still at work when `timeout` ran out


@dataclass(frozen=True, kw_only=True)
class ProcessFailure:
    """One rank that failed, by itself or as a victim of another (`is_secondary`). Not one that the watcher stopped."""

    rank: int
    """Global rank."""
    local_rank: int
    pid: int | None
    """Process id, unique only while the rank lived."""
    hostname: str
    group_rank: int | None = None
    """Number of its node, in a job of several."""
    kind: FailureKind
    exit_code: int
    """The status a shell would show: 1 for an exception, SystemExit's own code, 128 + n for signal n."""
    signal: int | None = None
    """Number of the signal that killed the rank, if one did."""
    exception: BaseException | None = None
    """The rank's own exception, with its cause, context, notes and frames."""
    summary: str = ""
    """The exception's type and text, as the rank told them."""
    traceback: str = ""
    """The traceback as the rank itself would have printed it, with source lines; empty if there was no exception."""
    stack: str = ""
    """Where the rank was when it crashed, hung or ran out of time: its Python stacks, innermost frame first, in
    faulthandler's words, with source lines."""
    stderr: str = ""
    """The last lines of its stderr, where the option `logs` has the watcher see it; and what the interpreter printed, if it
    never became ready."""
    log_files: Mapping[str, str] = field(default_factory=dict)
    """Paths of the files with all that it has written, by stream: "stdout", "stderr". See `LogSpec`."""
    evidence: str = ""
    """What else is known of the cause: what proves an OOM or makes one likely, for example."""
    is_secondary: bool = False
    """True for a consequence of another failure: it only says that a peer had gone, or was silent as it waited for one."""
    elapsed: float = 0.0
    """Seconds from the start of the run to the failure; for a silent rank, to when it was last heard of."""

    def __getstate__(self) -> dict[str, Any]:
        """As pickle wants it: the exception link by link, since many cannot be pickled as they are."""
        state = dict(self.__dict__)
        if self.exception is not None:
            telling = ExceptionEncoder(self.exception)
            state["exception"] = (telling.plain(), telling.details())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["exception"] is not None:
            state = {**state, "exception": decoder.decode(*state["exception"])}
        self.__dict__.update(state)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a rank last said by `mpwatch.report()`."""

    step: int | None
    """Steps done."""
    total: int | None
    """Steps to do."""
    metrics: Mapping[str, float]
    elapsed: float
    """Seconds from the start of the run to this report."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One life of the ranks, from their start to their end: of all of them, or of one that was replaced."""

    number: int
    """How often these ranks had been started before: `restart_count`."""
    ranks: tuple[int, ...]
    """Global ranks."""
    started_at: float
    """In seconds since 1970 (UTC)."""
    elapsed: float
    """Seconds from the start to the end of the last of them."""
    state: WorkerState
    """SUCCEEDED, FAILED or STOPPED."""
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    """By global rank."""
    root_cause: ProcessFailure | None = None
    """The failure that came first; None if there was none, or no single one (a timeout)."""
    reason: str = ""
    """What ended it, where no rank did: the timeout, or a signal to the watcher."""


@dataclass(frozen=True, repr=False)
class RunData(Generic[T]):
    """Everything known about a run that has ended, except its events: the fields of `RunResult`."""

    state: WorkerState
    """SUCCEEDED, FAILED, or STOPPED for a run that was interrupted from outside."""
    return_values: Mapping[int, T] = field(default_factory=dict)
    """By global rank, all or nothing: empty unless every rank succeeded."""
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    """By global rank: the ranks that failed."""
    root_cause: ProcessFailure | None = None
    """The failure that came first; None if there was none, or no single one (a timeout)."""
    workers: tuple[Worker, ...] = ()
    worker_states: Mapping[int, WorkerState] = field(default_factory=dict)
    """By global rank: SUCCEEDED, FAILED, or STOPPED by the watcher."""
    progress: Mapping[int, Progress] = field(default_factory=dict)
    """By global rank, the last report of those that made any."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """By global rank: where the ranks still at work were just before they were stopped, all threads, the main thread first,
    innermost frame first; or a line that says why there is none. Not in it: ranks that gave none in time."""
    helpers_oom: str = ""
    """What shows that the kernel's out-of-memory killer struck during the run, if it was not a rank that it killed: a helper
    of one, such as a DataLoader's worker, or something else in the same memory group."""
    reason: str = ""
    """What ended the run, where no rank did: the timeout, or a signal to the watcher."""
    log_dir: str = ""
    """The folder with all that the ranks have written to stdout and stderr, in files by attempt and rank: see `LogSpec`."""
    attempts: tuple[Attempt, ...] = ()
    """One for each time that ranks were started, in the order of their ends. All other fields but `RunResult.events`
    describe the last attempt of each rank."""
    not_restarted: str = ""
    """Why ranks that failed were not started again, if the run was to be restarted at all."""

    @property
    def restarts(self) -> int:
        """How often ranks were started anew."""
        return sum(attempt.number > 0 for attempt in self.attempts)

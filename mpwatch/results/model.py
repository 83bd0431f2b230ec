"""The data of a run that has ended: states, failures, attempts, and the return values by rank.

The watcher creates these objects in the caller's process. This module does no I/O. It imports `wire` only to pickle
exceptions. The modules that make text, HTML and traces import only these types. run_result.py imports those modules:

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


class FailureKind(Enum):
    """Why a rank has no result."""

    EXCEPTION = "EXCEPTION"  # its function raised, or its return value could not be pickled, sent or unpickled
    EXIT = "EXIT"  # it exited with a status other than 0
    SIGNAL = "SIGNAL"  # a signal killed it, and the watcher did not send it
    OOM = "OOM"  # the kernel's out-of-memory killer killed it, and there is proof
    HANG = "HANG"  # it sent no heartbeat for `heartbeat_timeout`, or it kept its peers waiting in a collective
    START = "START"  # it ended, failed or timed out before it called the function
    LOST = "LOST"  # it ended without a result, with status 0 or an unknown status; or its node was lost
    TIMEOUT = "TIMEOUT"  # it was still running when `timeout` expired


@dataclass(frozen=True, kw_only=True)
class ProcessFailure:
    """The failure of one rank: its own, or a secondary one (`is_secondary`). Ranks that the watcher stopped have none.

    To add a field: add it here, and set it in watcher/diagnosis/failures.py. Other nodes get it automatically:
    multinode/protocol/failure_codec.py encodes all fields of this class.
    """

    rank: int
    """Global rank."""
    local_rank: int
    """Rank on its node."""
    pid: int | None
    """Process id. Another process may have it by now. None: not known, for example because the node was lost."""
    hostname: str
    """Name of the machine."""
    group_rank: int | None = None
    """Number of its node in a job of several nodes. None in a run on one node."""
    kind: FailureKind
    exit_code: int
    """The exit status that a shell would show: 1 for an exception, the code of SystemExit, 128 + n for signal n. Never 0."""
    signal: int | None = None
    """Number of the signal that killed the rank. None: no signal did."""
    exception: BaseException | None = None
    """The rank's own exception, with its cause, context, notes and frames. None: it raised none, or could not send it."""
    summary: str = ""
    """The exception's type and text, as formatted in the rank. Empty without an exception."""
    traceback: str = ""
    """The traceback as the rank would have printed it, with source lines. Empty without an exception."""
    stack: str = ""
    """The Python stacks of a rank that crashed, hung or ran into the timeout. Format of faulthandler, with source lines. The
    innermost frame is first. Empty if there are none."""
    stderr: str = ""
    """The last lines of the rank's stderr, if the option `logs` lets the watcher read it. If the rank never became ready:
    what its interpreter printed."""
    log_files: Mapping[str, str] = field(default_factory=dict)
    """Paths of the rank's log files by stream: "stdout", "stderr". Empty without log files. See `LogSpec`."""
    evidence: str = ""
    """What else is known about the cause, for example the proof of an OOM kill. May be empty."""
    is_secondary: bool = False
    """Whether this is a consequence of another failure: the rank lost a peer, or waited for one without success."""
    elapsed: float = 0.0
    """Seconds from the start of the run to the failure. For a silent rank: to its last heartbeat."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, with the exception encoded: many exceptions cannot be pickled as they are."""
        state = dict(self.__dict__)
        if self.exception is not None:
            encoder = ExceptionEncoder(self.exception)
            state["exception"] = (encoder.plain(), encoder.details())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["exception"] is not None:
            state = {**state, "exception": decoder.decode_exception(*state["exception"])}
        self.__dict__.update(state)


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
    """The return values by global rank. Empty unless all ranks succeeded."""
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

    @property
    def restarts(self) -> int:
        """How often ranks were restarted."""
        return sum(attempt.number > 0 for attempt in self.attempts)

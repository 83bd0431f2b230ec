"""What came of a run, as data: values, failures and states by rank.

Shared by the watcher and the user; imports only what encodes an exception, and does no I/O.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from .spec import Worker
from .wire import exceptions

__all__ = ["FailureKind", "ProcessFailure", "RunResult", "WorkerState"]

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
    START = "START"  # it never came to call the function
    LOST = "LOST"  # it ended with status 0 or an unknown one, and left no result
    TIMEOUT = "TIMEOUT"  # it was still at work when `timeout` ran out


@dataclass(frozen=True, kw_only=True)
class ProcessFailure:
    """One rank that failed by itself. Ranks that the watcher stopped are in no such list."""

    rank: int
    """Global rank."""
    local_rank: int
    pid: int | None
    """Process id, unique only while the rank lived."""
    hostname: str
    kind: FailureKind
    exit_code: int
    """The status a shell would show: 1 for an exception, SystemExit's own code, 128 + n for signal n."""
    signal: int | None = None
    """Number of the signal that killed the rank, if one did."""
    exception: BaseException | None = None
    """The rank's own exception, with its cause, context, notes and frames."""
    traceback: str = ""
    """The traceback as the rank itself would have printed it, with source lines; after a crash, the Python stack of the
    thread that crashed, innermost frame first, in faulthandler's words."""
    is_secondary: bool = False
    """True if this only says that a peer had gone: a consequence of another failure."""
    elapsed: float = 0.0
    """Seconds from the start of the run to the failure."""

    def __getstate__(self) -> dict[str, Any]:
        """As pickle wants it: the exception link by link, since many cannot be pickled as they are."""
        state = dict(self.__dict__)
        if self.exception is not None:
            state["exception"] = exceptions.encode(self.exception)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["exception"] is not None:
            state = {**state, "exception": exceptions.decode(state["exception"])}
        self.__dict__.update(state)


@dataclass(frozen=True, repr=False)
class RunResult(Generic[T]):
    """The outcome of a run: a sequence of the ranks' values, and what else is known.

    `result[3]` is the value of rank 3; iterating gives the values in rank order.
    """

    state: WorkerState
    """SUCCEEDED, FAILED, or STOPPED for a run that was interrupted from outside."""
    return_values: Mapping[int, T] = field(default_factory=dict)
    """By global rank, all or nothing: empty unless every rank succeeded."""
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    """By global rank: the ranks that failed by themselves."""
    root_cause: ProcessFailure | None = None
    """The failure that came first; None if there was none, or no single one (a timeout)."""
    workers: tuple[Worker, ...] = ()
    worker_states: Mapping[int, WorkerState] = field(default_factory=dict)
    """By global rank: SUCCEEDED, FAILED, or STOPPED by the watcher."""
    reason: str = ""
    """What ended the run, where no rank did: the timeout, or a signal to the watcher."""

    def __getitem__(self, rank: int) -> T:
        try:
            return self.return_values[rank]
        except KeyError:
            raise IndexError(self._why_missing(rank)) from None

    def __iter__(self) -> Iterator[T]:
        return (self.return_values[rank] for rank in sorted(self.return_values))

    def __len__(self) -> int:
        return len(self.return_values)

    def __repr__(self) -> str:
        return f"<RunResult {self.state.name}: {len(self.workers)} ranks, {len(self.failures)} failures>"

    def _why_missing(self, rank: int) -> str:
        if self.state is WorkerState.SUCCEEDED:
            return f"no rank {rank} in this run; it had the ranks {sorted(self.return_values)}"
        return f"rank {rank} has no value, since the run ended as {self.state.name}; see .failures"

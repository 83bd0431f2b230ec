"""The data of one call to ranks: the request, and the answer. commands.py shows how a call reaches the ranks."""

from dataclasses import dataclass, field
from itertools import count

from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.machine.transitions import StopRequested
from mpwatch.wire.pickling.call_payload import Payload


@dataclass(eq=False)
class PendingCall:
    """The request to call a function in the ranks, and the answer of the ranks."""

    payload: Payload
    started_at: float
    """When the caller made the call, in seconds of CLOCK_MONOTONIC."""
    timeout: float | None
    """The limit of the call, in seconds from `started_at`. It is None if there is no limit."""
    stop_after: float | None = None
    """When to ask the ranks to stop, in seconds from `started_at`. It is None if they are never asked."""
    ranks: tuple[int, ...] | None = None
    """The ranks to call, in order. None means all ranks."""
    observations: list[AttemptObservations] = field(default_factory=list)
    """The observations of each restart group after the call. The list is empty if a rank was lost before the call came."""
    is_done: bool = False
    """Whether the watcher thread has ended the call and keeps the ranks. If the ranks end with the call, only `observations`
    is set."""
    lost_ranks: tuple[int, ...] = ()
    """The ranks outside this call whose loss has ended this call."""
    ranks_to_restart: tuple[int, ...] = ()
    """The ranks that were lost before the call came, with scope="worker". If there are any, the call has not begun."""
    ended_ranks: tuple[int, ...] = ()
    """The ranks that have ended with this call, with scope="worker"."""
    stop_request: StopRequested | None = None
    """The first request to stop that came during the call."""
    number: int = field(default_factory=count(1).__next__)
    """A number that no other call of this program has. An interrupt contains the number of the call to interrupt."""
    suspended_seconds: float = 0.0
    """How long the program was suspended during the call. `timeout` does not count that time."""

    def is_over(self) -> bool:
        """Return True if the call has ended, or if the call cannot begin because ranks were lost.

        With scope="group", return False if all ranks of the WorkerGroup have ended during the call.
        """
        return self.is_done or bool(self.ranks_to_restart)

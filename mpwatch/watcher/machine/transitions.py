"""What can happen in a run, and what can be done about it, as data: the vocabulary of the machine (machine.py).

Each rank is in one Phase, and TRANSITIONS says which events are legal there and where they lead; everything that a rank can
go through is in that table. The run as a whole is in one Stage.
"""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

LAST_CALL_SECONDS = 1.0  # how long a cause may be later than the complaints about it
LOOK_SECONDS = 0.2  # for the stacks of all ranks together; one takes a tenth of a millisecond
LEAST_GRACE_SECONDS = 0.2  # for a rank that has failed to send the details, whatever the grace period
KILL_SECONDS = 0.8  # from SIGKILL to giving up, a second together with the look: who takes longer sleeps in the kernel
END_SECONDS = 1.0  # a rank that has returned may take at least so long to end, whatever the grace period
LATE_SECONDS = 1.0  # called so late, the machine takes it that nothing here did run, neither this program nor its ranks
SURE_SECONDS = 1.0  # at most, and a tenth of the limit: until silence is taken for such


class RankPhase(Enum):
    """Where a rank is."""

    __hash__ = object.__hash__  # Enum's own is in Python, and the machine looks up phases all the time

    STARTING = auto()
    READY = auto()  # it waits for a call
    RUNNING = auto()
    RETURNED = auto()  # it has returned, and waits for the others
    FAILED = auto()  # it has reported a failure
    DETAILS_SENT = auto()  # and all that can be told of it, and waits for what becomes of the others
    EXITING = auto()  # it has returned and been told to end
    TERMINATING = auto()  # it has been told to stop, by signal
    KILLED = auto()
    EXITED = auto()
    ABANDONED = auto()  # not even SIGKILL ended it


class RunStage(Enum):
    """Where the run is."""

    IDLE = auto()
    RUNNING = auto()
    AWAITING_ROOT_CAUSE = auto()
    DUMPING_STACKS = auto()
    SHUTTING_DOWN = auto()
    TERMINATING = auto()
    AWAITING_DECISION = auto()
    FINISHED = auto()


class StopReason(Enum):
    """What ended the run."""

    SUCCEEDED = auto()
    FAILED = auto()
    TIMED_OUT = auto()
    INTERRUPTED = auto()
    CANCELLED_BY_JOB = auto()  # by other nodes


@dataclass(frozen=True, slots=True)
class RankEvent:
    """Something that a rank has done. What comes of an earlier life of it changes nothing any more."""

    rank: int
    generation: int = field(default=0, kw_only=True)  # which of its lives, from 0


@dataclass(frozen=True, slots=True)
class Ready(RankEvent):
    """The rank can be called."""


@dataclass(frozen=True, slots=True)
class Returned(RankEvent):
    """The rank's function has returned."""


@dataclass(frozen=True, slots=True)
class Failing(RankEvent):
    """The rank's function has raised; what, is being told."""


@dataclass(frozen=True, slots=True)
class Failed(RankEvent):
    """The rank has reported a failure; a secondary one is only a complaint that a peer has gone."""

    is_secondary: bool = False


@dataclass(frozen=True, slots=True)
class DetailsReceived(RankEvent):
    """The rank has told all that it can of the failure that it has reported."""


@dataclass(frozen=True, slots=True)
class StackDumped(RankEvent):
    """The rank's stacks have come, or cannot be had."""


@dataclass(frozen=True, slots=True)
class HeartbeatRead(RankEvent):
    """When the rank was last heard of; None: never."""

    beat_at: float | None = None


@dataclass(frozen=True, slots=True)
class Exited(RankEvent):
    """The rank's process has ended, and everything it had sent has been handled."""


@dataclass(frozen=True, slots=True)
class Restart(RankEvent):
    """This rank and those that are in the same boat have failed, and are worth another try."""

    ranks: tuple[int, ...] = ()  # these at once, instead of those that there were


@dataclass(frozen=True, slots=True)
class DoNotRestart(RankEvent):
    """They are not."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The watcher has got a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class StartCall:
    """The caller wants a function called in every rank."""

    started_at: float
    timeout: float | None = None  # seconds from then on


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The caller has no more calls."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Other ranks of the run have failed for good."""


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """Other nodes have ended the attempt, or nothing is heard of them."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The other nodes know that this one is there. They may give it up later, and go on without it."""

    stop_at: float = math.inf  # if nothing more is heard: when the ranks are to be stopped
    kill_at: float = math.inf  # and when none may be left


NO_LEASE = Lease()

Event = RankEvent | Interrupted | StartCall | Shutdown | Abort | CancelAttempt | Lease


@dataclass(frozen=True, slots=True)
class StartRank:
    """Start a process for the rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class CallRank:
    """Send the rank its call."""

    rank: int


@dataclass(frozen=True, slots=True)
class RequestExit:
    """Tell the rank to end as any program does."""

    rank: int


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Ask the rank for the stacks of its threads."""

    rank: int


@dataclass(frozen=True, slots=True)
class ReadHeartbeat:
    """See when the rank was last heard of."""

    rank: int


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send the rank's process group a signal; SIGINT to the rank alone."""

    rank: int
    signum: int


@dataclass(frozen=True, slots=True)
class AbandonRank:
    """Wait for this rank no longer."""

    rank: int


Action = StartRank | CallRank | RequestExit | DumpStacks | ReadHeartbeat | SendSignal | AbandonRank


class IllegalEventError(Exception):
    """The loop has told the machine something that cannot be: an error in mpwatch."""


# A late word of a rank that is being stopped is evidence, and changes nothing.
_STOPPED: dict[type, RankPhase | None] = {
    **dict.fromkeys((Ready, Returned, Failing, Failed, DetailsReceived, StackDumped, HeartbeatRead)),
    Exited: RankPhase.EXITED,
}
TRANSITIONS: dict[RankPhase, dict[type, RankPhase | None]] = {
    RankPhase.STARTING: {Ready: RankPhase.READY, Failed: RankPhase.FAILED, Exited: RankPhase.EXITED},
    RankPhase.READY: {Exited: RankPhase.EXITED},
    RankPhase.RUNNING: {
        Returned: RankPhase.RETURNED,
        Failing: None,
        Failed: RankPhase.FAILED,
        StackDumped: None,
        HeartbeatRead: None,
        Exited: RankPhase.EXITED,
    },
    RankPhase.RETURNED: {StackDumped: None, Exited: RankPhase.EXITED},
    RankPhase.FAILED: {DetailsReceived: RankPhase.DETAILS_SENT, StackDumped: None, Exited: RankPhase.EXITED},
    RankPhase.DETAILS_SENT: {StackDumped: None, Exited: RankPhase.EXITED},
    RankPhase.EXITING: {Exited: RankPhase.EXITED},
    RankPhase.TERMINATING: _STOPPED,
    RankPhase.KILLED: _STOPPED,
    RankPhase.EXITED: {},
    RankPhase.ABANDONED: {},
}
LIVING = frozenset(RankPhase) - {RankPhase.EXITED, RankPhase.ABANDONED}

"""What can happen in a run, and what can be done about it, as data: the vocabulary of the machine (machine.py).

Each rank is in one Phase, and TRANSITIONS says which events are legal there and where they lead; everything that a rank can
go through is in that table. The run as a whole is in one Stage.
"""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

__all__ = [
    "END_SECONDS",
    "KILL_SECONDS",
    "LAST_CALL_SECONDS",
    "LATE_SECONDS",
    "LEAST_GRACE_SECONDS",
    "LIVING",
    "LOOK_SECONDS",
    "NO_LEASE",
    "SURE_SECONDS",
    "TRANSITIONS",
    "Action",
    "CallAll",
    "CallOff",
    "CallRank",
    "Died",
    "EndAll",
    "EndRank",
    "Event",
    "Failed",
    "Failing",
    "FeelPulse",
    "GiveUp",
    "IllegalEventError",
    "Interrupted",
    "Lease",
    "LookAt",
    "Looked",
    "Phase",
    "Pulse",
    "RankEvent",
    "Ready",
    "Returned",
    "Settled",
    "SignalRank",
    "Stage",
    "StartAgain",
    "StartRank",
    "StopAll",
    "Told",
    "Verdict",
]

LAST_CALL_SECONDS = 1.0  # how long a cause may be later than the complaints about it
LOOK_SECONDS = 0.2  # for the stacks of all ranks together; one takes a tenth of a millisecond
LEAST_GRACE_SECONDS = 0.2  # for a rank that has failed to send the details, whatever the grace period
KILL_SECONDS = 0.8  # from SIGKILL to giving up, a second together with the look: who takes longer sleeps in the kernel
END_SECONDS = 1.0  # a rank that has returned may take at least so long to end, whatever the grace period
LATE_SECONDS = 1.0  # called so late, the machine takes it that nothing here did run, neither this program nor its ranks
SURE_SECONDS = 1.0  # at most, and a tenth of the limit: until silence is taken for such


class Phase(Enum):
    """Where a rank is."""

    __hash__ = object.__hash__  # Enum's own is in Python, and the machine looks up phases all the time

    STARTING = auto()
    READY = auto()  # it waits for a call
    AT_WORK = auto()
    DONE = auto()  # it has returned, and waits for the others
    BROKEN = auto()  # it has reported a failure
    TOLD = auto()  # and all that can be told of it, and waits for what becomes of the others
    ENDING = auto()  # it has returned and been told to end
    STOPPING = auto()  # it has been told to stop, by signal
    KILLED = auto()
    GONE = auto()
    GIVEN_UP = auto()  # not even SIGKILL ended it


class Stage(Enum):
    """Where the run is."""

    IDLE = auto()
    WORKING = auto()
    LAST_CALL = auto()
    LOOKING = auto()
    ENDING = auto()
    STOPPING = auto()
    JUDGING = auto()
    OVER = auto()


class Verdict(Enum):
    """What ended the run."""

    SUCCEEDED = auto()
    FAILED = auto()
    TIMED_OUT = auto()
    INTERRUPTED = auto()
    CALLED_OFF = auto()  # by other nodes


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
class Told(RankEvent):
    """The rank has told all that it can of the failure that it has reported."""


@dataclass(frozen=True, slots=True)
class Looked(RankEvent):
    """The rank's stacks have come, or cannot be had."""


@dataclass(frozen=True, slots=True)
class Pulse(RankEvent):
    """When the rank was last heard of; None: never."""

    beat_at: float | None = None


@dataclass(frozen=True, slots=True)
class Died(RankEvent):
    """The rank's process has ended, and everything it had sent has been handled."""


@dataclass(frozen=True, slots=True)
class StartAgain(RankEvent):
    """This rank and those that are in the same boat have failed, and are worth another try."""

    ranks: tuple[int, ...] = ()  # these at once, instead of those that there were


@dataclass(frozen=True, slots=True)
class Settled(RankEvent):
    """They are not."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The watcher has got a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class CallAll:
    """The caller wants a function called in every rank."""

    started_at: float
    timeout: float | None = None  # seconds from then on


@dataclass(frozen=True, slots=True)
class EndAll:
    """The caller has no more calls."""


@dataclass(frozen=True, slots=True)
class StopAll:
    """Other ranks of the run have failed for good."""


@dataclass(frozen=True, slots=True)
class CallOff:
    """Other nodes have ended the attempt, or nothing is heard of them."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The other nodes know that this one is there. They may give it up later, and go on without it."""

    stop_at: float = math.inf  # if nothing more is heard: when the ranks are to be stopped
    kill_at: float = math.inf  # and when none may be left


NO_LEASE = Lease()

Event = RankEvent | Interrupted | CallAll | EndAll | StopAll | CallOff | Lease


@dataclass(frozen=True, slots=True)
class StartRank:
    """Start a process for the rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class CallRank:
    """Send the rank its call."""

    rank: int


@dataclass(frozen=True, slots=True)
class EndRank:
    """Tell the rank to end as any program does."""

    rank: int


@dataclass(frozen=True, slots=True)
class LookAt:
    """Ask the rank for the stacks of its threads."""

    rank: int


@dataclass(frozen=True, slots=True)
class FeelPulse:
    """See when the rank was last heard of."""

    rank: int


@dataclass(frozen=True, slots=True)
class SignalRank:
    """Send the rank's process group a signal; SIGINT to the rank alone."""

    rank: int
    signum: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Wait for this rank no longer."""

    rank: int


Action = StartRank | CallRank | EndRank | LookAt | FeelPulse | SignalRank | GiveUp


class IllegalEventError(Exception):
    """The loop has told the machine something that cannot be: an error in mpwatch."""


# A late word of a rank that is being stopped is evidence, and changes nothing.
_STOPPED: dict[type, Phase | None] = {
    **dict.fromkeys((Ready, Returned, Failing, Failed, Told, Looked, Pulse)),
    Died: Phase.GONE,
}
TRANSITIONS: dict[Phase, dict[type, Phase | None]] = {
    Phase.STARTING: {Ready: Phase.READY, Failed: Phase.BROKEN, Died: Phase.GONE},
    Phase.READY: {Died: Phase.GONE},
    Phase.AT_WORK: {
        Returned: Phase.DONE,
        Failing: None,
        Failed: Phase.BROKEN,
        Looked: None,
        Pulse: None,
        Died: Phase.GONE,
    },
    Phase.DONE: {Looked: None, Died: Phase.GONE},
    Phase.BROKEN: {Told: Phase.TOLD, Looked: None, Died: Phase.GONE},
    Phase.TOLD: {Looked: None, Died: Phase.GONE},
    Phase.ENDING: {Died: Phase.GONE},
    Phase.STOPPING: _STOPPED,
    Phase.KILLED: _STOPPED,
    Phase.GONE: {},
    Phase.GIVEN_UP: {},
}
LIVING = frozenset(Phase) - {Phase.GONE, Phase.GIVEN_UP}

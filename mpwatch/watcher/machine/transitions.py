"""The rules of one call as tables: the phases of a rank, the stages of a call, the events and the actions. Pure.

CallMachine (call_machine.py) applies the tables, and no other module changes a phase or a stage. An event that a table does
not list raises IllegalEventError, which names the event and the phase: such an event is a bug in mpwatch.

The phases of a rank, with the events and actions that change them:

    STARTING -- Ready --> READY -- CallRank --> RUNNING -- Returned --> RETURNED -- RequestExit --> EXITING
       |                                           `------ Failed ----> FAILED -- DetailsReceived --> DETAILS_SENT
       `-------------- Failed: an error before it is ready --------------^

    each phase above ---------- SIGTERM or SIGINT ---> TERMINATING -- SIGKILL --> KILLED -- KILL_SECONDS later --> ABANDONED
    each other phase except ABANDONED --- Exited ---> EXITED

The stages of a call:

    RUNNING --- every rank has returned ---> SHUTTING_DOWN --- all have exited ---> FINISHED
    RUNNING --- a rank fails or is silent, a time limit passes, or EndCall ---> DUMPING_STACKS
    RUNNING --- the first Interrupted, or the Lease has run out ---> DUMPING_STACKS
    RUNNING --- a rank reports a secondary failure, or has not reported yet what it raised ---> AWAITING_ROOT_CAUSE
    AWAITING_ROOT_CAUSE --- a rank fails by itself, or ROOT_CAUSE_WAIT_SECONDS later ---> DUMPING_STACKS
    DUMPING_STACKS --- all stacks are there, or STACK_DUMP_SECONDS later ---> TERMINATING --- all have exited ---> FINISHED
        (ranks that have returned send their collectives, since after SIGTERM they could not answer)
    SHUTTING_DOWN --- `grace_period` later ---> TERMINATING
    AWAITING_ROOT_CAUSE --- the first Interrupted ---> DUMPING_STACKS
    each other stage above, except RUNNING --- Interrupted ---> TERMINATING, or SIGKILL if it is that already

The ranks of a WorkerGroup (`keep_ranks`) stay after a call, so these transitions are different:

    RUNNING --- every rank has returned ---> KEPT
    RUNNING --- a rank raises ---> AWAITING_ROOT_CAUSE --- every rank has returned or raised ---> KEPT
    DUMPING_STACKS because of SIGINT --- all stacks are there; the ranks get SIGINT ---> AWAITING_ROOT_CAUSE

A call with no function ends idle ranks: it begins in SHUTTING_DOWN or TERMINATING.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

ROOT_CAUSE_WAIT_SECONDS = 1.0  # how much later than a secondary failure its root cause may be reported
STACK_DUMP_SECONDS = 0.2  # for the stacks of all ranks together; one in Python code needs 0.1 ms, one in C code 50 ms
MIN_GRACE_SECONDS = 0.2  # so that a failed rank can send the details of its exception, however short the grace period is
KILL_SECONDS = 0.8  # from SIGKILL to AbandonRank; a process that takes longer sleeps in the kernel. With the dump: 1 s
EXIT_SECONDS = 1.0  # the least time for a rank to exit after it has returned, however short the grace period is
SUSPENDED_SECONDS = 1.0  # a deadline missed by so much may mean that the whole computer was suspended, ranks included
CONFIRM_SECONDS = 1.0  # at most, and a tenth of the limit: from the first to the second reading of a silent rank's heartbeat


class RankPhase(Enum):
    __hash__ = object.__hash__  # Enum.__hash__ is written in Python, and the machine looks up phases all the time

    STARTING = auto()
    READY = auto()  # waits for a call
    RUNNING = auto()
    RETURNED = auto()  # the function has returned; the rank waits for the others
    FAILED = auto()  # has reported a failure; the details of the exception are on their way
    DETAILS_SENT = auto()  # has reported a failure with all details; the rank waits for the others
    EXITING = auto()  # was asked to exit after it had returned
    TERMINATING = auto()  # was stopped by SIGTERM or SIGINT
    KILLED = auto()  # was stopped by SIGKILL
    EXITED = auto()
    ABANDONED = auto()  # did not exit after SIGKILL


class CallStage(Enum):
    RUNNING = auto()  # some of its ranks may still be starting
    # A rank has raised, and its report or the root cause may still come. In a WorkerGroup, after a failure or Ctrl-C, the
    # ranks that have not answered yet have a limited time to do so.
    AWAITING_ROOT_CAUSE = auto()
    DUMPING_STACKS = auto()  # the ranks that are running send their stacks before they are stopped
    SHUTTING_DOWN = auto()  # all ranks have returned, and were asked to exit
    TERMINATING = auto()  # all ranks were stopped by a signal
    KEPT = auto()  # over, and the ranks stay for the next call
    FINISHED = auto()  # over, and no rank is left


class StopReason(Enum):
    SUCCEEDED = auto()
    FAILED = auto()
    TIMED_OUT = auto()
    INTERRUPTED = auto()  # by a signal to the watcher, by a Shutdown, or because another call has failed
    CANCELLED_BY_JOB = auto()  # other nodes have ended the attempt, or this node has not heard from them for too long


@dataclass(frozen=True, slots=True)
class RankEvent:
    rank: int


class Ready(RankEvent):
    """The rank is ready for a call."""


class Returned(RankEvent):
    """The rank's function has returned."""


class Failing(RankEvent):
    """The rank's function has raised an exception, and the rank has not reported this exception yet."""


@dataclass(frozen=True, slots=True)
class Failed(RankEvent):
    """The rank has reported a failure. Another rank may have caused a secondary one, by closing its connection."""

    is_secondary: bool = False


class DetailsReceived(RankEvent):
    """The rank has sent the details of its exception."""


class StackDumped(RankEvent):
    """The rank has answered DumpStacks, or cannot answer."""


class Exited(RankEvent):
    """The rank's process has exited, and the watcher has handled all messages that the rank had sent."""


@dataclass(frozen=True, slots=True)
class HeartbeatsRead:
    """The answer to ReadHeartbeats: the time of the last heartbeat of each rank, or None if there was no heartbeat yet."""

    beats: Mapping[int, float | None]


class InterruptCause(Enum):
    SIGNAL = "this process received a signal"
    STOP = "the caller called terminate()"
    PROGRAM_END = "the program ends"
    STOP_REQUEST = "a stop was requested while there were no ranks"
    STOP_TIMEOUT = "ranks had not returned within `stop_timeout`"


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The run or the call is interrupted, as if the program had received `signum`. No action depends on `cause`."""

    signum: int
    cause: InterruptCause = InterruptCause.SIGNAL


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The ranks are asked to save and return: `mpwatch.should_stop` becomes true in all ranks at the same step."""

    cause: str  # such as "SIGUSR1"
    signum: int | None = None  # the signal to the calling program that has caused the request; None if there was no signal
    is_from_job: bool = False  # on several nodes: whether the leader has passed the request on to all nodes


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The WorkerGroup ends while a call is running, so the ranks must exit."""


@dataclass(frozen=True, slots=True)
class EndCall:
    """The ranks must be stopped: INTERRUPTED if another call was lost or has failed, CANCELLED_BY_JOB if other nodes have
    ended the attempt, FAILED if the ranks wait in collectives that can never succeed.
    """

    reason: StopReason


@dataclass(frozen=True, slots=True)
class SuspendLimits:
    """While a debugger's prompt is open, `timeout`, `heartbeat_timeout` and the other limits of the call count no time."""

    are_suspended: bool = True


@dataclass(frozen=True, slots=True)
class Resumed:
    """The program was suspended, by Ctrl-Z for example. That time counts for no limit but the Lease, since other nodes ran
    on.
    """

    suspended_at: float


@dataclass(frozen=True, slots=True)
class Lease:
    """How long the ranks of a node may run without contact to the others, which go on without it afterwards. Contact renews
    it.
    """

    stop_at: float = math.inf  # when the ranks must be stopped
    kill_at: float = math.inf  # when ranks that are still there must be killed


NO_LEASE = Lease()

Event = RankEvent | HeartbeatsRead | Interrupted | StopRequested | Shutdown | EndCall | SuspendLimits | Resumed | Lease


@dataclass(frozen=True, slots=True)
class RankAction:
    rank: int


class CallRank(RankAction):
    """Send the function and its arguments to the rank."""


class RequestExit(RankAction):
    """Ask a rank that waits for a call to exit."""


class DumpStacks(RankAction):
    """Ask the rank for its collectives, and if its function runs, for its stacks. StackDumped is the answer."""


@dataclass(frozen=True, slots=True)
class SendSignal(RankAction):
    """Send SIGINT to the rank's own process, or any other signal to the rank's process group."""

    signum: int


class AbandonRank(RankAction):
    """Stop waiting for the rank's process, which SIGKILL did not end."""


@dataclass(frozen=True, slots=True)
class ReadHeartbeats:
    """Read the time of the last heartbeat of each of these ranks. HeartbeatsRead is the answer."""

    ranks: tuple[int, ...]


Action = RankAction | ReadHeartbeats


class IllegalEventError(Exception):
    """The phase of the rank, or the stage of the call, does not allow this event."""


# What a rank still sends while it is being stopped is evidence for the diagnosis. It does not change the phase.
_WHILE_STOPPING: dict[type, RankPhase | None] = {
    **dict.fromkeys((Ready, Returned, Failing, Failed, DetailsReceived, StackDumped)),
    Exited: RankPhase.EXITED,
}

# For each phase the legal events, and the phase that follows. None: the phase stays the same.
TRANSITIONS: dict[RankPhase, dict[type, RankPhase | None]] = {
    RankPhase.STARTING: {Ready: RankPhase.READY, Failed: RankPhase.FAILED, Exited: RankPhase.EXITED},
    RankPhase.READY: {StackDumped: None, Exited: RankPhase.EXITED},  # the stacks of a call that has ended
    RankPhase.RUNNING: {
        Returned: RankPhase.RETURNED,
        Failing: None,
        Failed: RankPhase.FAILED,
        StackDumped: None,
        Exited: RankPhase.EXITED,
    },
    RankPhase.RETURNED: {StackDumped: None, Exited: RankPhase.EXITED},
    RankPhase.FAILED: {DetailsReceived: RankPhase.DETAILS_SENT, StackDumped: None, Exited: RankPhase.EXITED},
    RankPhase.DETAILS_SENT: {StackDumped: None, Exited: RankPhase.EXITED},
    RankPhase.EXITING: {StackDumped: None, Exited: RankPhase.EXITED},
    RankPhase.TERMINATING: _WHILE_STOPPING,
    RankPhase.KILLED: _WHILE_STOPPING,
    RankPhase.EXITED: {},
    RankPhase.ABANDONED: {},
}
ALIVE_PHASES = frozenset(RankPhase) - {RankPhase.EXITED, RankPhase.ABANDONED}

# For each stage the stages that can follow.
STAGES: dict[CallStage, frozenset[CallStage]] = {
    CallStage.RUNNING: frozenset(CallStage) - {CallStage.RUNNING},
    CallStage.AWAITING_ROOT_CAUSE: frozenset(CallStage) - {CallStage.RUNNING, CallStage.AWAITING_ROOT_CAUSE},
    CallStage.DUMPING_STACKS: frozenset(CallStage) - {CallStage.RUNNING, CallStage.DUMPING_STACKS},
    CallStage.SHUTTING_DOWN: frozenset({CallStage.TERMINATING, CallStage.FINISHED}),
    CallStage.TERMINATING: frozenset({CallStage.FINISHED}),
    CallStage.KEPT: frozenset(),
    CallStage.FINISHED: frozenset(),
}

"""The state machine's tables: phases of a rank, stages of a run, events, actions and legal transitions. Pure data.

Read this file first. state_machine.py applies the tables of this file, and no other module changes the state of a run.

Rules:

1. Each rank is in one `RankPhase`. For each phase, `TRANSITIONS` lists the legal events, and the phase that follows each
   event.
2. If TRANSITIONS does not list an event, StateMachine raises IllegalEventError. Such an event can come only if mpwatch has a
   bug.
3. Each StateMachine is in one `RunStage`, which is the stage of all its ranks.
4. Each event of a rank has a `generation`: 0 for the first start of the rank, 1 for the second start, and so on.
   StateMachine ignores events of an earlier generation, because a restart has replaced the process that sent these events.
5. The methods of StateMachine read no clock, know no pids, use no pipes and send no signals.

The event loop turns each message, exit, signal and command into an `Event`, and passes it to `StateMachine.handle`. When the
time `StateMachine.deadline` comes, the event loop calls `StateMachine.handle_deadline`. The event loop executes the
`Action`s that `handle` and `handle_deadline` return.

The phases of a rank, with the events and the actions that change them:

    STARTING -- Ready --> READY -- CallRank --> RUNNING -- Returned --> RETURNED -- RequestExit --> EXITING
       |                                           `------ Failed ----> FAILED -- DetailsReceived --> DETAILS_SENT
       `-------------- Failed: an error before it is ready --------------^

    each phase above ---------- SIGTERM or SIGINT ---> TERMINATING -- SIGKILL --> KILLED -- KILL_SECONDS later --> ABANDONED
    each other phase except ABANDONED --- Exited ---> EXITED

The stages of a run:

    IDLE --- StartCall ---> RUNNING
    IDLE --- `start_timeout` expires ---> TERMINATING
    RUNNING --- every rank has returned ---> SHUTTING_DOWN --- all have exited ---> the end
    RUNNING --- a rank fails or is silent, `timeout` or `start_timeout` expires ---> DUMPING_STACKS
    RUNNING --- CollectivesMismatched ---> DUMPING_STACKS
    RUNNING --- Abort, CancelAttempt, the first Interrupted, or the Lease has run out ---> DUMPING_STACKS
    RUNNING --- a rank reports a secondary failure, or has not reported yet what it raised ---> AWAITING_ROOT_CAUSE
    AWAITING_ROOT_CAUSE --- a rank fails by itself, or ROOT_CAUSE_WAIT_SECONDS later ---> DUMPING_STACKS
    DUMPING_STACKS --- all stacks are there, or STACK_DUMP_SECONDS later ---> TERMINATING --- all have exited ---> the end
        (ranks that have returned send their collectives, since after SIGTERM they could not answer)
    SHUTTING_DOWN --- `grace_period` later ---> TERMINATING
    each stage above --- Interrupted ---> TERMINATING        (except SIGINT in IDLE, and the first one in RUNNING)

    the end is AWAITING_DECISION if the ranks may be restarted, and FINISHED otherwise
    AWAITING_DECISION --- Restart ---> RUNNING, in the next generation
    AWAITING_DECISION --- DoNotRestart, Interrupted, Shutdown or Abort ---> FINISHED

Ranks of a WorkerGroup (`keep_ranks`) stay after a call, so these transitions are different:

    RUNNING --- every rank has returned ---> IDLE
    RUNNING --- a rank raises ---> AWAITING_ROOT_CAUSE --- every rank has returned or raised ---> IDLE
    DUMPING_STACKS because of SIGINT --- all stacks are there; the ranks get SIGINT ---> AWAITING_ROOT_CAUSE
    AWAITING_ROOT_CAUSE --- every rank has returned or raised ---> IDLE
    IDLE --- a rank exits ---> TERMINATING
    IDLE --- Shutdown or Abort ---> SHUTTING_DOWN

In a WorkerGroup, each running call has its own state machine for the ranks of this call. The ranks that have no call belong
to one or more other state machines.

On several nodes, a state machine has no ranks at first, and its first stage is AWAITING_DECISION. All nodes decide together
which ranks start.
"""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

ROOT_CAUSE_WAIT_SECONDS = 1.0  # how much later than a secondary failure its root cause may be reported
STACK_DUMP_SECONDS = 0.2  # for the stacks of all ranks together; one in Python code needs 0.1 ms, one in C code 50 ms
MIN_GRACE_SECONDS = 0.2  # so that a failed rank can send the details of its exception, however short the grace period is
KILL_SECONDS = 0.8  # from SIGKILL to AbandonRank; a process that takes longer sleeps in the kernel. With the dump: 1 s
EXIT_SECONDS = 1.0  # the least time for a rank to exit after it has returned, however short the grace period is
SUSPENDED_SECONDS = 1.0  # a deadline missed by so much may mean that the whole computer was suspended, ranks included
CONFIRM_SECONDS = 1.0  # at most, and a tenth of the limit: from the first to the second reading of a silent rank's heartbeat


class RankPhase(Enum):
    """The phase of one rank."""

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


class RunStage(Enum):
    """The stage of one StateMachine and of all its ranks."""

    IDLE = auto()  # no call is running: the ranks start, or wait for a call
    RUNNING = auto()
    # A rank has raised, and its report or the root cause may still come. In a WorkerGroup, after a failure or Ctrl-C, the
    # ranks that have not answered yet have a limited time to do so.
    AWAITING_ROOT_CAUSE = auto()
    DUMPING_STACKS = auto()  # the ranks that are running send their stacks before they are stopped
    SHUTTING_DOWN = auto()  # all ranks have returned, and were asked to exit
    TERMINATING = auto()  # all ranks were stopped by a signal
    AWAITING_DECISION = auto()  # there are no processes; the caller's thread decides whether to restart the ranks
    FINISHED = auto()


class StopReason(Enum):
    """Why a call or an attempt has ended."""

    SUCCEEDED = auto()
    FAILED = auto()
    TIMED_OUT = auto()
    INTERRUPTED = auto()  # by a signal to the watcher, by a Shutdown during a call, or since another restart group failed
    CANCELLED_BY_JOB = auto()  # other nodes have ended the attempt, or this node has not heard from them for too long


@dataclass(frozen=True, slots=True)
class RankEvent:
    """An event of one rank."""

    rank: int
    generation: int = field(default=0, kw_only=True)  # which start of the rank, from 0


@dataclass(frozen=True, slots=True)
class Ready(RankEvent):
    """The rank is ready for a call."""


@dataclass(frozen=True, slots=True)
class Returned(RankEvent):
    """The rank's function has returned."""


@dataclass(frozen=True, slots=True)
class Failing(RankEvent):
    """The rank's function has raised an exception, and the rank has not reported this exception yet."""


@dataclass(frozen=True, slots=True)
class Failed(RankEvent):
    """The rank has reported a failure.

    The failure is secondary if another rank may have caused it, for example because the connection to that rank was lost.
    """

    is_secondary: bool = False


@dataclass(frozen=True, slots=True)
class DetailsReceived(RankEvent):
    """The rank has sent the details of its exception."""


@dataclass(frozen=True, slots=True)
class StackDumped(RankEvent):
    """The rank has answered DumpStacks or RequestCollectives, or cannot answer."""


@dataclass(frozen=True, slots=True)
class HeartbeatRead(RankEvent):
    """The answer to ReadHeartbeat: the time of the rank's last heartbeat, or None if there was no heartbeat yet."""

    beat_at: float | None = None


@dataclass(frozen=True, slots=True)
class Exited(RankEvent):
    """The rank's process has exited, and the watcher has handled all messages that the rank had sent."""


@dataclass(frozen=True, slots=True)
class Restart(RankEvent):
    """Restart the ranks of a restart group. The field `rank` names one rank of the group."""

    ranks: tuple[int, ...] = ()  # the ranks to start; empty: the same as before. In a job of several nodes they may change


@dataclass(frozen=True, slots=True)
class DoNotRestart(RankEvent):
    """Do not restart the ranks of a restart group.

    On a single node, the field `rank` names one rank of the group. On several nodes, the value of `rank` is not used.
    """


class InterruptCause(Enum):
    """The cause of an `Interrupted` event."""

    SIGNAL = "this process received a signal"
    STOP = "the caller called terminate()"
    PROGRAM_END = "the program ends"
    STOP_REQUEST = "a stop was requested while there were no ranks"
    STOP_TIMEOUT = "ranks had not returned within `stop_timeout`"


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The run or the call is interrupted.

    StateMachine acts as if the calling program had received the signal `signum`. The actions do not depend on `cause`.
    """

    signum: int
    cause: InterruptCause = InterruptCause.SIGNAL


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The ranks are asked to save their state and return.

    `mpwatch.should_stop` returns True in all ranks at the same step.
    """

    cause: str  # such as "SIGUSR1"
    signum: int | None = None  # the signal to the calling program that has caused the request; None if there was no signal
    is_from_job: bool = False  # on several nodes: whether the leader has passed the request on to all nodes


@dataclass(frozen=True, slots=True)
class StartCall:
    """The caller wants to call a function in every rank."""

    started_at: float
    timeout: float | None = None  # seconds from `started_at`


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The caller will make no more calls, so the ranks must exit."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The state machine must stop its ranks, because ranks of another state machine were lost or stopped."""


@dataclass(frozen=True, slots=True)
class SuspendLimits:
    """A debugger's prompt is open, so `timeout`, `heartbeat_timeout` and the other limits of the call are suspended."""


@dataclass(frozen=True, slots=True)
class ResumeLimits:
    """No debugger's prompt is open any more, so `timeout`, `heartbeat_timeout` and the other limits count time again."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The program was suspended, for example by Ctrl-Z, and is running again now.

    The time since `suspended_at` does not count for `timeout` and the other time limits. Only a Lease counts the time of the
    suspension, because the other nodes of the job were running during the suspension.
    """

    suspended_at: float


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """This node must stop its ranks, for example because the leader of a job of several nodes has ended the attempt."""


@dataclass(frozen=True, slots=True)
class CollectivesMismatched:
    """The call can never end, because ranks wait in a collective that can never succeed."""


@dataclass(frozen=True, slots=True)
class Lease:
    """How long the ranks of a node may run while the node has no contact with the other nodes.

    Each contact with the other nodes renews the lease. When the lease has run out, the other nodes go on without this node.
    """

    stop_at: float = math.inf  # when the ranks must be stopped
    kill_at: float = math.inf  # when ranks that are still there must be killed


NO_LEASE = Lease()

Event = (
    RankEvent
    | Interrupted
    | StopRequested
    | StartCall
    | Shutdown
    | Abort
    | SuspendLimits
    | ResumeLimits
    | Resumed
    | CancelAttempt
    | CollectivesMismatched
    | Lease
)


@dataclass(frozen=True, slots=True)
class StartRank:
    """Start a process for the rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class CallRank:
    """Send the function and its arguments to the rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class RequestExit:
    """Ask the rank to exit normally, without a signal."""

    rank: int


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Ask the rank for the stacks of its threads. StackDumped is the answer."""

    rank: int


@dataclass(frozen=True, slots=True)
class RequestCollectives:
    """Ask the rank which collectives it has called. StackDumped is the answer.

    The state machine asks only ranks whose function has returned.
    """

    rank: int


@dataclass(frozen=True, slots=True)
class ReadHeartbeat:
    """Read the time of the rank's last heartbeat. HeartbeatRead is the answer."""

    rank: int


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send SIGINT to the rank's own process, or any other signal to the rank's process group."""

    rank: int
    signum: int


@dataclass(frozen=True, slots=True)
class AbandonRank:
    """Stop waiting for the rank's process, which SIGKILL did not end."""

    rank: int


Action = StartRank | CallRank | RequestExit | DumpStacks | RequestCollectives | ReadHeartbeat | SendSignal | AbandonRank


class IllegalEventError(Exception):
    """The state machine raises this exception if the phase of the rank, or the stage of the run, does not allow an event."""


# What a rank still sends while it is being stopped is evidence for the diagnosis. It does not change the phase.
_WHILE_STOPPING: dict[type, RankPhase | None] = {
    **dict.fromkeys((Ready, Returned, Failing, Failed, DetailsReceived, StackDumped, HeartbeatRead)),
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
        HeartbeatRead: None,
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

"""The messages that the nodes of a job send to one another, as frozen dataclasses.

A new field of a message needs no further code, because json_codec.py handles all fields of a dataclass. The first line of a
message's docstring names the receivers of the message. If a message contains failures of ranks, failure_codec.py encodes the
failures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, get_args

from mpwatch.nodes.json_codec import InvalidMessageError, from_json, to_json

NO_ATTEMPT = -1  # no attempt has been started


class NodeOutcome(Enum):
    """How an attempt has ended for the ranks of one node."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"  # because of an event on another node
    TIMED_OUT = "TIMED_OUT"
    ABORTED = "ABORTED"  # the ranks could not be started, or user code raised in the watcher


class NextStep(Enum):
    DONE = "DONE"
    RESTART = "RESTART"  # the same nodes start another attempt
    RE_RENDEZVOUS = "RE_RENDEZVOUS"  # the nodes form another round, because nodes were lost or have come
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """Numbers about the earlier attempts of a job, such as the number of restarts."""

    attempts: int = 0
    """Number of attempts."""
    restarts_used: int = 0
    """The number of restarts after failures since the restart budget was last reset."""
    furthest_step: int = -1
    """Highest step that a rank has reported. It is -1 if no step was reported."""
    stalled_attempts: int = 0
    """Attempts in a row that reached no higher step."""


@dataclass(frozen=True, slots=True)
class JobConfig:
    """The options that must be the same on all nodes, as pairs of name and value. See job_config.py."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The first message of a node: it wants to join."""

    run_id: str
    hostname: str
    address: str
    port: int
    """A free port of the node, for MASTER_PORT if it has rank 0. Each AttemptReport has another one."""
    nprocs: int
    role: str
    rank: int | None
    """The node's place among the nodes, if it was set."""
    is_host: bool
    """Whether the coordinator runs in the program of this node."""
    grace_period: float
    join_timeout: float
    seconds_left: float | None
    """Until the run's `timeout`, or None if it has none."""
    job_config: JobConfig
    group_rank: int = -1
    """The coordinator fills it in."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life. The coordinator sends it back."""


@dataclass(frozen=True, slots=True)
class AttemptFailing:
    """A message to the coordinator: a rank of this node has failed, or the run's timeout is over.

    A node sends AttemptFailing as soon as the attempt fails, even if other ranks of the node still run. The coordinator
    assumes that the nodes failed in the order of their AttemptFailing messages.
    """

    attempt: int


@dataclass(frozen=True, slots=True)
class RankRecord:
    rank: int
    has_returned: bool
    collectives: str
    """The JSON of a RankCollectives."""
    pid: int | None = None
    """The pid of the rank. It is None in RanksStalled."""


@dataclass(frozen=True, slots=True)
class RanksStalled:
    """A message to the coordinator: ranks of this node have stalled, or no rank of this node is stalled any more.

    A rank has stalled if it has called no collective for `stall_after` seconds. Each RanksStalled replaces the previous
    RanksStalled of the same node.
    """

    attempt: int
    collectives: tuple[RankRecord, ...] = ()
    """The latest collectives of all ranks of this node. It is empty if no rank is stalled."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A message to the coordinator: a stop was requested on this node."""

    cause: str
    """What has requested the stop, such as "SIGUSR1"."""


@dataclass(frozen=True, slots=True)
class StepsHeld:
    """A message to the coordinator: the ranks of this node wait before their next step until StopAtStep comes."""

    attempt: int
    step: int | None = None
    """The highest step that a rank of this node has passed, or None if no rank has passed a step."""
    has_started: bool = True
    """Whether the ranks are started. If not, the node holds them when they start, and then sends this message again."""


@dataclass(frozen=True, slots=True)
class RanksStopped:
    """A message to the coordinator: all ranks of this node have ended. This node still has to send its AttemptReport."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """A message to the coordinator: how the attempt has ended for the ranks of this node."""

    attempt: int
    outcome: NodeOutcome
    group_rank: int = -1
    """The coordinator fills it in."""
    port: int = 0
    """See NodeInfo."""
    failures: tuple[Mapping[str, Any], ...] = ()
    """The failures of the node's ranks. The root cause of this node comes first."""
    failures_omitted: int = 0
    """Number of further failures that are not sent."""
    waited_for_other_nodes: bool = False
    """Whether the node's ranks failed only because they waited for ranks of other nodes."""
    may_be_victim: bool = False
    """Whether the node's root cause is a lost connection. Then it may be a consequence of a failure on another node."""
    missing_ranks: tuple[Mapping[str, Any], ...] = ()
    """Failures of the kind HANG. Their ranks are to blame if ranks of other nodes timed out waiting for them."""
    missing_ranks_omitted: int = 0
    """Number of further missing ranks that are not sent."""
    collectives: tuple[RankRecord, ...] = ()
    """The latest collectives of the node's ranks, as many as fit."""
    no_restart_reason: str = ""
    """The reason why this node's root cause prevents a restart. It is empty if a restart is possible."""
    reason: str = ""
    """The reason why the attempt ended on this node, as in `RunResult.reason`."""
    unfinished: tuple[int, ...] = ()
    """The ranks that had not returned, if a timeout of this node or of another node has ended the attempt."""
    healthy_seconds: float = 0.0
    """The time between the moment when all ranks were ready and the failure."""
    step: int = -1
    """Highest step that the node's ranks have reported. It is -1 if no step was reported."""


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """A message to the coordinator: this node leaves the job for the given reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class ShutdownAck:
    """A message to the coordinator: this node knows the result of the job, and needs the coordinator no more."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A message to one node, when it has joined, and once more if the job does not begin soon."""

    present: int
    """How many nodes have joined, this one included."""
    needed: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A message to one node, which cannot join. The coordinator closes the connection."""

    reason: str
    may_retry: bool = False
    """Whether another job may begin here soon."""


@dataclass(frozen=True, slots=True)
class Dismissed:
    """A message to one node, which the others count as lost. The coordinator closes the connection."""

    reason: str


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """A message to each node: an attempt starts. The ranks of a node have consecutive numbers."""

    attempt: int
    group_rank: int
    first_rank: int
    first_role_rank: int
    role_world_size: int
    world_size: int
    group_world_size: int
    master_addr: str
    master_port: int
    delay: float = 0.0
    """Seconds to wait before the start."""


@dataclass(frozen=True, slots=True)
class StopAttempt:
    """A message to all nodes: all nodes stop the ranks of this attempt."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class HoldSteps:
    """A message to all nodes: a stop was requested. Each rank waits before its next step until StopAtStep comes."""

    attempt: int
    cause: str


@dataclass(frozen=True, slots=True)
class StopAtStep:
    """A message to all nodes: all ranks stop at their first step after `after_step`."""

    attempt: int
    cause: str
    after_step: int | None = None
    """It is None if no rank has passed a step. Then each rank stops at its next call of `should_stop`."""


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node that was lost or has left, and its ranks."""

    group_rank: int
    hostname: str
    first_rank: int
    nprocs: int
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptDecision:
    """A message to all nodes: the result of an attempt, and what the nodes do next."""

    attempt: int
    next_step: NextStep
    history: RestartHistory = RestartHistory()
    """What the coordinator goes on with."""
    root_cause_rank: int = -1
    """The rank that failed first. It is -1 if no rank has failed."""
    failures: tuple[Mapping[str, Any], ...] = ()
    failures_omitted: int = 0
    lost_nodes: tuple[LostNode, ...] = ()
    reason: str = ""
    no_restart_reason: str = ""
    timed_out: bool = False
    delay: float = 0.0
    restarts_left: int = 0
    is_restart_counted: bool = False
    """Whether the next start of the ranks is one of the restarts that the policy allows."""


MessageToCoordinator = (
    NodeInfo
    | Beat
    | AttemptFailing
    | RanksStalled
    | StopRequest
    | StepsHeld
    | RanksStopped
    | AttemptReport
    | NodeLeaving
    | ShutdownAck
)
MessageToNode = Beat | Joined | Refused | Dismissed | StartAttempt | StopAttempt | HoldSteps | StopAtStep | AttemptDecision
Message = MessageToCoordinator | MessageToNode
MESSAGE_TYPES: Final[Mapping[str, type]] = {kind.__name__: kind for kind in get_args(Message)}


def encode_message(message: Message) -> dict[str, Any]:
    return {"kind": type(message).__name__, **to_json(message)}


def decode_message(body: Mapping[str, Any]) -> Message:
    name = body.get("kind")
    kind = MESSAGE_TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InvalidMessageError(f"there is no message of kind {name!r:.100}")
    message: Message = from_json(kind, {name: value for name, value in body.items() if name != "kind"})
    return message

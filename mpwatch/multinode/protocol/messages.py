"""The messages that the nodes of a job send to one another, as frozen data.

`encode_message` and `decode_message` convert a message to JSON data and back, with json_codec.py. A field that is added to a
message is sent without further code. This module does no I/O.

The first line of each docstring names the receivers. Failures of ranks are in the form that failure_codec.py gives them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, get_args

from mpwatch.multinode.protocol.json_codec import from_json, to_json
from mpwatch.multinode.protocol.signed_json import InvalidEntryError

NO_ATTEMPT = -1  # no attempt has been started


class NodeOutcome(Enum):
    """How an attempt ended for the ranks of one node."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"  # because of an event on another node
    TIMED_OUT = "TIMED_OUT"
    ABORTED = "ABORTED"  # the ranks could not be started, or user code raised in the watcher


class NextStep(Enum):
    """What the nodes do after an attempt."""

    DONE = "DONE"
    RESTART = "RESTART"  # the same nodes start another attempt
    RE_RENDEZVOUS = "RE_RENDEZVOUS"  # the nodes form another round, because nodes were lost or have come
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """The earlier attempts of the job. Each node keeps it, so that it survives a change of the leader."""

    attempts: int = 0
    """Number of attempts."""
    restarts_used: int = 0
    """Restarts used by failures since the restart budget was last reset."""
    furthest_step: int = -1
    """Highest step that a rank has reported; -1 if none was reported."""
    stalled_attempts: int = 0
    """Attempts in a row that reached no higher step."""


@dataclass(frozen=True, slots=True)
class JobConfig:
    """The options that must be the same on all nodes, as pairs of name and value. See job_config.py."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """To the leader: this node has joined the round."""

    group_rank: int
    hostname: str
    address: str
    nprocs: int
    role: str
    serves_store: bool
    grace_period: float
    job_config: JobConfig
    history: RestartHistory


@dataclass(frozen=True, slots=True)
class AttemptFailing:
    """To the leader: a rank of this node has failed, or the time is up.

    It is sent at once, before the ranks have ended. The order of these messages in the inbox is the order of the failures.
    """

    group_rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The latest collectives of one rank. Part of an AttemptReport, and of RanksStalled."""

    rank: int
    has_returned: bool
    collectives: str
    """The JSON of a RankCollectives."""
    pid: int | None = None
    """Not known in RanksStalled."""


@dataclass(frozen=True, slots=True)
class RanksStalled:
    """To the leader: ranks of this node have called no collective for `stall_after`, or all go on again.

    It replaces the last message of this kind.
    """

    group_rank: int
    attempt: int
    collectives: tuple[RankRecord, ...] = ()
    """The latest collectives of all ranks of this node. Empty if all go on."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """To the leader: a stop was requested on this node. All ranks of the job save and return at the same step."""

    group_rank: int
    cause: str
    """What has requested it, such as "SIGUSR1"."""


@dataclass(frozen=True, slots=True)
class StepsHeld:
    """To the leader: the ranks of this node wait until the step is agreed on at which all ranks stop."""

    group_rank: int
    attempt: int
    step: int | None = None
    """The highest step that a rank of this node has passed. None: no rank has passed one."""
    has_started: bool = True
    """False: the ranks are not started yet. They will be held when they are, and another message of this kind follows."""


@dataclass(frozen=True, slots=True)
class RanksStopped:
    """To the leader: all ranks of this node have ended. The caller's thread then makes the AttemptReport, which follows."""

    group_rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """To the leader: how the attempt ended for the ranks of this node."""

    group_rank: int
    attempt: int
    outcome: NodeOutcome
    failures: tuple[Mapping[str, Any], ...] = ()
    """The root cause of this node comes first."""
    failures_omitted: int = 0
    """Number of further failures that are not sent."""
    waited_for_other_nodes: bool = False
    """Whether its ranks failed only because they waited for ranks of other nodes."""
    may_be_victim: bool = False
    """Whether its root cause is a lost connection, so that it may be a victim of a failure on another node."""
    missing_ranks: tuple[Mapping[str, Any], ...] = ()
    """Hangs of ranks that are to blame if ranks of other nodes timed out waiting for them."""
    missing_ranks_omitted: int = 0
    """Number of further missing ranks that are not sent."""
    collectives: tuple[RankRecord, ...] = ()
    """The latest collectives of its ranks, as many as fit."""
    no_restart_reason: str = ""
    """Why the root cause of this node is not worth a restart; empty if it is."""
    reason: str = ""
    """Why the attempt ended on this node, as in `RunResult.reason`."""
    unfinished: tuple[int, ...] = ()
    """The ranks that had not returned, if a timeout of this or another node has ended the attempt."""
    healthy_seconds: float = 0.0
    """The time from when all ranks were ready to the failure."""
    step: int = -1
    """Highest step that its ranks have reported; -1 if none was reported."""


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """To the leader: this node leaves the job, for this reason."""

    group_rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class ShutdownAck:
    """To the leader: this node knows the result of the job, and does not need the store any more."""

    group_rank: int


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """To one node: which ranks it has in the attempt that starts. The ranks of a node are consecutive."""

    group_rank: int
    attempt: int
    first_rank: int
    first_role_rank: int
    role_world_size: int


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """To all nodes: an attempt starts. Each node finds its RankAssignment in the store."""

    attempt: int
    world_size: int
    group_world_size: int
    master_addr: str
    master_port: int
    leader_hostname: str
    """The hostname of the leader's node."""
    leader_nprocs: int
    """The number of the leader's ranks."""
    delay: float = 0.0
    """Seconds to wait before the start."""


@dataclass(frozen=True, slots=True)
class StopAttempt:
    """To all nodes: stop the ranks of this attempt."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class HoldSteps:
    """To all nodes: a stop was requested. The ranks must pass no further step until StopAtStep comes."""

    attempt: int
    cause: str


@dataclass(frozen=True, slots=True)
class StopAtStep:
    """To all nodes: all ranks stop at their first step after this one."""

    attempt: int
    cause: str
    after_step: int | None = None
    """None: no rank has passed a step. Each rank stops at its next question."""


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node that was lost or has left, and its ranks. Part of an AttemptDecision."""

    group_rank: int
    hostname: str
    first_rank: int
    nprocs: int
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptDecision:
    """To all nodes: the result of an attempt, and what the nodes do next."""

    attempt: int
    next_step: NextStep
    history: RestartHistory
    root_cause_rank: int = -1
    """The rank that failed first; -1 if no rank failed."""
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


@dataclass(frozen=True, slots=True)
class JobFinished:
    """To all nodes: no node needs the store any more."""


@dataclass(frozen=True, slots=True)
class PublishedJobConfig:
    """An entry in the store of the job, for all nodes that want to join: the options of the first node."""

    hostname: str
    job_config: JobConfig


@dataclass(frozen=True, slots=True)
class RefusedNode:
    """An entry in the store of the job, for all nodes that wait for others: a node could not join, for this reason."""

    hostname: str
    reason: str


@dataclass(frozen=True, slots=True)
class RoundName:
    """An entry in the store of a round, for all its nodes: the name for which all other entries of the round are signed."""

    name: str


MessageToLeader = (
    NodeInfo
    | AttemptFailing
    | RanksStalled
    | StopRequest
    | StepsHeld
    | RanksStopped
    | AttemptReport
    | NodeLeaving
    | ShutdownAck
)
MessageToAll = StartAttempt | StopAttempt | HoldSteps | StopAtStep | AttemptDecision | JobFinished
Message = MessageToLeader | MessageToAll | RankAssignment
MESSAGE_TYPES: Final[Mapping[str, type]] = {kind.__name__: kind for kind in get_args(Message)}


def encode_message(message: Message) -> dict[str, Any]:
    """Encode a message as JSON data, with the name of its type."""
    return {"kind": type(message).__name__, **to_json(message)}


def decode_message(body: Mapping[str, Any]) -> Message:
    """Decode a message. Raises InvalidEntryError."""
    name = body.get("kind")
    kind = MESSAGE_TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InvalidEntryError(f"there is no message of kind {name!r:.100}")
    message: Message = from_json(kind, {name: value for name, value in body.items() if name != "kind"})
    return message

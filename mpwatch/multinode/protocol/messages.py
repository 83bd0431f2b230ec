"""The messages that the nodes of a job send to one another, as frozen data.

`to_body` and `from_body` encode and decode a message with json_codec.py. This module does no I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, get_args

from mpwatch.multinode.protocol.json_codec import from_json, to_json
from mpwatch.multinode.protocol.signed_json import InvalidEntryError

NO_ATTEMPT = -1  # where it has not come to one since the nodes met, or parted


class NodeOutcome(Enum):
    """What became of one node's ranks in an attempt."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"  # since something happened elsewhere
    TIMED_OUT = "TIMED_OUT"
    ABORTED = "ABORTED"  # they could not be started, or the caller's own code has raised


class NextStep(Enum):
    """What follows from what became of an attempt."""

    DONE = "DONE"
    RESTART = "AGAIN"  # by the same nodes
    RE_RENDEZVOUS = "REGROUP"  # by others: the nodes meet anew
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """What the job knows of its earlier attempts, whichever node is the chair."""

    attempts: int = 0
    """How many there were."""
    used: int = 0
    """Restarts that failures have cost, since they were last given back."""
    furthest: int = -1
    """Step that was reported."""
    stalled: int = 0
    """Attempts in a row that came no further."""


@dataclass(frozen=True, slots=True)
class JobConfig:
    """What has to be the same on all nodes, as text: a mapping of what it is to its value."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """To the chair: this node is here."""

    group_rank: int
    host: str
    address: str
    nprocs: int
    role: str
    serves_store: bool
    grace_period: float
    nonce: str
    terms: JobConfig
    history: RestartHistory


@dataclass(frozen=True, slots=True)
class AttemptFailing:
    """To the chair: this attempt fails on this node. Sent at once; the order in which these come is that of the failures."""

    group_rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class RanksStopped:
    """To the chair: this node's ranks are gone. What became of them is found out by the caller's thread, in its own time."""

    group_rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """To the chair: what became of this node's ranks."""

    group_rank: int
    attempt: int
    outcome: NodeOutcome
    failures: tuple[Mapping[str, Any], ...] = ()
    """See failures.py; the node's own root cause first."""
    unsaid: int = 0
    """How many more there were."""
    lacks_a_peer: bool = False
    """Whether its ranks have failed only by waiting for a peer, which is none of them."""
    may_be_victim: bool = False
    """Whether that root cause is a lost connection, which may come of a failure on another node, if there is one."""
    absent: tuple[Mapping[str, Any], ...] = ()
    """Ranks that have failed by keeping their peers waiting, should ranks of other nodes have failed by waiting: hangs."""
    absent_unsaid: int = 0
    """How many more of these there were."""
    why_not: str = ""
    """Why its cause is not worth another try."""
    reason: str = ""
    healthy_seconds: float = 0.0
    step: int = -1


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """To the chair: this node ends by its own will, for this reason."""

    group_rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class ShutdownAck:
    """To the chair: this node knows what came of the job, and needs the store no more."""

    group_rank: int


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """To one node: its ranks in the attempt that starts."""

    group_rank: int
    attempt: int
    nonce: str
    """Of its card: what was said to another, or in another round, does not have it."""
    rank: int
    """The first of them."""
    role_rank: int
    role_world_size: int


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """To all: an attempt starts. Each node finds its Place beside it."""

    attempt: int
    world_size: int
    group_world_size: int
    master_addr: str
    master_port: int
    host: str
    """Of the chair."""
    nprocs: int
    """Of its ranks."""
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class StopAttempt:
    """To all: the attempt is over."""

    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node that was lost, or has left, with its ranks."""

    group_rank: int
    host: str
    rank: int
    nprocs: int
    why: str


@dataclass(frozen=True, slots=True)
class AttemptDecision:
    """To all: what came of an attempt, and what follows."""

    attempt: int
    decision: NextStep
    history: RestartHistory
    cause: int = -1
    """The rank that failed first; -1 if none did."""
    failures: tuple[Mapping[str, Any], ...] = ()
    unsaid: int = 0
    gone: tuple[LostNode, ...] = ()
    reason: str = ""
    why_not: str = ""
    timed_out: bool = False
    delay: float = 0.0
    restarts_left: int = 0


@dataclass(frozen=True, slots=True)
class JobClosed:
    """To all: nobody needs the store any more."""


@dataclass(frozen=True, slots=True)
class PublishedTerms:
    """An entry for all nodes that want to join: the options of the node that came first."""

    host: str
    terms: JobConfig


@dataclass(frozen=True, slots=True)
class RefusedNode:
    """An entry for all nodes that wait for others: a node could not join, for this reason."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True)
class RoundName:
    """An entry for all nodes of a round: all other entries of the round are signed for this name."""

    name: str


FromMember = NodeInfo | AttemptFailing | RanksStopped | AttemptReport | NodeLeaving | ShutdownAck
Word = StartAttempt | StopAttempt | AttemptDecision | JobClosed
Message = FromMember | Word | RankAssignment
KINDS: Final[Mapping[str, type]] = {kind.__name__: kind for kind in get_args(Message)}


def to_body(message: Message) -> dict[str, Any]:
    """Encode a message as JSON data, with the name of its type."""
    return {"kind": type(message).__name__, **to_json(message)}


def from_body(body: Mapping[str, Any]) -> Message:
    """Decode a message. Raises ForgedError."""
    name = body.get("kind")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InvalidEntryError(f"there is no message of kind {name!r:.100}")
    message: Message = from_json(kind, {name: value for name, value in body.items() if name != "kind"})
    return message

"""The messages that the nodes of a job and its coordinator exchange, as frozen dataclasses.

results/to_json.py encodes all fields, and json_codec.py checks them. Failures of ranks are as failure_codec.py encodes them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, get_args

from mpwatch.nodes.json_codec import InvalidMessageError, dump_json, from_json
from mpwatch.results.to_json import to_json

NO_ATTEMPT = -1  # no attempt has been started
Failures = tuple[Mapping[str, Any], ...]


class AttemptOutcome(Enum):
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"  # because of an event on another node
    TIMED_OUT = "TIMED_OUT"
    ABORTED = "ABORTED"  # the ranks could not be started, or user code raised in the watcher


class NextStep(Enum):
    DONE = "DONE"
    RESTART = "RESTART"  # the nodes that are there form another round, as soon as they are enough
    FAILED = "FAILED"


# ---- to the coordinator


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
    is_host: bool
    grace_period: float
    join_timeout: float
    seconds_left: float | None
    """Until the run's `timeout`, or None if it has none."""
    options: Mapping[str, str]
    """Those that must be the same on all nodes, see `list_job_options`."""


@dataclass(frozen=True, slots=True)
class LinkHello:
    """The first message of a node that a driver has started, on a connection of its own. Pickles follow: see cluster/."""

    number: int
    hostname: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life. The coordinator sends it back."""

    sent_at: float
    """By the clock of the node."""


@dataclass(frozen=True, slots=True)
class AttemptFailing:
    """A rank of this node has failed, or the run's timeout is over. Other ranks of the node may still run.

    The nodes count as having failed in the order in which these messages come.
    """

    attempt: int


@dataclass(frozen=True, slots=True)
class RankRecord:
    rank: int
    has_returned: bool
    collectives: str
    """The JSON of a RankCollectives."""
    pid: int | None = None
    """None in RanksStalled."""


@dataclass(frozen=True, slots=True)
class RanksStalled:
    """Ranks of this node have called no collective for `stall_after`. Each such message replaces the one before."""

    attempt: int
    collectives: tuple[RankRecord, ...] = ()
    """The latest ones of all ranks of this node, or none if no rank is stalled any more."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    cause: str
    """Such as "SIGUSR1"."""


@dataclass(frozen=True, slots=True)
class StepsHeld:
    """The ranks of this node wait before their next step until StopAtStep comes."""

    attempt: int
    step: int | None
    """The highest step that a rank of this node has passed, or None if no rank has passed a step."""


@dataclass(frozen=True, slots=True)
class RanksStopped:
    """All ranks of this node have exited. The AttemptReport follows; it may have to wait for user code."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptReport:
    attempt: int
    outcome: AttemptOutcome
    port: int = 0
    """See NodeInfo."""
    failures: Failures = ()
    """The root cause of this node comes first."""
    failures_omitted: int = 0
    waited_for_other_nodes: bool = False
    """Whether the node's ranks failed only because they waited for ranks of other nodes."""
    may_be_victim: bool = False
    """Whether the node's root cause is a lost connection. Then it may be a consequence of a failure on another node."""
    missing_ranks: Failures = ()
    """Failures of the kind HANG. Their ranks are to blame if ranks of other nodes timed out waiting for them."""
    collectives: tuple[RankRecord, ...] = ()
    """The latest ones of the node's ranks, as many as fit."""
    no_restart_reason: str = ""
    """Why this node's root cause prevents a restart, or empty."""
    reason: str = ""
    """As in `RunResult.reason`."""
    unfinished: tuple[int, ...] = ()
    """The ranks that had not returned, if a timeout of this node or of another node has ended the attempt."""
    healthy_seconds: float = 0.0
    """From the moment when all ranks were ready to the failure."""
    step: int = -1
    """The highest step that the node's ranks have reported, or -1."""


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    reason: str


# ---- to the nodes


@dataclass(frozen=True, slots=True)
class Joined:
    """To a node that has joined, and once more if the job does not begin soon."""

    present: int
    """How many nodes have joined, this one included."""
    needed: int


@dataclass(frozen=True, slots=True)
class Refused:
    """To a node that cannot join. The coordinator closes the connection."""

    reason: str
    may_retry: bool = False
    """Whether another job may begin here soon."""


@dataclass(frozen=True, slots=True)
class Dismissed:
    """To a node that the others count as lost. The coordinator closes the connection."""

    reason: str


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """The ranks of a node have consecutive numbers."""

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
    is_counted: bool = False
    """Whether it is one of the restarts that the policy allows."""


@dataclass(frozen=True, slots=True)
class StopAttempt:
    reason: str


@dataclass(frozen=True, slots=True)
class HoldSteps:
    """A stop was requested. Each rank waits before its next step until StopAtStep comes."""

    cause: str


@dataclass(frozen=True, slots=True)
class StopAtStep:
    """All ranks stop at their first step after `after_step`. None: at their next call of `should_stop`."""

    cause: str
    after_step: int | None = None


@dataclass(frozen=True, slots=True)
class LostNode:
    group_rank: int
    hostname: str
    first_rank: int
    nprocs: int
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptDecision:
    """The result of an attempt, and what the nodes do next."""

    attempt: int
    next_step: NextStep
    root_cause_rank: int = -1
    """The rank that failed first, or -1."""
    failures: Failures = ()
    failures_omitted: int = 0
    lost_nodes: tuple[LostNode, ...] = ()
    reason: str = ""
    no_restart_reason: str = ""
    timed_out: bool = False
    delay: float = 0.0
    restarts_left: int = 0
    is_restart_counted: bool = False
    """Whether the next start of the ranks is one of the restarts that the policy allows."""

    @property
    def ends_job(self) -> bool:
        return self.next_step in (NextStep.DONE, NextStep.FAILED)


MessageToCoordinator = (
    NodeInfo
    | LinkHello
    | Beat
    | AttemptFailing
    | RanksStalled
    | StopRequest
    | StepsHeld
    | RanksStopped
    | AttemptReport
    | NodeLeaving
)
MessageToNode = Beat | Joined | Refused | Dismissed | StartAttempt | StopAttempt | HoldSteps | StopAtStep | AttemptDecision
Message = MessageToCoordinator | MessageToNode
MESSAGE_TYPES: Final[Mapping[str, type]] = {kind.__name__: kind for kind in get_args(Message)}


def encode_message(message: Message) -> bytes:
    return dump_json({"kind": type(message).__name__, **to_json(message)})


def decode_message(data: bytes) -> Message:
    """Raises InvalidMessageError."""
    try:
        body = json.loads(data.decode())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise InvalidMessageError(f"not JSON: {error}") from None
    kind = MESSAGE_TYPES.get(str(body.pop("kind", None))) if isinstance(body, dict) else None
    if kind is None:
        raise InvalidMessageError(f"it is no message of mpwatch: {body!r:.100}")
    message: Message = from_json(kind, body)
    return message

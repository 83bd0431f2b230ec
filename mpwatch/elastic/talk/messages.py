"""What the nodes of a job tell one another, as frozen data. Pure.

`to_body` makes of a message what JSON can hold, `from_body` makes a message of that again: of nothing but the types, and
within the bounds, that each field has; ForgedError names the first field that is wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from typing import Any, Final, get_args, get_origin, get_type_hints

from .seal import ForgedError, without_controls

__all__ = [
    "LARGEST",
    "NO_ATTEMPT",
    "Bye",
    "Card",
    "Closed",
    "Decision",
    "Ended",
    "Failing",
    "FromMember",
    "Gone",
    "History",
    "Leaving",
    "Message",
    "Outcome",
    "Place",
    "Start",
    "Stop",
    "Stopped",
    "Terms",
    "Verdict",
    "from_body",
    "to_body",
]

LONGEST_TEXT = 4096
MOST_ITEMS = 4096
LARGEST = 1 << 53  # of integers: what any reader of JSON can hold
NO_ATTEMPT = -1  # where it has not come to one since the nodes met, or parted
SCALARS = {
    str: f"a text of at most {LONGEST_TEXT} characters, and no others than a terminal may be shown",
    bool: "true or false",
    int: "a whole number, -1 or more",
    float: "a number, 0 or more",
}


class Outcome(Enum):
    """What became of one node's ranks in an attempt."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"  # since something happened elsewhere
    TIMED_OUT = "TIMED_OUT"
    ABORTED = "ABORTED"  # they could not be started, or the caller's own code has raised


class Decision(Enum):
    """What follows from what became of an attempt."""

    DONE = "DONE"
    AGAIN = "AGAIN"  # by the same nodes
    REGROUP = "REGROUP"  # by others: the nodes meet anew
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class History:
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
class Terms:
    """What has to be the same on all nodes, as text: a mapping of what it is to its value."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Card:
    """To the chair: this node is here."""

    group_rank: int
    host: str
    address: str
    nprocs: int
    role: str
    serves_store: bool
    grace_period: float
    nonce: str
    terms: Terms
    history: History


@dataclass(frozen=True, slots=True)
class Failing:
    """To the chair: this attempt fails on this node. Sent at once; the order in which these come is that of the failures."""

    group_rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """To the chair: this node's ranks are gone. What became of them is found out by the caller's thread, in its own time."""

    group_rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Ended:
    """To the chair: what became of this node's ranks."""

    group_rank: int
    attempt: int
    outcome: Outcome
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
class Leaving:
    """To the chair: this node ends by its own will, for this reason."""

    group_rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Bye:
    """To the chair: this node knows what came of the job, and needs the store no more."""

    group_rank: int


@dataclass(frozen=True, slots=True)
class Place:
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
class Start:
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
class Stop:
    """To all: the attempt is over."""

    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A node that was lost, or has left, with its ranks."""

    group_rank: int
    host: str
    rank: int
    nprocs: int
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """To all: what came of an attempt, and what follows."""

    attempt: int
    decision: Decision
    history: History
    cause: int = -1
    """The rank that failed first; -1 if none did."""
    failures: tuple[Mapping[str, Any], ...] = ()
    unsaid: int = 0
    gone: tuple[Gone, ...] = ()
    reason: str = ""
    why_not: str = ""
    timed_out: bool = False
    delay: float = 0.0
    restarts_left: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    """To all: nobody needs the store any more."""


FromMember = Card | Failing | Stopped | Ended | Leaving | Bye
Word = Start | Stop | Verdict | Closed
Message = FromMember | Word | Place
KINDS: Final[Mapping[str, type]] = {kind.__name__: kind for kind in get_args(Message)}


def to_body(message: Message) -> dict[str, Any]:
    """As plain data that JSON can hold."""
    return {"kind": type(message).__name__, **_plain(message)}


def from_body(body: Mapping[str, Any]) -> Message:
    """The message that was made into this. Raises ForgedError."""
    kind = KINDS.get(body.get("kind")) if isinstance(body.get("kind"), str) else None  # type: ignore[arg-type]
    if kind is None:
        raise ForgedError(f"there is no message of kind {body.get('kind')!r:.100}")
    message: Message = _read(kind, {name: value for name, value in body.items() if name != "kind"}, kind.__name__)
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return without_controls(value)[:LONGEST_TEXT]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value


def _read(wanted: Any, value: Any, where: str) -> Any:
    """The value as that type says. The types are those of the fields above, and no others."""
    if get_origin(wanted) is tuple:
        return _read_items(get_args(wanted), value, where)
    if hasattr(wanted, "__dataclass_fields__"):
        return _read_fields(wanted, value, where)
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        if not isinstance(value, str) or value not in wanted.__members__:
            raise _wrong(where, f"one of {', '.join(wanted.__members__)}", value)
        return wanted[value]
    if get_origin(wanted) is Mapping:  # read by who knows what is in it: failures.py
        if not isinstance(value, dict):
            raise _wrong(where, "a mapping", value)
        return value
    return _read_scalar(wanted, value, where)


def _read_items(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > MOST_ITEMS:
        raise _wrong(where, f"a list of at most {MOST_ITEMS}", value)
    if kinds[-1] is ...:
        return tuple(_read(kinds[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    if len(value) != len(kinds):
        raise _wrong(where, f"{len(kinds)} values", value)
    return tuple(_read(kind, item, f"{where}[{n}]") for n, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    names = {field.name for field in fields(kind)}
    if not isinstance(value, dict) or value.keys() != names:
        raise _wrong(where, f"a mapping with {', '.join(sorted(names)) or 'nothing in it'}", value)
    hints = _types_of(kind)
    return kind(**{name: _read(hints[name], value[name], f"{where}.{name}") for name in names})


@cache
def _types_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _read_scalar(wanted: Any, value: Any, where: str) -> Any:
    if wanted is str and isinstance(value, str) and len(value) <= LONGEST_TEXT and without_controls(value) == value:
        return value
    if wanted is bool and isinstance(value, bool):
        return value
    if wanted is int and isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= LARGEST:
        return value
    if wanted is float and isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST:
        return float(value)
    raise _wrong(where, SCALARS[wanted], value)


def _wrong(where: str, wanted: str, value: Any) -> ForgedError:
    return ForgedError(f"{where} must be {wanted}, not {value!r:.100}")

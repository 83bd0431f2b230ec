"""`RankCollectives`: the collectives that one rank has reported to the watcher. Without I/O."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from mpwatch.results.collective import Collective, CollectiveState
from mpwatch.results.to_json import to_json

MAX_COLLECTIVES = 64  # in an answer, which has the collectives that were called last


@dataclass(frozen=True, kw_only=True)
class RankCollectives:
    """What one rank has reported: its latest collectives, and the place where its main thread was."""

    collectives: tuple[Collective, ...] = ()
    """The latest collectives of the rank, with the oldest first."""
    place: str = ""
    """The line of the user's code in which the main thread was. It is empty if it is not known."""
    stack: str = field(default="", compare=False)
    """The stack of the main thread, with the most recent call first, in the format of faulthandler."""
    has_all: bool = True
    """Whether these are all collectives that the rank has called. It is False if the oldest ones are missing."""
    torch_rank: int | None = None
    """The rank in torch's default process group, or None if there was none. It can differ from mpwatch's rank."""

    answered_at: float = field(default=0.0, compare=False)
    """The time of the answer, by CLOCK_REALTIME. The field `seconds` of each collective counts back from it."""

    def has_call_after(self, earlier: "RankCollectives") -> bool:
        return not {_identify(call) for call in self.collectives} <= {_identify(call) for call in earlier.collectives}

    def to_json(self) -> str:
        """Return the text for `from_json`. It has the ranks of each group once, since a group may have thousands."""
        groups = list(dict.fromkeys(call.ranks for call in self.collectives))
        calls = [{**to_json(replace(call, ranks=())), "ranks": groups.index(call.ranks)} for call in self.collectives]
        return json.dumps({**to_json(replace(self, collectives=())), "groups": groups, "collectives": calls})

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankCollectives":
        """Raises ValueError, LookupError or TypeError if the text is invalid."""
        data = json.loads(text)
        groups = [tuple(map(int, ranks)) for ranks in data["groups"]]
        del data["groups"]
        data["collectives"] = tuple(_make_collective(call, groups[call["ranks"]]) for call in data["collectives"])
        return cls(**data)


def _identify(call: Collective) -> tuple[object, ...]:
    return call.backend, call.group, call.name, call.sequence


def _make_collective(data: dict[str, Any], ranks: tuple[int, ...]) -> Collective:
    shapes = {name: tuple(map(tuple, data[name])) for name in ("input_shapes", "output_shapes")}
    dtypes = {name: tuple(data[name]) for name in ("input_dtypes", "output_dtypes")}
    return Collective(**{**data, **shapes, **dtypes, "ranks": ranks, "state": CollectiveState(data["state"])})

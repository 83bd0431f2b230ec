"""`RankCollectives`: what one rank answers if it is asked for its collectives, and its JSON. Without I/O."""

import json
from dataclasses import dataclass, fields
from typing import Any

from mpwatch.results.collective import Collective, CollectiveState

SIMPLE_FIELDS = ("place", "has_all", "world", "rank_in_world")


@dataclass(frozen=True, kw_only=True)
class RankCollectives:
    """What one rank has answered: its latest collectives, and where it was."""

    collectives: tuple[Collective, ...] = ()
    """The latest ones, the oldest first."""
    place: str = ""
    """The user's line that the main thread was in. Empty if it is not known."""
    has_all: bool = True
    """Whether these are all collectives that the rank has called. False: the oldest ones are missing."""
    world: str = ""
    """Names the default process group that the rank has made last. The ranks of another world have another text."""
    rank_in_world: int | None = None
    """The rank in that group. It differs from mpwatch's rank if the user has numbered the processes. None: there is none."""

    def has_call_after(self, earlier: "RankCollectives") -> bool:
        """Return whether the rank has called a collective that it had not called when it gave the earlier answer."""
        return not {_identify(call) for call in self.collectives} <= {_identify(call) for call in earlier.collectives}

    def to_json(self) -> str:
        """Return a text that `from_json` reads. The ranks of a group are in it once."""
        groups = list(dict.fromkeys(call.ranks for call in self.collectives))
        index = {ranks: number for number, ranks in enumerate(groups)}
        calls = [{**_get_fields(call), "state": call.state.value, "ranks": index[call.ranks]} for call in self.collectives]
        simple = {name: getattr(self, name) for name in SIMPLE_FIELDS}
        return json.dumps({**simple, "groups": groups, "collectives": calls})

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankCollectives":
        """Return the object that `to_json` has written. Raises ValueError, LookupError or TypeError for any other text."""
        data = json.loads(text)
        groups = [tuple(map(int, ranks)) for ranks in data["groups"]]
        collectives = tuple(_make_collective(call, groups[call["ranks"]]) for call in data["collectives"])
        return cls(
            place=str(data["place"]),
            has_all=bool(data["has_all"]),
            world=str(data["world"]),
            rank_in_world=None if data["rank_in_world"] is None else int(data["rank_in_world"]),
            collectives=collectives,
        )


def _identify(call: Collective) -> tuple[object, ...]:
    return call.backend, call.group, call.group_number, call.name, call.sequence


def _get_fields(call: Collective) -> dict[str, Any]:
    return {field.name: getattr(call, field.name) for field in fields(call)}


def _make_collective(data: dict[str, Any], ranks: tuple[int, ...]) -> Collective:
    shapes = {name: tuple(map(tuple, data[name])) for name in ("input_shapes", "output_shapes")}
    dtypes = {name: tuple(data[name]) for name in ("input_dtypes", "output_dtypes")}
    return Collective(**{**data, **shapes, **dtypes, "ranks": ranks, "state": CollectiveState(data["state"])})

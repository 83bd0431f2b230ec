"""`RankCollectives` has the collectives that one rank has reported to the watcher, and converts them to JSON.

Without I/O.
"""

import json
from dataclasses import dataclass, fields
from typing import Any

from mpwatch.results.collective import Collective, CollectiveState

SIMPLE_FIELDS = ("place", "has_all", "world", "rank_in_world")


@dataclass(frozen=True, kw_only=True)
class RankCollectives:
    """What one rank has reported: its latest collectives, and the place where its main thread was."""

    collectives: tuple[Collective, ...] = ()
    """The latest collectives of the rank, with the oldest first."""
    place: str = ""
    """The line of the user's code in which the main thread was. It is empty if it is not known."""
    has_all: bool = True
    """Whether these are all collectives that the rank has called. It is False if the oldest ones are missing."""
    world: str = ""
    """The name of the default process group that the rank has made last. Ranks of another world have another name."""
    rank_in_world: int | None = None
    """The rank in that group. It can differ from mpwatch's rank. It is None if there is no group."""

    def has_call_after(self, earlier: "RankCollectives") -> bool:
        """Return whether this report contains a call that is missing in `earlier`, an older report of the same rank."""
        return not {_identify(call) for call in self.collectives} <= {_identify(call) for call in earlier.collectives}

    def to_json(self) -> str:
        """Return a JSON text that `from_json` can read."""
        groups = list(dict.fromkeys(call.ranks for call in self.collectives))
        index = {ranks: number for number, ranks in enumerate(groups)}
        calls = [{**_get_fields(call), "state": call.state.value, "ranks": index[call.ranks]} for call in self.collectives]
        simple = {name: getattr(self, name) for name in SIMPLE_FIELDS}
        return json.dumps({**simple, "groups": groups, "collectives": calls})

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankCollectives":
        """Build a RankCollectives from a text that `to_json` has written.

        Raises ValueError, LookupError or TypeError if the text is invalid.
        """
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

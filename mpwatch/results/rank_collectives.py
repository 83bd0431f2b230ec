"""`RankCollectives`: what one rank answers if it is asked for its collectives, and its JSON. Without I/O."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from mpwatch.results.collective import Collective, CollectiveState


@dataclass(frozen=True, kw_only=True)
class RankCollectives:
    """What one rank has answered: its latest collectives, and where it was."""

    collectives: tuple[Collective, ...] = ()
    """The latest ones, the oldest first."""
    place: str = ""
    """The user's line that the main thread was in. Empty if it is not known."""
    has_all: bool = True
    """Whether these are all collectives that the rank has called. False: the oldest ones are missing."""

    def to_json(self) -> str:
        """Return a text that `from_json` reads."""
        return json.dumps(asdict(self), default=lambda state: state.value)

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankCollectives":
        """Return the object that `to_json` has written. Raises ValueError, KeyError or TypeError for any other text."""
        data = json.loads(text)
        collectives = tuple(map(_make_collective, data["collectives"]))
        return cls(place=str(data["place"]), has_all=bool(data["has_all"]), collectives=collectives)


def _make_collective(data: dict[str, Any]) -> Collective:
    shapes = {name: tuple(map(tuple, data[name])) for name in ("input_shapes", "output_shapes")}
    lists = {name: tuple(data[name]) for name in ("ranks", "input_dtypes", "output_dtypes")}
    return Collective(**{**data, **shapes, **lists, "state": CollectiveState(data["state"])})

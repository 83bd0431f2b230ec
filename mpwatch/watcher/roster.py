"""In which phase each rank is, and how many are in each: a part of the machine. Pure."""

from collections.abc import Iterable

from .states import TRANSITIONS, IllegalEventError, Phase, RankEvent

__all__ = ["Roster"]


class Roster:
    """Of ranks that are all being started."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.phases = dict.fromkeys(ranks, Phase.STARTING)
        self.count = dict.fromkeys(Phase, 0) | {Phase.STARTING: len(self.phases)}

    def follow(self, event: RankEvent) -> Phase:
        """Move the rank where the table says that this event leads to. Returns where it was.

        Raises IllegalEventError for an event that cannot be.
        """
        before = self.phases[event.rank]
        try:
            after = TRANSITIONS[before][type(event)]
        except KeyError:
            raise IllegalEventError(f"{event} in phase {before.name}") from None
        if after is not None:
            self.move(event.rank, after)
        return before

    def those(self, phase: Phase) -> list[int]:
        """The ranks that are in this phase."""
        return [rank for rank, now_in in self.phases.items() if now_in is phase]

    def move_all(self, phase: Phase, *, to: Phase) -> list[int]:
        """The ranks that were in this phase, and are now in that one."""
        ranks = self.those(phase)
        for rank in ranks:
            self.move(rank, to)
        return ranks

    def move(self, rank: int, to: Phase) -> None:
        """The rank is in that phase now."""
        self.count[self.phases[rank]] -= 1
        self.count[to] += 1
        self.phases[rank] = to

    def are_gone(self) -> bool:
        """Whether no rank is left."""
        return self.count[Phase.GONE] == len(self.phases)

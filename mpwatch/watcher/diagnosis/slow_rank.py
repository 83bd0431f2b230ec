"""Finds the rank for which the others wait in most collectives. Pure.

    the answers of each check ---> SlowRankFinder.add ---> by group: who was last, and by how much ---> find

All ranks of a machine share the clock of torch's records, so the times at which they entered a collective can be compared.
A collective counts if certainly all ranks of its group came to it from work of their own:

- In it, each rank waits for all. In a broadcast or a gather, some ranks need not wait, and run ahead. Barriers do not count:
  there a program lets the others wait for one rank on purpose, for example for a checkpoint.
- So did each rank in the one before it: nobody entered the one before all had entered the other. If somebody has, the other
  was asynchronous, as with the buckets of DistributedDataParallel, and the lateness was counted there.
- It came at least 5 ms later than that one. Two that follow each other closely say nothing about the work before the first.
- No rank of the group uses send or recv, by which it may have waited for a slow rank of another group.

A rank is not named if in another of its groups it is another rank that is late: it may be the victim of that one.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from mpwatch.results.model import Lateness
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.diagnosis.collective_verdict import (
    POINT_TO_POINT,
    SAME_INPUTS,
    SAME_OUTPUTS,
    Calls,
    Group,
    Slot,
    is_waiting,
)

COUNTED = (SAME_INPUTS | SAME_OUTPUTS | {"all_to_all"}) - {"broadcast", "reduce", "gather", "scatter"}
MAX_COLLECTIVES = 1000  # of a group, the latest
MAX_GROUPS = 64
MAX_PLACES = 100  # of the ranks of a group, the latest
# A rank is named if it was last in this share of at least so many collectives, and so many standard deviations more often
# than one of equal ranks is by chance; and in so many checks, since a shorter disturbance of the machine may soon be over.
MIN_COLLECTIVES, MIN_CHECKS, MIN_SHARE_LAST, MIN_DEVIATIONS = 50, 8, 0.5, 5.0
MIN_SECONDS, MIN_SHARE_OF_STEP = 0.002, 0.05  # by which it is late in the median
MIN_STEP = 0.005  # seconds between two collectives


class _Entry(NamedTuple):
    """Of a collective that all ranks have entered."""

    check: int
    last: int  # the rank that entered it last
    lateness: float  # seconds after the rank before it
    step: float  # seconds since the last rank entered the collective before


@dataclass
class _History:
    last_number: int
    names: set[str] = field(default_factory=set)
    entries: deque[_Entry] = field(default_factory=lambda: deque(maxlen=MAX_COLLECTIVES))
    places: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=MAX_PLACES))  # where which rank was late

    def find(self, group: Group) -> Lateness | None:
        total, share = len(self.entries), 1 / len(group.ranks)
        if total < MIN_COLLECTIVES:
            return None
        ((rank, count),) = Counter(entry.last for entry in self.entries).most_common(1)
        found = [entry for entry in self.entries if entry.last == rank]
        newer = [entry.last for entry in self.entries][total // 2 :]
        seconds, step = median(entry.lateness for entry in found), median(entry.step for entry in self.entries)
        is_certain = (
            count >= total * max(MIN_SHARE_LAST, share + MIN_DEVIATIONS * math.sqrt(share * (1 - share) / total))
            and newer.count(rank) >= len(newer) * MIN_SHARE_LAST  # it is still slow
            and len({entry.check for entry in found}) >= MIN_CHECKS
            and seconds >= max(MIN_SECONDS, MIN_SHARE_OF_STEP * step)
        )
        if not is_certain:
            return None
        places = Counter(place for late, place in self.places if late == rank).most_common(1)
        return Lateness(
            rank=rank,
            times_last=count,
            collectives=total,
            name=next(iter(self.names)) if len(self.names) == 1 else "",
            group=group.name,
            seconds=seconds,
            place=places[0][0] if places else "",
        )


class SlowRankFinder:
    """Made for one call. It forgets a group if its numbers begin anew, and what it saw of a group first: the warming up."""

    def __init__(self) -> None:
        self._checks = 0
        self._histories: dict[Group, _History] = {}

    def add(self, answers: Mapping[int, RankCollectives]) -> None:
        """Add the answers of all ranks that were asked at the same time."""
        self._checks += 1
        calls = Calls(answers)
        uses_sends = {
            rank for rank, answer in answers.items() if any(call.name in POINT_TO_POINT for call in answer.collectives)
        }
        complete: dict[Group, list[Slot]] = {}
        for slot in calls.list_slots():
            if len(slot.group.ranks) > 1 and uses_sends.isdisjoint(slot.group.ranks):
                if slot.called.keys() == set(slot.group.ranks):
                    complete.setdefault(slot.group, []).append(slot)
                elif slot.group in self._histories:
                    self._add_place(slot, calls, answers)
        for group, slots in complete.items():
            history = self._histories.get(group)
            if history is None or slots[-1].number < history.last_number:
                history = self._histories[group] = _History(slots[-1].number)
            for before, slot in pairwise(slots):
                if slot.number > history.last_number and slot.number == before.number + 1:
                    self._add_entry(history, before, slot, answers)
            history.last_number = slots[-1].number
        while len(self._histories) > MAX_GROUPS:
            del self._histories[next(iter(self._histories))]

    def _add_entry(self, history: _History, before: Slot, slot: Slot, answers: Mapping[int, RankCollectives]) -> None:
        names = {call.name for call in slot.called.values()}
        names_before = {call.name for call in before.called.values()}
        *_, (second, _), (last, rank) = entered = _list_entries(slot, answers)
        was_complete_at = _list_entries(before, answers)[-1][0]
        step = last - was_complete_at
        do_all_wait = names <= COUNTED and names_before <= COUNTED | {"barrier"}
        if do_all_wait and entered[0][0] >= was_complete_at and step >= MIN_STEP:
            history.names |= names
            history.entries.append(_Entry(self._checks, rank, last - second, step))

    def _add_place(self, slot: Slot, calls: Calls, answers: Mapping[int, RankCollectives]) -> None:
        """If exactly one rank is absent while the others wait, note where it is. It may be in another collective."""
        absent = calls.find_absent(slot)
        if len(absent) == 1 and absent | slot.called.keys() == set(slot.group.ranks):
            (rank,) = absent
            if (place := answers[rank].place) and not any(map(is_waiting, answers[rank].collectives)):
                self._histories[slot.group].places.append((rank, place))

    def find(self) -> Lateness | None:
        """Return the rank for which others wait longest, if it is certain that one does."""
        found = {group: late for group, history in self._histories.items() if (late := history.find(group)) is not None}
        certain = [
            late
            for late in found.values()
            if all(other.rank == late.rank for group, other in found.items() if late.rank in group.ranks)
        ]
        return max(certain, key=lambda late: late.seconds, default=None)


def _list_entries(slot: Slot, answers: Mapping[int, RankCollectives]) -> list[tuple[float, int]]:
    """Return when which rank has entered it, the first one first."""
    return sorted((answers[rank].answered_at - call.seconds, rank) for rank, call in slot.called.items())

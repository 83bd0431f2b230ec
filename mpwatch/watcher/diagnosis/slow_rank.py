"""Finds the rank for which the others wait in most collectives. Pure.

    the answers of each check ---> SlowRankFinder.add ---> by group: when who entered each collective ---> find

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
from collections.abc import Mapping, Sequence
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
# A rank is named if, in the median, it enters later than each other rank, by so many seconds and by this share of a step.
# Of so many collectives, it entered after the next one by so many standard deviations more often than one of two equal ranks
# would by chance; and in so many checks, since a short disturbance of the machine may soon be over.
MIN_SECONDS, MIN_SHARE_OF_STEP = 0.002, 0.05
MIN_COLLECTIVES, MIN_DEVIATIONS, MIN_CHECKS = 50, 5.0, 8
MIN_STEP = 0.005  # seconds between two collectives


class _Entry(NamedTuple):
    """Of a collective that all ranks have entered."""

    check: int
    entered: Mapping[int, float]  # by rank, the earliest first, in seconds since the last rank entered the collective before


class _Place(NamedTuple):
    """Where a rank was while the others waited for it."""

    rank: int
    place: str
    stack: str


@dataclass
class _History:
    last_number: int
    names: set[str] = field(default_factory=set)
    entries: deque[_Entry] = field(default_factory=lambda: deque(maxlen=MAX_COLLECTIVES))
    places: deque[_Place] = field(default_factory=lambda: deque(maxlen=MAX_PLACES))

    def find(self, group: Group) -> Lateness | None:
        entries, total = list(self.entries), len(self.entries)
        if total < MIN_COLLECTIVES:
            return None
        *_, other, rank = sorted(group.ranks, key=lambda rank: median(entry.entered[rank] for entry in entries))
        late = [list(entry.entered.values()) for entry in entries if next(reversed(entry.entered)) == rank]
        after_other = [entry for entry in entries if entry.entered[rank] > entry.entered[other]]
        is_certain = (
            _is_later(rank, other, entries)
            and _is_later(rank, other, entries[total // 2 :])  # it is still slow
            and len(after_other) >= total / 2 + MIN_DEVIATIONS * math.sqrt(total) / 2
            and len({entry.check for entry in after_other}) >= MIN_CHECKS
        )
        if not is_certain or not late:
            return None
        stacks = {late.place: late.stack for late in self.places if late.rank == rank}
        places = Counter(late.place for late in self.places if late.rank == rank).most_common(1)
        place = places[0][0] if places else ""
        return Lateness(
            rank=rank,
            times_last=len(late),
            collectives=total,
            name=next(iter(self.names)) if len(self.names) == 1 else "",
            group=group.name,
            seconds=median(last - second for *_, second, last in late),
            place=place,
            stack=stacks.get(place, ""),
        )


def _is_later(rank: int, other: int, entries: Sequence[_Entry]) -> bool:
    seconds = median(entry.entered[rank] for entry in entries) - median(entry.entered[other] for entry in entries)
    step = median(max(entry.entered.values()) for entry in entries)
    return seconds >= max(MIN_SECONDS, MIN_SHARE_OF_STEP * step)


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
        entered, entered_before = _list_entries(slot, answers), _list_entries(before, answers)
        was_complete_at = max(entered_before.values())
        since = {rank: at - was_complete_at for rank, at in entered.items()}
        do_all_wait = names <= COUNTED and names_before <= COUNTED | {"barrier"}
        if do_all_wait and min(since.values()) >= 0 and max(since.values()) >= MIN_STEP:
            history.names |= names
            history.entries.append(_Entry(self._checks, since))

    def _add_place(self, slot: Slot, calls: Calls, answers: Mapping[int, RankCollectives]) -> None:
        """If exactly one rank is absent while the others wait, note where it is. It may be in another collective."""
        absent = calls.find_absent(slot)
        if len(absent) == 1 and absent | slot.called.keys() == set(slot.group.ranks):
            (rank,) = absent
            answer = answers[rank]
            if answer.place and not any(map(is_waiting, answer.collectives)):
                self._histories[slot.group].places.append(_Place(rank, answer.place, answer.stack))

    def find(self) -> Lateness | None:
        """Return the rank for which others wait longest, if it is certain that one does."""
        found = {group: late for group, history in self._histories.items() if (late := history.find(group)) is not None}
        certain = [
            late
            for late in found.values()
            if all(other.rank == late.rank for group, other in found.items() if late.rank in group.ranks)
        ]
        return max(certain, key=lambda late: late.seconds, default=None)


def _list_entries(slot: Slot, answers: Mapping[int, RankCollectives]) -> dict[int, float]:
    """Return when which rank has entered it, the first one first."""
    entered = {rank: answers[rank].answered_at - call.seconds for rank, call in slot.called.items()}
    return dict(sorted(entered.items(), key=lambda item: item[1]))

"""Finds the rank for which the others wait. Pure.

    the answers of each check ---> SlowRankFinder.add ---> which share of the time each rank has waited ---> find

In a synchronous program all ranks are equally fast to look at, but the slow rank waits least: it comes last, and then the
collective goes on. A rank waits from the time at which it calls a collective until all ranks of the group have called it.
All ranks of a machine share the clock of torch's records, so these times can be compared.

A rank that calls its next collective before that does not wait for all, but works: the first one was asynchronous, as with
the buckets of DistributedDataParallel, or one in which it waits for nobody, as the root of a broadcast. This does not count.
What a rank waits in send or recv is not known, so nothing is compared while ranks use these.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from mpwatch.results.model import Lateness
from mpwatch.results.rank_collectives import MAX_COLLECTIVES, RankCollectives
from mpwatch.watcher.diagnosis.collective_verdict import POINT_TO_POINT, Calls, Slot, is_waiting

# A rank is named if it has waited less than each other rank: in the median of the checks by this share of the time, and in
# more checks than by chance, by so many standard deviations. So 11 checks are needed: a short disturbance may soon be over.
MIN_SHARE, MIN_DEVIATIONS = 0.05, 3.3
MAX_CHECKS = 40  # the latest ones
MIN_WAIT = 0.002  # seconds; shorter ones do not count, since ranks do not leave a collective at exactly the same time
MAX_PLACES = 100


class _Place(NamedTuple):
    """Where a rank was while the others waited for it in a collective."""

    rank: int
    place: str
    stack: str


class SlowRankFinder:
    """Made for one call."""

    def __init__(self) -> None:
        self._checked_until = 0.0  # seconds since the epoch
        self._shares: deque[dict[int, float]] = deque(maxlen=MAX_CHECKS)  # of the time that each rank has waited, by check
        self._places: deque[_Place] = deque(maxlen=MAX_PLACES)

    @property
    def has_all_checks(self) -> bool:
        """Whether it has MAX_CHECKS checks, which is enough to name a rank even if no check has found its place."""
        return len(self._shares) == MAX_CHECKS

    def add(self, answers: Mapping[int, RankCollectives]) -> None:
        """Add the answers of all ranks that were asked at the same time."""
        latest = {rank: answer.collectives[-MAX_COLLECTIVES:] for rank, answer in answers.items()}  # without gaps
        if not all(latest.values()) or any(call.name in POINT_TO_POINT for found in latest.values() for call in found):
            return
        calls = Calls(answers)
        knows_all = (
            len(calls.by_rank) == len(answers) and all(calls.by_rank.values()) and all(map(calls.knows_all, calls.slots))
        )
        if knows_all and len(answers) > 1:
            self._add_places(calls, answers)
            known_since = max(answers[rank].answered_at - found[0].seconds for rank, found in latest.items())
            self._add_shares(calls, answers, max(known_since, self._checked_until))

    def _add_shares(self, calls: Calls, answers: Mapping[int, RankCollectives], begin: float) -> None:
        entered = {
            rank: {slot: answers[rank].answered_at - call.seconds for slot, call in called.items()}
            for rank, called in calls.by_rank.items()
        }
        end = min(max(times.values()) for times in entered.values())
        if end > begin:
            self._checked_until = end
            if self._shares and self._shares[0].keys() != entered.keys():
                self._shares.clear()
            self._shares.append({rank: _add_waits(rank, entered, begin, end) / (end - begin) for rank in entered})

    def _add_places(self, calls: Calls, answers: Mapping[int, RankCollectives]) -> None:
        """If exactly one rank is absent while the others wait, note where it is."""
        for slot in calls.slots:
            absent = calls.find_absent(slot)
            if len(absent) == 1 and absent | slot.called.keys() == set(slot.key.ranks):
                (rank,) = absent
                answer = answers[rank]
                if answer.place and not any(map(is_waiting, answer.collectives)):
                    self._places.append(_Place(rank, answer.place, answer.stack))

    def find(self) -> Lateness | None:
        """Return the rank for which the others wait, if it is certain that there is one."""
        if not self._shares:
            return None
        rank, *others = sorted(self._shares[0], key=lambda rank: median(shares[rank] for shares in self._shares))
        more = [[shares[other] - shares[rank] for shares in self._shares] for other in others]
        share, checks = min(map(median, more)), min(sum(each > 0 for each in waits) for waits in more)
        total = len(self._shares)
        if share < MIN_SHARE or checks < total / 2 + MIN_DEVIATIONS * math.sqrt(total) / 2:
            return None
        stacks = {late.place: late.stack for late in self._places if late.rank == rank}
        places = Counter(late.place for late in self._places if late.rank == rank).most_common(1)
        place = places[0][0] if places else ""
        return Lateness(rank=rank, share=share, place=place, stack=stacks.get(place, ""))


def _add_waits(rank: int, entered: Mapping[int, Mapping[Slot, float]], begin: float, end: float) -> float:
    """Return the seconds that a rank has waited between two times."""
    total = 0.0
    for (slot, at), (_, next_at) in pairwise(entered[rank].items()):
        if slot.called.keys() == set(slot.key.ranks):
            all_entered_at = max(entered[other][slot] for other in slot.called)
            waits_until = min(all_entered_at, end)
            wait = waits_until - max(at, begin)
            if wait >= MIN_WAIT and next_at >= waits_until:
                total += wait
    return total

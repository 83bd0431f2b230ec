"""Whose heartbeat is late, and whose is lost: the part of the machine that listens to pulses. Pure.

While ranks are at work their pulses are felt whenever one of them may have been silent for half of `heartbeat_timeout`, and
is late then, and oftener as long as one is; one that has never beaten has no limit, and is looked at again after that time,
so that none of its beats can grow old unseen. If one is silent for all of it, all are felt a second time a little later: who
was only suspended beats again, and who waits for the silent one is silent by then, too.
"""

import math
from collections.abc import Iterable

from mpwatch.watcher.machine.transitions import LATE_SECONDS, SURE_SECONDS

LATE = 0.5  # of the limit: who is silent for so long is late
OFTEN = 0.1  # of it: how often all are felt while somebody is late


class Heartbeats:
    """Of some ranks in one call.

    Args:
        limit: seconds that a rank which has beaten once may be silent, or None.
        now: seconds on the clock that all times are of.
    """

    def __init__(self, limit: float | None, now: float) -> None:
        self._limit = math.inf if limit is None else limit
        self._unfelt: set[int] = set()
        self._is_second_time = False
        self.due_at = now + self._limit * LATE  # when they are felt next
        self.late: dict[int, float] = {}  # ranks that have been silent for a while, with their last beats
        self.silent: dict[int, float] = {}  # those of them that were so for too long

    def feel(self, ranks: Iterable[int], now: float) -> list[int]:
        """Of these ranks, all at work, whose pulse is to be felt now."""
        nothing_ran = now > self.due_at + LATE_SECONDS  # neither this program nor its ranks
        self.due_at = now + self._limit * (1 if nothing_ran else LATE)
        self._unfelt = set() if nothing_ran else set(ranks)
        if not self._unfelt:
            self._is_second_time = False
        return sorted(self._unfelt)

    def hear(self, rank: int, beat_at: float | None, now: float) -> bool:
        """When this rank was last heard of. True if it is sure now, with all of them felt, that some are silent."""
        self._unfelt.discard(rank)
        if beat_at is not None:
            self._note(rank, beat_at, now)
        if self._unfelt:
            return False
        if self.silent and self._is_second_time:
            return True
        self._is_second_time = bool(self.silent)
        if self.silent:
            self.due_at = now + min(SURE_SECONDS, self._limit * OFTEN)
            self.silent.clear()
        return False

    def forget(self, rank: int) -> None:
        """It is not at work any more."""
        self.late.pop(rank, None)

    def _note(self, rank: int, beat_at: float, now: float) -> None:
        self.late.pop(rank, None)
        late_at, lost_at = beat_at + self._limit * LATE, beat_at + self._limit
        if late_at > now:
            self.due_at = min(self.due_at, late_at)
            return
        self.late[rank] = beat_at
        self.due_at = min(self.due_at, lost_at, now + self._limit * OFTEN)
        if lost_at <= now:
            self.silent[rank] = beat_at

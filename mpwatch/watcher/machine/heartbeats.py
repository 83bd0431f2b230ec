"""Finds late heartbeats and silent ranks for the state machine. Pure.

A heartbeat is late when it is older than half of `heartbeat_timeout`. As soon as the heartbeat of one rank may be late, the
heartbeats of all running ranks are read. While a heartbeat is late, all heartbeats are read more often.

If a rank was silent for the whole `heartbeat_timeout`, all heartbeats are read a second time a little later. A rank counts
as failed only if it is also silent at the second reading. So a rank that was suspended and has just continued has time to
send a heartbeat. If a rank hangs, the ranks that wait for this rank are also silent.

The `heartbeat_timeout` does not apply to a rank that has never sent a heartbeat.
"""

import math
from collections.abc import Mapping

from mpwatch.watcher.machine.transitions import CONFIRM_SECONDS, SUSPENDED_SECONDS

LATE_SHARE = 0.5  # of the limit: a rank that has been silent for so long is late
RECHECK_SHARE = 0.1  # of the limit: the time between two readings while a rank is late


class Heartbeats:
    """The heartbeats of all ranks during one call. After its first one, a rank may be silent for `limit` seconds."""

    def __init__(self, limit: float | None, now: float) -> None:
        self._limit = math.inf if limit is None else limit
        self._is_second_reading = False
        self._is_excused = False  # the last reading came much too late
        self._begun_at = -math.inf  # silence counts from then on, at the earliest
        self.due_at = now + self._limit * LATE_SHARE  # when the next reading is due
        self.late_ranks: dict[int, float] = {}  # late ranks, with the times of their last heartbeats
        self.silent_ranks: dict[int, float] = {}  # ranks that were silent for the whole limit, with the same

    def restart(self, now: float) -> None:
        """Measure the silence of each rank again from `now`, because a debugger or Ctrl-Z had stopped the ranks."""
        self._begun_at = now
        self._is_second_reading = False
        self.due_at = now + self._limit * LATE_SHARE
        self.late_ranks.clear()
        self.silent_ranks.clear()

    def begin_reading(self, now: float) -> bool:
        """Return whether the heartbeats of all running ranks must be read now."""
        # If a reading comes so late, perhaps neither the calling program nor its ranks could run, so no rank is to blame.
        # Or the program is only busy, perhaps all the time. So the ranks get more time once, and not at each reading.
        was_suspended = now > self.due_at + SUSPENDED_SECONDS and not (self._is_excused or self._is_second_reading)
        self._is_excused = was_suspended
        self.due_at = now + self._limit * (1.0 if was_suspended else LATE_SHARE)
        return not was_suspended

    def add(self, beats: Mapping[int, float | None], now: float) -> bool:
        """Record the heartbeats of all running ranks. Return True if at least one was silent at two readings."""
        self.silent_ranks.clear()
        for rank, beat_at in beats.items():
            if beat_at is not None:
                self._update(rank, beat_at, now)
        was_second_reading, self._is_second_reading = self._is_second_reading, bool(self.silent_ranks)
        if self.silent_ranks and not was_second_reading:
            self.due_at = now + min(CONFIRM_SECONDS, self._limit * RECHECK_SHARE)
        return bool(self.silent_ranks) and was_second_reading

    def _update(self, rank: int, beat_at: float, now: float) -> None:
        self.late_ranks.pop(rank, None)
        counted_from = max(beat_at, self._begun_at)
        late_at, silent_at = counted_from + self._limit * LATE_SHARE, counted_from + self._limit
        if late_at > now:
            self.due_at = min(self.due_at, late_at)
            return
        self.late_ranks[rank] = beat_at
        self.due_at = min(self.due_at, silent_at, now + self._limit * RECHECK_SHARE)
        if silent_at <= now:
            self.silent_ranks[rank] = beat_at

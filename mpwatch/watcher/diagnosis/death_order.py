"""Estimates when a rank died, in the watcher thread. No I/O, except for reading the clock.

Messages have a time stamp, deaths have none. The kernel closes the connections of a process before it reports its exit (by
0.2 to 4 ms, more on a busy machine), so peers may fail before the watcher can notice the exit. But the selector returns
descriptors in the order in which they became ready, and the channel of a dying rank ends together with its connections:

- If the watcher sees the end of a channel before it reads a message FAILING of another rank, the rank died before the time
  stamp of that message.
- A death that it notices after the message happened after the time stamp.

If the watcher has sent signals to a rank, it did not die before the first of them. Else a rank that the watcher killed could
look like the first failure.
"""

import math
from typing import NamedTuple

from mpwatch.os_support.clock import monotonic
from mpwatch.watcher.diagnosis.observations import RankObservations

DEATH_LAG_SECONDS = 0.1  # a death that caused a failure is noticed at most so much later than the failure


class _Death(NamedTuple):
    earliest: float
    noticed_at: float
    observed: RankObservations


class DeathClock:
    def __init__(self) -> None:
        self._deaths: list[_Death] = []  # recent ones
        self._latest_stamp = 0.0
        self._woke_at = 0.0

    def start_wakeup(self) -> None:
        """Note that what is recorded from now on is read in another wake-up, maybe a late one."""
        self._woke_at = monotonic()

    def record_dying(self, observed: RankObservations) -> None:
        """Set the time of a rank's death to now. `record_message` may move it to an earlier time."""
        if observed.died_at is None:
            observed.died_at = monotonic()
            self._drop_old_deaths(observed.died_at)
            earliest = max(self._latest_stamp, observed.first_signal_at)
            self._deaths.append(_Death(earliest, observed.died_at, observed))

    def record_death(self, observed: RankObservations) -> None:
        self.record_dying(observed)
        observed.has_exited = True

    def record_message(self, stamp: float) -> None:
        """Move recent deaths to before `stamp`, of a message FAILING that was just read, but not before earlier stamps.

        A message may come long after its stamp, as after a prompt. Deaths of earlier wake-ups then stay as they are.
        """
        limit = stamp
        self._drop_old_deaths(monotonic())
        for earliest, noticed_at, observed in reversed(self._deaths):
            assert observed.died_at is not None
            if noticed_at < self._woke_at and noticed_at > stamp + DEATH_LAG_SECONDS:
                continue
            observed.died_at = max(earliest, min(observed.died_at, math.nextafter(limit, 0.0)))
            limit = min(limit, observed.died_at)
        self._latest_stamp = max(self._latest_stamp, stamp)

    def _drop_old_deaths(self, now: float) -> None:
        self._deaths = [death for death in self._deaths if now - death.noticed_at <= DEATH_LAG_SECONDS]

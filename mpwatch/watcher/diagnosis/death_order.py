"""Estimates when a rank died. This module runs in the watcher thread, and does no I/O except reading the clock.

A rank puts a time stamp on its messages. A death has no time stamp: the watcher only knows when it noticed the death. The
selector returns descriptors in the order in which they became ready. So the watcher can estimate when a rank died:

- If the watcher reads a message FAILING of any rank before it notices a death, the dead rank probably died after the time
  stamp of the message.
- If the watcher notices a death and then reads a message FAILING in the same wake-up, the dead rank probably died before the
  time stamp of the message.

If a death causes an exception in another rank, the estimated time of the death is usually earlier than the exception.

A message can arrive much later than its time stamp. So the estimate has a limit: if the watcher has sent signals to a
rank, the estimated time of its death is not earlier than the first of these signals. Without this limit, a rank that the
watcher killed could look like the first failure.
"""

import math

from mpwatch.os_support.clock import monotonic
from mpwatch.watcher.diagnosis.observations import RankObservations


class DeathClock:
    """Sets the time of death (`died_at`) of each dead rank."""

    def __init__(self) -> None:
        self._deaths: list[tuple[float, RankObservations]] = []  # of this wake-up: the earliest possible time, and the rank
        self._latest_stamp = 0.0

    def start_wakeup(self) -> None:
        """Begin a new wake-up. `record_message` changes only the times of deaths that were recorded after this call."""
        self._deaths.clear()

    def record_death(self, observed: RankObservations) -> None:
        """Set the time of a rank's death to now. `record_message` can replace the time of a death with an earlier time."""
        observed.died_at = monotonic()
        self._deaths.append((max(self._latest_stamp, observed.first_signal_at), observed))

    def record_message(self, stamp: float) -> None:
        """For each death that was recorded in this wake-up, set the estimated time `died_at` to a time before `stamp`.

        `stamp` is the time stamp of a message FAILING that the watcher has just read. However, `died_at` is never earlier
        than a time stamp that was recorded before the death.
        """
        limit = stamp
        for earliest, observed in reversed(self._deaths):
            assert observed.died_at is not None
            observed.died_at = max(earliest, min(observed.died_at, math.nextafter(limit, 0.0)))
            limit = min(limit, observed.died_at)
        self._latest_stamp = max(self._latest_stamp, stamp)

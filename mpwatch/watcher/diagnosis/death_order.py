"""Estimates when a rank died. This module runs in the watcher thread, and does no I/O except reading the clock.

A rank puts a time stamp on its messages. A death has no time stamp: the watcher only knows when it noticed the death. The
selector returns descriptors in the order in which they became ready. So two limits are known:

- A death is later than the time stamps of all messages that the watcher read before it noticed the death.
- A death is earlier than the time stamp of each message that the watcher reads after the death in the same wake-up.

An exception that a death has caused gets a later time than the death, even if the watcher wakes up late.

A message can arrive much later than its time stamp. The time of a death is never earlier than the first signal that the
watcher sent to the dead rank. A rank that the watcher killed must not look like the first failure.
"""

import math
import time

from mpwatch.watcher.diagnosis.observations import RankObservations


class DeathClock:
    """Sets `died_at` of the ranks that died in the current wake-up of the event loop."""

    def __init__(self) -> None:
        self._deaths: list[tuple[float, RankObservations]] = []  # of this wake-up: the earliest possible time, and the rank
        self._latest_stamp = 0.0

    def start_wakeup(self) -> None:
        """Begin a new wake-up. The messages of the new wake-up do not change the times of deaths in earlier wake-ups."""
        self._deaths.clear()

    def record_death(self, observed: RankObservations) -> None:
        """Set the time of a rank's death to now. `record_message` can replace the time of a death with an earlier time."""
        observed.died_at = time.monotonic()
        self._deaths.append((max(self._latest_stamp, observed.first_signal_at), observed))

    def record_message(self, stamp: float) -> None:
        """Change the times of the deaths in this wake-up so that they are earlier than the time of a message.

        `stamp` is the time at which the rank sent the message.
        """
        limit = stamp
        for earliest, observed in reversed(self._deaths):
            assert observed.died_at is not None
            observed.died_at = max(earliest, min(observed.died_at, math.nextafter(limit, 0.0)))
            limit = min(limit, observed.died_at)
        self._latest_stamp = max(self._latest_stamp, stamp)

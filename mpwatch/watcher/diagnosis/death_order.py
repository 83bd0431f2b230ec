"""Estimates when a rank died. Runs in the watcher thread. This module does no I/O, but reads the clock.

A rank puts a time stamp on its messages. A death has no time stamp: the watcher only knows when it noticed the death. The
selector returns descriptors in the order in which they became ready. So two limits are known:

- A death is later than the time stamps of all messages that the watcher read before it noticed the death.
- A death is earlier than the time stamps of the messages that the watcher read later in the same wake-up.

For example, a rank raises an exception because another rank died. The message of the rank that raised the exception has a
later time than the death, even if the watcher wakes up late.

A message can arrive much later than its time stamp. So the time of a death is never earlier than the first signal that the
watcher sent to the dead rank. Otherwise a rank that the watcher killed could look as if it had died first.
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
        """Begin a new wake-up. Messages that are read from now on do not change the times of earlier deaths."""
        self._deaths.clear()

    def record_death(self, observed: RankObservations) -> None:
        """Set the time of a death to now. `record_message` can replace this time with an earlier time."""
        observed.died_at = time.monotonic()
        self._deaths.append((max(self._latest_stamp, observed.first_signal_at), observed))

    def record_message(self, stamp: float) -> None:
        """Make the times of this wake-up's deaths earlier than the time of this message.

        `stamp` is the time at which the rank sent the message.
        """
        limit = stamp
        for earliest, observed in reversed(self._deaths):
            assert observed.died_at is not None
            observed.died_at = max(earliest, min(observed.died_at, math.nextafter(limit, 0.0)))
            limit = min(limit, observed.died_at)
        self._latest_stamp = max(self._latest_stamp, stamp)

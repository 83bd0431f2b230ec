"""When a rank died, as closely as it can be told. Pure.

A rank stamps what it says; a death has no stamp. What is known of it: it came after what was heard before it, and, since the
gate tells descriptors in the order in which they became ready, before what is heard after it in the same wake-up. So a rank
that raised because another had died is later than that death, however long the watcher took to look. But a rank may be slow
to say what it has stamped; so the death of one that was told to stop is never put before that.
"""

import math
import time

from mpwatch.watcher.diagnosis.observations import RankObservations


class DeathClock:
    """The deaths of one wake-up, between the stamps of what was heard before and after."""

    def __init__(self) -> None:
        self._dead: list[tuple[float, RankObservations]] = []  # each with the latest that is known to have been before it
        self._latest = 0.0

    def look_again(self) -> None:
        """Another wake-up: nothing that is heard now says more of those who have died."""
        self._dead.clear()

    def die(self, observations: RankObservations) -> None:
        """This rank has died."""
        observations.died_at = time.monotonic()
        self._dead.append((max(self._latest, observations.signalled_at), observations))

    def hear(self, stamp: float) -> None:
        """A rank says that something happened at this time. It said so right then."""
        limit = stamp
        for earliest, observations in reversed(self._dead):
            assert observations.died_at is not None
            observations.died_at = max(earliest, min(observations.died_at, math.nextafter(limit, 0.0)))
            limit = min(limit, observations.died_at)
        self._latest = max(self._latest, stamp)

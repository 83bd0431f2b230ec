"""The live view of one call: waits until there is something to show, has it drawn, and sees to it that this stays cheap.

Where it is drawn is a Display's business: a terminal's (terminal.py), a notebook's (notebook.py), or plain lines (plain.py).
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mpwatch.live_view.model import Snapshot, Tracker
from mpwatch.results.rank_status import RankStatus

WAITING_SECONDS = 1.0  # between two looks, as long as no rank has reported
EAGER_SECONDS = 0.25  # the same, if there is something to show anyway
SHARE = 0.05  # of a CPU, that drawing may take
LONGEST_SECONDS = 5.0  # between two pictures, however long drawing one has taken


class Display(Protocol):
    """Where pictures are drawn. Each method may raise anything."""

    @property
    def period(self) -> float:
        """Seconds between two pictures."""

    @property
    def repair(self) -> tuple[str, bytes] | None:
        """The name of a terminal, and what gives back the rows of it that are kept; None if none are."""

    def show(self, picture: Snapshot) -> None:
        """Draw this one in the place of the last one."""

    def leave(self, picture: Snapshot) -> None:
        """This is the last one: leave of it what is to stay, and give back what was held. It may be called again."""


class LiveView:
    """Of one call.

    Args:
        choose: a display, when there is something to show; None if there is no place for one.
        is_eager: whether there is something to show before a rank has reported.
        clock: in seconds.
    """

    def __init__(
        self, choose: Callable[[], Display | None], *, is_eager: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._choose = choose
        self._is_eager = is_eager
        self._clock = clock
        self._tracker = Tracker()
        self._display: Display | None = None
        self._was_chosen = False
        self._picture: Snapshot | None = None
        self._pause = EAGER_SECONDS if is_eager else WAITING_SECONDS

    @property
    def period(self) -> float:
        """Seconds until it wants to see the ranks again; infinite if it does not."""
        return self._pause

    @property
    def repair(self) -> tuple[str, bytes] | None:
        """The name of a terminal, and what puts it in order again, should that never be done here."""
        return None if self._display is None else self._display.repair

    def show(self, statuses: Sequence[RankStatus]) -> None:
        """This is how the ranks fare."""
        self._picture = self._tracker.see(statuses)
        if self._is_eager or _has_reports(statuses):
            self._open()
        if self._display is not None:
            began_at = self._clock()
            self._display.show(self._picture)
            took = self._clock() - began_at
            self._pause = max(self._display.period, min(took / SHARE, LONGEST_SECONDS))
        elif self._was_chosen:
            self._pause = math.inf

    def close(self, statuses: Sequence[RankStatus]) -> None:
        """This is how they fared in the end, if it is known."""
        if statuses:
            self._picture = self._tracker.see(statuses)
            if self._is_eager and _has_reports(statuses):
                self._open()
        if self._display is not None and self._picture is not None:
            self._display.leave(self._picture)
            self._display = None

    def _open(self) -> None:
        if not self._was_chosen:
            self._was_chosen = True
            self._display = self._choose()


def _has_reports(statuses: Sequence[RankStatus]) -> bool:
    return any(status.report is not None for status in statuses)

"""The progress bar of `mpwatch.map`, which shows how many items are done."""

import logging
import math
from collections.abc import Callable

from mpwatch.live_view.live import Display
from mpwatch.live_view.model import OverallProgress, RateEstimator, Snapshot
from mpwatch.live_view.select import may_show, select_display
from mpwatch.os_support.clock import monotonic

FIRST_SECONDS = 1.0  # a shorter `map` has no bar, unless the user asks for a bar
RATE_SECONDS = 10.0  # the rate is the mean over this number of seconds

log = logging.getLogger("mpwatch")


class ItemView:
    """The progress bar of one call of `map`.

    If the bar raises an exception, mpwatch logs the exception and stops drawing the bar.

    Args:
        progress: True shows the bar everywhere, from the start. None shows it in a terminal or a notebook. False never shows
            it.
        total: the number of items, or None if it is not known.
        clock: returns seconds.
    """

    def __init__(self, progress: bool | None, total: int | None, clock: Callable[[], float] = monotonic) -> None:
        self._allow_lines = progress is True
        self._total = total
        self._clock = clock
        self._rate = RateEstimator(RATE_SECONDS)
        self._display: Display | None = None
        self._was_chosen = False
        now = clock()
        self._rate.add(now, 0)
        self._due_at = math.inf if not may_show(progress) else now if progress else now + FIRST_SECONDS

    @property
    def seconds_to_next_update(self) -> float | None:
        """Seconds until `update` must be called, or None if no further call of `update` is needed."""
        return None if self._due_at == math.inf else max(0.0, self._due_at - self._clock())

    def update(self, done: int, failed: int) -> None:
        """Draw the bar if enough time has passed since the last drawing.

        Args:
            done: number of items that have a value or have failed.
            failed: number of items that have failed.
        """
        now = self._clock()
        if now < self._due_at:
            return
        self._rate.add(now, done)
        if not self._was_chosen:
            self._was_chosen = True
            self._guard(self._choose)
        if (display := self._display) is not None:
            self._due_at = now + display.period
            self._guard(lambda: display.show(self._take_snapshot(now, done, failed)))
        if self._display is None:
            self._due_at = math.inf

    def close(self, done: int, failed: int) -> None:
        """Show how many items are done and how many have failed, in one line of text that stays visible."""
        display, now = self._display, self._clock()
        if display is not None:
            self._rate.add(now, done)
            self._guard(lambda: display.close(self._take_snapshot(now, done, failed)))
        self._display, self._due_at = None, math.inf

    def _choose(self) -> None:
        self._display = select_display(allow_lines=self._allow_lines)

    def _take_snapshot(self, now: float, done: int, failed: int) -> Snapshot:
        rate, total = self._rate.rate(now), self._total
        overall = OverallProgress(
            unit="item",
            step=done,
            total=total,
            fraction_done=min(1.0, done / total) if total else None,
            rate=rate,
            seconds_left=(total - done) / rate if total is not None and rate and done <= total else None,
            metrics={"failed": failed} if failed else {},
        )
        return Snapshot(overall=overall, rows=(), shows_ranks=False)

    def _guard(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._display = None
            log.warning("the progress bar failed; the items go on without it", exc_info=error)

"""The progress bar of `mpwatch.map`, which shows how many items are done."""

import logging
import math
from collections.abc import Callable

from mpwatch.live_view.live import Display
from mpwatch.live_view.model import RATE_SECONDS, RateEstimator, Snapshot, StepProgress
from mpwatch.live_view.select import may_show, select_display
from mpwatch.os_support.clock import monotonic

FIRST_SECONDS = 1.0  # a shorter `map` has no bar, unless the user asks for a bar

log = logging.getLogger("mpwatch")


class ItemView:
    """The bar of one call. `total` is None if it is not known. If the bar raises, that is logged, and it ends."""

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
        """None if no further call of `update` is needed."""
        return None if self._due_at == math.inf else max(0.0, self._due_at - self._clock())

    def update(self, done: int, failed: int) -> None:
        """Draw the bar if enough time has passed. `done` counts the failed items, too."""
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
        """Leave one line of text that stays visible."""
        display, now = self._display, self._clock()
        if display is not None:
            self._rate.add(now, done)
            self._guard(lambda: display.close(self._take_snapshot(now, done, failed)))
        self._display, self._due_at = None, math.inf

    def _choose(self) -> None:
        self._display = select_display(allow_lines=self._allow_lines)

    def _take_snapshot(self, now: float, done: int, failed: int) -> Snapshot:
        metrics = {"failed": failed} if failed else {}
        overall = StepProgress(unit="item", step=done, total=self._total, rate=self._rate.rate(now), metrics=metrics)
        return Snapshot(overall=overall, rows=(), shows_ranks=False)

    def _guard(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._display = None
            log.warning("the progress bar failed; the items go on without it", exc_info=error)

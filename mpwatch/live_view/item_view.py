"""The progress bar of `mpwatch.map`, which shows how many items are done."""

import logging
import math
from collections.abc import Callable
from contextlib import suppress

from mpwatch.live_view.live import Display
from mpwatch.live_view.model import RATE_SECONDS, RateEstimator, Snapshot, StepProgress
from mpwatch.live_view.select import may_show, select_display
from mpwatch.os_support.clock import monotonic

FIRST_SECONDS = 1.0  # a shorter `map` has no bar, unless the user asks for a bar

log = logging.getLogger("mpwatch")


class ItemView:
    """The bar of one call. `total` is None if it is not known. If the bar raises, that is logged, and it ends."""

    def __init__(self, progress: bool | None, total: int | None) -> None:
        self._allow_lines = progress is True
        self._total = total
        self._rate = RateEstimator(RATE_SECONDS)
        self._display: Display | None = None
        now = monotonic()
        self._rate.add(now, 0)
        self._due_at = math.inf if not may_show(progress) else now if progress else now + FIRST_SECONDS

    @property
    def seconds_to_next_update(self) -> float | None:
        """None if no further call of `update` is needed."""
        return None if self._due_at == math.inf else max(0.0, self._due_at - monotonic())

    def update(self, done: int, failed: int) -> None:
        """Draw the bar if enough time has passed. `done` counts the failed items, too."""
        if monotonic() >= self._due_at:
            self._due_at = math.inf  # if there is no display, or if it raises
            self._guard(lambda: self._show(done, failed), done, failed)

    def close(self, done: int, failed: int) -> None:
        """Leave one line of text that stays visible."""
        display, self._display, self._due_at = self._display, None, math.inf
        if display is not None:
            self._guard(lambda: display.close(self._take_snapshot(done, failed)), done, failed)

    def _show(self, done: int, failed: int) -> None:
        if self._display is None:
            self._display = select_display(allow_lines=self._allow_lines)
        if self._display is not None:
            self._display.show(self._take_snapshot(done, failed))
            self._due_at = monotonic() + self._display.period

    def _take_snapshot(self, done: int, failed: int) -> Snapshot:
        now = monotonic()
        self._rate.add(now, done)
        metrics = {"failed": failed} if failed else {}
        overall = StepProgress(unit="item", step=done, total=self._total, rate=self._rate.rate(now), metrics=metrics)
        return Snapshot(overall=overall, rows=(), shows_ranks=False)

    def _guard(self, do: Callable[[], None], done: int, failed: int) -> None:
        try:
            do()
        except Exception as error:
            display, self._display = self._display, None
            if display is not None:
                with suppress(Exception):  # so that it releases its rows of the terminal, if it still can
                    display.close(self._take_snapshot(done, failed))
            log.warning("the progress bar failed; the items go on without it", exc_info=error)

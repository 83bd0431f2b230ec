"""The progress bar of `mpwatch.map`, which shows how many items are done."""

import math
from collections.abc import Callable

from mpwatch.live_view.live import Display
from mpwatch.live_view.model import RATE_SECONDS, RateEstimator, Snapshot, StepProgress
from mpwatch.live_view.select import may_show, select_display
from mpwatch.os_support.clock import monotonic

FIRST_SECONDS = 1.0  # a shorter `map` has no bar, unless the user asks for a bar


class ItemView:
    """A View (watcher/observers/view_driver.py) that shows no ranks. `count` returns how many items are done, and how
    many of these have failed. `total` is None if it is not known.
    """

    def __init__(self, progress: bool | None, total: int | None, count: Callable[[], tuple[int, int]]) -> None:
        self._allow_lines = progress is True
        self._total, self._count = total, count
        self._rate = RateEstimator(RATE_SECONDS)
        self._rate.add(monotonic(), 0)
        self._display: Display | None = None
        self.period = 0.0 if progress else FIRST_SECONDS

    def show(self, _: object) -> None:
        if self._display is None:
            self._display = select_display(allow_lines=self._allow_lines)
        self.period = math.inf if self._display is None else self._display.period
        if self._display is not None:
            self._display.show(self._take_snapshot())

    def pause(self) -> None:
        if self._display is not None:
            self._display.pause()

    def close(self, _: object) -> None:
        if self._display is not None:
            self._display.close(self._take_snapshot())

    def _take_snapshot(self) -> Snapshot:
        now, (done, failed) = monotonic(), self._count()
        self._rate.add(now, done)
        metrics = {"failed": failed} if failed else {}
        overall = StepProgress(unit="item", step=done, total=self._total, rate=self._rate.rate(now), metrics=metrics)
        return Snapshot(overall=overall, rows=(), shows_ranks=False)


def select_item_view(progress: bool | None, total: int | None, count: Callable[[], tuple[int, int]]) -> ItemView | None:
    return ItemView(progress, total, count) if may_show(progress) else None

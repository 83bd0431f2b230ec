"""The progress bar of `mpwatch.map`, which shows how many items are done."""

from collections.abc import Callable, Sequence

from mpwatch.live_view.live import LiveView
from mpwatch.live_view.model import RATE_SECONDS, RateEstimator, Snapshot, StepProgress
from mpwatch.live_view.select import may_show, select_display
from mpwatch.os_support.clock import monotonic
from mpwatch.results.model import RankStatus

FIRST_SECONDS = 1.0  # a shorter `map` has no bar, unless the user asks for a bar


def select_item_view(progress: bool | None, total: int | None, count: Callable[[], tuple[int, int]]) -> LiveView | None:
    """`count` returns how many items are done, and how many of these have failed. `total` is None if it is not known."""
    if not may_show(progress):
        return None
    rate = RateEstimator(RATE_SECONDS)
    rate.add(monotonic(), 0)

    def take_snapshot(_: Sequence[RankStatus], __: float | None) -> Snapshot:
        now, (done, failed) = monotonic(), count()
        rate.add(now, done)
        metrics = {"failed": failed} if failed else {}
        overall = StepProgress(unit="item", step=done, total=total, rate=rate.rate(now), metrics=metrics)
        return Snapshot(overall=overall, rows=(), shows_ranks=False)

    return LiveView(
        lambda: select_display(allow_lines=progress is True),
        lambda show: show(()),
        take_snapshot,
        starts_at_once=True,
        first_period=0.0 if progress else FIRST_SECONDS,
    )

"""Publish the progress reports of running ranks as Progressed events. Runs in the caller's thread."""

from collections.abc import Sequence

from mpwatch.events.types import Progressed
from mpwatch.results.rank_status import RankStatus
from mpwatch.watcher.observers.event_bus import EventBus


class ProgressEvents:
    """A View (view_driver.py) that shows nothing, and publishes each new progress report as an event."""

    period = 0.25

    def __init__(self, event_bus: EventBus) -> None:
        self._event_bus = event_bus
        self._published: dict[int, float] = {}  # by rank: the time of the last report that was published

    def show(self, statuses: Sequence[RankStatus]) -> None:
        for status in statuses:
            report = status.report
            if report is not None and report.at != self._published.get(status.rank):
                self._published[status.rank] = report.at
                self._event_bus.publish(
                    Progressed,
                    [status.rank],
                    at=report.at,
                    attempt=status.restart_count,
                    step=report.step,
                    total=report.total,
                    metrics=report.metrics,
                )

    def pause(self) -> None:
        """There is nothing to hide."""

    def close(self, statuses: Sequence[RankStatus]) -> None:
        self.show(statuses)

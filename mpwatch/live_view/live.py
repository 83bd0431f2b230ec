"""`LiveView` decides when the live view of one call is drawn, and a `Display` draws it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TextIO

from mpwatch.live_view.formatting import format_overall
from mpwatch.live_view.model import Snapshot, SnapshotBuilder
from mpwatch.os_support.clock import monotonic
from mpwatch.results.model import RankStatus

WAITING_PERIOD = 1.0  # seconds between two status requests, until a rank has reported
FIRST_PERIOD = 0.25  # seconds until the first drawing, if the view starts at once
MAX_CPU_SHARE = 0.05  # drawing may use this part of one CPU
MAX_PERIOD = 5.0  # seconds between two drawings, if drawing is slow


class Display:
    """A place where snapshots are drawn, such as a terminal. Each method may raise any exception."""

    period: float
    """Seconds between two drawings."""

    def show(self, snapshot: Snapshot) -> None:
        """Draw this snapshot in place of the previous snapshot."""
        raise NotImplementedError

    def pause(self) -> None:
        """Stop using the terminal until the next call of `show`. Most displays use none."""

    def close(self, snapshot: Snapshot) -> None:
        """End the view, and leave the progress visible. If this raises an exception, it can be called again."""
        self.show(snapshot)


class LineDisplay(Display):
    """Appends lines to a stream."""

    period = 10.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_written: object = None

    def show(self, snapshot: Snapshot) -> None:
        overall = snapshot.overall
        content = (overall.step, overall.total, str(overall.metrics), snapshot.counts)  # as text, since NaN != NaN
        if content != self._last_written:
            self._last_written = content
            self._stream.write(f"mpwatch: {format_overall(snapshot)}\n")  # one write, so that the line stays whole
            self._stream.flush()


class LiveView:
    """The live view of one call: a View of watcher/observers/view_driver.py.

    `choose_display` is called once, when a rank first reports. It returns None if there is no place for a view.
    `take_snapshot` makes of the statuses what is drawn.
    """

    def __init__(
        self,
        choose_display: Callable[[], Display | None],
        take_snapshot: Callable[[Sequence[RankStatus]], Snapshot] | None = None,
        *,
        starts_at_once: bool,
        first_period: float = FIRST_PERIOD,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._choose_display: Callable[[], Display | None] | None = choose_display
        self._take_snapshot = take_snapshot or SnapshotBuilder().update
        self._starts_at_once = starts_at_once
        self._clock, self._began_at = clock, clock()
        self._display: Display | None = None
        self._statuses: Sequence[RankStatus] = ()  # the latest
        self.period = first_period if starts_at_once else WAITING_PERIOD

    def show(self, statuses: Sequence[RankStatus]) -> None:
        self._statuses = statuses
        snapshot = self._take_snapshot(statuses)
        if self._starts_at_once or _has_reports(statuses):
            self._choose_once()
        if self._display is not None:
            started_at = self._clock()
            self._display.show(snapshot)
            duration = self._clock() - started_at
            self.period = max(self._display.period, min(duration / MAX_CPU_SHARE, MAX_PERIOD))

    def pause(self) -> None:
        if self._display is not None:
            self._display.pause()

    def close(self, statuses: Sequence[RankStatus]) -> None:
        self._statuses = statuses or self._statuses
        if self._starts_at_once and _has_reports(self._statuses):
            self._choose_once()
        if self._display is not None:
            snapshot = self._take_snapshot(self._statuses)
            self._display.close(replace(snapshot, elapsed=self._clock() - self._began_at))
            self._display = None

    def _choose_once(self) -> None:
        if self._choose_display is not None:
            self._display, self._choose_display = self._choose_display(), None
            if self._display is None:
                self.period = math.inf


def _has_reports(statuses: Sequence[RankStatus]) -> bool:
    return any(status.report is not None for status in statuses)

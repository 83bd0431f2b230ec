"""`LiveView` decides when the live view of one call is drawn, and a `Display` draws it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TextIO

from mpwatch.live_view.formatting import format_overall
from mpwatch.live_view.model import Snapshot, SnapshotBuilder
from mpwatch.os_support.clock import monotonic
from mpwatch.results.model import RankStatus

WAITING_PERIOD = 1.0  # seconds between two status requests, until a rank has reported
FIRST_PERIOD = 0.25  # seconds until the first drawing, if the view starts at once
MAX_CPU_SHARE = 0.05  # drawing may use this part of one CPU
MAX_PERIOD = 5.0  # seconds between two drawings, if drawing is slow


class Display(Protocol):
    """A place where snapshots are drawn, such as a terminal. Each method may raise any exception."""

    @property
    def period(self) -> float:
        """Seconds between two drawings."""

    def show(self, snapshot: Snapshot) -> None:
        """Draw this snapshot in place of the previous snapshot."""

    def pause(self) -> None:
        """Stop using the terminal until the next call of `show`."""

    def close(self, snapshot: Snapshot) -> None:
        """End the view, and leave the progress visible. If this raises an exception, it can be called again."""


class LineDisplay:
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

    def pause(self) -> None:
        """Do nothing, because other output does not overwrite the lines of the live view."""

    def close(self, snapshot: Snapshot) -> None:
        self.show(snapshot)


class LiveView:
    """The live view of the ranks of one call: a View of watcher/observers/view_driver.py.

    `choose_display` is called once, when a rank first reports. It returns None if there is no place for a view.
    """

    def __init__(
        self,
        choose_display: Callable[[], Display | None],
        *,
        starts_at_once: bool,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._choose_display: Callable[[], Display | None] | None = choose_display
        self._starts_at_once = starts_at_once
        self._clock, self._began_at = clock, clock()
        self._snapshot_builder = SnapshotBuilder()
        self._display: Display | None = None
        self._snapshot: Snapshot | None = None
        self.period = FIRST_PERIOD if starts_at_once else WAITING_PERIOD

    def show(self, statuses: Sequence[RankStatus]) -> None:
        self._snapshot = self._snapshot_builder.update(statuses)
        if self._starts_at_once or _has_reports(statuses):
            self._choose_once()
        if self._display is not None:
            started_at = self._clock()
            self._display.show(self._snapshot)
            duration = self._clock() - started_at
            self.period = max(self._display.period, min(duration / MAX_CPU_SHARE, MAX_PERIOD))

    def pause(self) -> None:
        if self._display is not None:
            self._display.pause()

    def close(self, statuses: Sequence[RankStatus]) -> None:
        if statuses:
            self._snapshot = self._snapshot_builder.update(statuses)
            if self._starts_at_once and _has_reports(statuses):
                self._choose_once()
        if self._display is not None and self._snapshot is not None:
            self._display.close(replace(self._snapshot, elapsed=self._clock() - self._began_at))
            self._display = None

    def _choose_once(self) -> None:
        if self._choose_display is not None:
            self._display, self._choose_display = self._choose_display(), None
            if self._display is None:
                self.period = math.inf


def _has_reports(statuses: Sequence[RankStatus]) -> bool:
    return any(status.report is not None for status in statuses)

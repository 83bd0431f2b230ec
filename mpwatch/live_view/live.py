"""`LiveView` decides when the live view of one call is drawn, and a `Display` draws it."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

from mpwatch.live_view.formatting import format_overall
from mpwatch.live_view.model import Snapshot, SnapshotBuilder
from mpwatch.os_support.clock import monotonic
from mpwatch.results.model import RankStatus
from mpwatch.wire.exceptions.decoder import USER_ERRORS

Ask = Callable[[Callable[[Sequence[RankStatus]], object]], object]

log = logging.getLogger("mpwatch")

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
    """The live view of one run, call or map, in the thread that waits for it.

        this thread --- an update is due: ask for the statuses ---> watcher thread: current_statuses
                    <--- wake-up: draw them, sleep until the next update is due ---'

    It runs code of other packages (rich, IPython), and writes to a terminal that may be closed. If that raises, it is
    logged, and nothing more is drawn. The methods raise only what ends the run, such as KeyboardInterrupt.

    `choose_display` is called once, when a rank first reports. It returns None if there is no place for a view. `ask` passes
    the present statuses to a function, in any thread. `take_snapshot` makes of the statuses, and at the end of the seconds
    since the start, what is drawn.
    """

    def __init__(
        self,
        choose_display: Callable[[], Display | None],
        ask: Ask,
        take_snapshot: Callable[[Sequence[RankStatus], float | None], Any] | None = None,
        *,
        starts_at_once: bool,
        first_period: float = FIRST_PERIOD,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._choose_display: Callable[[], Display | None] | None = choose_display
        self._ask = ask
        self._take_snapshot = take_snapshot or SnapshotBuilder().update
        self._starts_at_once = starts_at_once
        self._clock, self._began_at = clock, clock()
        self._due_at = self._began_at + (first_period if starts_at_once else WAITING_PERIOD)
        self._is_asking = False
        self._answer: Sequence[RankStatus] | None = None
        self._statuses: Sequence[RankStatus] = ()  # the latest
        self._display: Display | None = None

    @property
    def next_update_at(self) -> float:
        """By CLOCK_MONOTONIC. Infinity: this thread may sleep until another thread wakes it up."""
        return math.inf if self._is_asking else self._due_at

    def update(self) -> None:
        if not self._is_asking and self._clock() >= self._due_at:
            self._is_asking = True
            self._ask(self._receive)
        if self._answer is not None:
            self._statuses, self._answer, self._is_asking = self._answer, None, False
            self._guard(self._draw)

    def _receive(self, statuses: Sequence[RankStatus]) -> None:  # in the watcher thread
        self._answer = statuses

    def _draw(self) -> None:
        snapshot = self._take_snapshot(self._statuses, None)
        if self._starts_at_once or self._has_reports():
            self._choose_once()
        drawn_at, period = self._clock(), WAITING_PERIOD
        if self._display is not None:
            self._display.show(snapshot)
            started_at, drawn_at = drawn_at, self._clock()
            period = max(self._display.period, min((drawn_at - started_at) / MAX_CPU_SHARE, MAX_PERIOD))
        self._due_at = math.inf if self._is_over() else drawn_at + period

    def pause(self) -> None:
        """Leave the terminal to a debugger's prompt or a shell, until the next update."""
        if self._display is not None:
            self._guard(self._display.pause)

    def resume(self) -> None:
        if self._due_at < math.inf:
            self._due_at = 0.0

    def close(self, statuses: Sequence[RankStatus]) -> None:
        """Show the final statuses, or the latest if none are known. If Ctrl-C interrupts this, call it again."""
        self._statuses = statuses or self._statuses
        if self._starts_at_once and self._has_reports():
            self._guard(self._choose_once)
        self._guard(self._close_display)
        self._choose_display, self._due_at = None, math.inf

    def _close_display(self) -> None:
        if self._display is not None:
            self._display.close(self._take_snapshot(self._statuses, self._clock() - self._began_at))
            self._display = None

    def _choose_once(self) -> None:
        if self._choose_display is not None:
            self._display, self._choose_display = self._choose_display(), None

    def _is_over(self) -> bool:
        return self._display is None and self._choose_display is None

    def _has_reports(self) -> bool:
        return any(status.report is not None for status in self._statuses)

    def _guard(self, do: Callable[[], None]) -> None:
        try:
            do()
        except USER_ERRORS as error:
            self._choose_display, self._due_at = None, math.inf
            with suppress(*USER_ERRORS):  # so that the display releases its rows of the terminal, if it still can
                self._close_display()
            self._display = None
            with suppress(*USER_ERRORS):  # of a logging handler
                log.warning("the live view failed; the run goes on without it", exc_info=error)
        except BaseException:
            self._due_at = math.inf  # a view that raises at each update would interrupt the end of the run again and again
            raise

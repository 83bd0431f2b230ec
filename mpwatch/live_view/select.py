"""Selects how the live view of a call or a map is shown, and imports the modules of the view only when they are needed.

progress=False    no view
progress=None     a view in a notebook or a terminal, when a rank first calls report(), or when a map has lasted a second
progress=True     a view everywhere, from the start of the call; if there is no terminal, lines on stderr
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpwatch.live_view.tty import find_terminal
from mpwatch.options.log_spec import in_notebook
from mpwatch.os_support.clock import monotonic

if TYPE_CHECKING:
    from mpwatch.live_view.live import Ask, Display, LiveView
    from mpwatch.results.model import RankStatus


MakeView = Callable[["Ask"], "LiveView | None"]
MAP_SECONDS = 1.0  # a shorter `map` has no view, unless the user asks for one


def select_view(progress: bool | None, ask: "Ask") -> "LiveView | None":
    if not may_show(progress):
        return None
    from mpwatch.live_view.live import LiveView

    return LiveView(lambda: select_display(allow_lines=progress is True), ask, starts_at_once=progress is True)


def select_item_view(progress: bool | None, total: int | None, count: Callable[[], tuple[int, int]]) -> "LiveView | None":
    """The view of a map shows how many of its `total` items, if that is known, are done. `count` returns how many are done,
    and how many of these have failed.
    """
    if not may_show(progress):
        return None
    from mpwatch.live_view.live import LiveView
    from mpwatch.live_view.model import RATE_SECONDS, RateEstimator, Snapshot, StepProgress

    rate = RateEstimator(RATE_SECONDS)
    rate.add(monotonic(), 0)

    def take_snapshot(_: "Sequence[RankStatus]", __: float | None) -> Snapshot:
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
        first_period=0.0 if progress else MAP_SECONDS,
    )


def may_show(progress: bool | None) -> bool:
    return progress is not False and (progress is True or in_notebook() or find_terminal() is not None)


def select_display(*, allow_lines: bool) -> "Display | None":
    """Return a display for the notebook or the terminal; without one a LineDisplay on stderr, if `allow_lines`."""
    if in_notebook():
        from mpwatch.live_view.notebook import NotebookDisplay

        return NotebookDisplay()
    terminal = find_terminal()
    if terminal is not None:
        try:
            from mpwatch.live_view.terminal import TerminalDisplay
        except ImportError:  # rich is not installed
            allow_lines = True
        else:
            if not TerminalDisplay.is_in_use:
                return TerminalDisplay(terminal)
    if allow_lines and sys.stderr is not None:
        from mpwatch.live_view.live import LineDisplay

        return LineDisplay(sys.stderr)
    return None

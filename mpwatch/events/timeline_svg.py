"""Draws the timeline of a run as SVG, in which the row of a rank shows its starts, calls, failures and restarts.

                 0 s              5 s              10 s
    rank 0       ░░██████████████  ┄┄┄ ░░████████████   succeeded, restarted once
    rank 1       ░░██████████████✕ ┄┄┄ ░░████████████   succeeded, restarted once

A notebook shows the drawing below the table of a RunResult. The HTML file that `RunResult.to_html` writes also contains the
drawing. The drawing needs no style sheet, script or font. The labels in the drawing have the same colour as the text of the
notebook. The bars are visible on a white and on a black background. All code in this module is pure: it does no input or
output.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from mpwatch.events.timeline import Lane, Timeline, calls_within, timelines
from mpwatch.events.types import Event, HeartbeatLate, Restarting, WorkerFailed
from mpwatch.results.clean_text import clean_line
from mpwatch.results.failure import describe_failure
from mpwatch.results.report import format_times

MAX_ROWS = 32
MAX_TICKS = 8
WIDTH = 800  # all lengths are in user units of the SVG, which are pixels unless the drawing is scaled
LEFT, RIGHT = 64, 210  # the widths of the ranks' names and of their outcomes
ROW, BAR, HEAD, FOOT = 20, 12, 24, 22  # heights
MIN_WIDTH = 0.5  # a span with a smaller width is invisible
COLOURS = {
    "start-up": "#9aa3ad",
    "succeeded": "#2e9e5b",
    "failed": "#d9483b",
    "stopped": "#c98a12",
    "unfinished": "#4a86e8",
}
LEGEND = ("start-up", "succeeded", "failed", "stopped", "unfinished")


def draw_timelines(events: Sequence[Event]) -> str:
    """Draw the timeline of each run as one SVG element, and return the text of all SVG elements.

    If a run has no events about its ranks, such as WorkerStarted, this run is not drawn. If no run is drawn, return "".
    """
    return "".join(_Picture(timeline).draw() for timeline in timelines(events) if timeline.lanes)


class _Picture:
    """Draws the timeline of one run."""

    def __init__(self, run: Timeline) -> None:
        self._run = run
        starts = [span.monotonic for span in (run.started, *run.states) if span is not None]
        starts += [start for lane in run.lanes.values() for _, start, _ in lane.spans(-math.inf, run.until)]
        self._start = min((start for start in starts if start > -math.inf), default=run.until)
        self._seconds = max(run.until - self._start, 1e-3)

    def draw(self) -> str:
        ranks = _choose_ranks(self._run)
        hidden = len(self._run.lanes) - len(ranks)
        height = HEAD + ROW * (len(ranks) + bool(hidden)) + FOOT
        parts = [*self._draw_axis(height - FOOT)]
        for row, rank in enumerate(ranks):
            parts += self._draw_rank(rank, HEAD + ROW * row)
        if hidden:
            parts.append(_text(LEFT, HEAD + ROW * len(ranks) + BAR, f"{hidden} more ranks are not drawn"))
        parts += _draw_legend(height - FOOT + BAR, self._outcomes(ranks))
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="timeline of the ranks"'
            f' viewBox="0 0 {WIDTH} {height}"'
            f' style="display:block;width:100%;max-width:{WIDTH}px;font:12px system-ui,sans-serif" fill="currentColor">'
            f"{''.join(parts)}</svg>"
        )

    def _draw_axis(self, bottom: float) -> Iterator[str]:
        step = _choose_step(self._seconds)
        for number in range(int(self._seconds / step) + 1):
            seconds = number * step
            x = self._x(self._start + seconds)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD - 6}" y2="{bottom}" stroke="currentColor" opacity=".15"/>'
            yield _text(x, HEAD - 10, f"{seconds:g} s", anchor="middle")

    def _draw_rank(self, rank: int, top: float) -> Iterator[str]:
        lane = self._run.lanes[rank]
        yield _text(0, top + BAR - 2, f"rank {rank}")
        for block, start, end in lane.spans(self._start, self._run.until):
            if isinstance(block, Restarting):
                y = top + BAR / 2
                title = f"waits {block.delay:.1f} s to be restarted"
                yield self._draw_line(start, end, y, title)
                continue
            ready = end if block.ready is None else min(max(start, block.ready), end)
            yield self._draw_bar(start, ready, top, "start-up", f"start {block.attempt}")
            for call, began, over in calls_within(block, ready, end):
                outcome = call.outcome or ("unfinished" if block.outcome == "" else block.outcome)
                yield self._draw_bar(began, over, top, outcome, call.name)
        yield from self._draw_marks(lane, top)
        yield _text(WIDTH - RIGHT + 8, top + BAR - 2, _describe_outcome(lane))

    def _draw_bar(self, start: float, end: float, top: float, what: str, name: str) -> str:
        x, width = self._x(start), self._x(end) - self._x(start)
        if width < MIN_WIDTH:
            return ""
        title = f"{name}: {what}, {start - self._start:.3f} s to {end - self._start:.3f} s"
        return (
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2" fill="{COLOURS[what]}">'
            f"<title>{_escape(title)}</title></rect>"
        )

    def _draw_line(self, start: float, end: float, y: float, title: str) -> str:
        x1, x2 = self._x(start), self._x(end)
        if x2 - x1 < MIN_WIDTH:
            return ""
        return (
            f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y}" y2="{y}" stroke="currentColor" stroke-dasharray="2 3">'
            f"<title>{_escape(title)}</title></line>"
        )

    def _draw_marks(self, lane: Lane, top: float) -> Iterator[str]:
        drawn = set()
        for mark in lane.marks:
            x = round(self._x(min(max(mark.monotonic, self._start), self._run.until)))
            if (type(mark), x) in drawn:
                continue
            drawn.add((type(mark), x))
            symbol = "✕" if isinstance(mark, WorkerFailed) else "▾"
            yield (
                f'<text x="{x}" y="{top + BAR - 1}" text-anchor="middle" font-weight="bold">{symbol}'
                f"<title>{_escape(_describe_mark(mark))}</title></text>"
            )

    def _outcomes(self, ranks: Iterable[int]) -> set[str]:
        """Return the kinds of bars that the legend must explain for these ranks, such as "start-up" and "failed"."""
        found = {"start-up"}
        for rank in ranks:
            for block in self._run.lanes[rank].blocks:
                if not isinstance(block, Restarting):
                    found |= {call.outcome or block.outcome or "unfinished" for call in block.calls}
        return found

    def _x(self, at: float) -> float:
        share = min(1.0, max(0.0, (at - self._start) / self._seconds))
        return LEFT + share * (WIDTH - LEFT - RIGHT)


def _choose_ranks(run: Timeline) -> list[int]:
    """Return the ranks to draw, at most MAX_ROWS.

    If the run has more than MAX_ROWS ranks, choose ranks in this order: the root causes of all attempts, the other failed
    ranks, and the ranks that have not failed.
    """
    order = sorted(run.lanes, key=lambda rank: (not _failed_first(run.lanes[rank]), not _has_failed(run.lanes[rank]), rank))
    return sorted(order[:MAX_ROWS])


def _has_failed(lane: Lane) -> bool:
    return any(isinstance(mark, WorkerFailed) for mark in lane.marks)


def _failed_first(lane: Lane) -> bool:
    return any(isinstance(mark, WorkerFailed) and mark.is_root_cause for mark in lane.marks)


def _describe_outcome(lane: Lane) -> str:
    """Return a text that says how a rank's last process ended, and how often the rank was restarted."""
    processes = [block for block in lane.blocks if not isinstance(block, Restarting)]
    outcome = processes[-1].outcome if processes else ""
    last = processes[-1].attempt if processes else 0
    if any(isinstance(mark, WorkerFailed) and mark.is_root_cause and mark.attempt == last for mark in lane.marks):
        outcome = "failed first"
    restarts = f"restarted {format_times(last)}" if last else ""
    return ", ".join(filter(None, (outcome, restarts)))


def _describe_mark(mark: HeartbeatLate | WorkerFailed) -> str:
    if isinstance(mark, HeartbeatLate):
        return f"no heartbeat for {mark.silent_seconds:.1f} s"
    return f"{'failed first' if mark.is_root_cause else 'failed'}: {describe_failure(mark.failure)}"


def _draw_legend(y: float, outcomes: set[str]) -> Iterator[str]:
    x = float(LEFT)
    for name in LEGEND:
        if name in outcomes:
            yield f'<rect x="{x}" y="{y - 9}" width="10" height="10" rx="2" fill="{COLOURS[name]}"/>'
            yield _text(x + 15, y, name)
            x += 35 + 7 * len(name)


def _choose_step(seconds: float) -> float:
    """Return the seconds between two marks on the time axis: 1, 2 or 5 times a power of ten, such as 0.2 or 50."""
    least = seconds / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{_escape(text)}</text>'


def _escape(text: str) -> str:
    return escape(clean_line(text))

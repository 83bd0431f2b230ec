"""Draws the timeline of a run as SVG: a row for each rank, with its starts, calls, failures and restarts. Pure.

                 0 s              5 s              10 s
    rank 0       ░░██████████████  ┄┄┄ ░░████████████   succeeded, restarted once
    rank 1       ░░██████████████✕ ┄┄┄ ░░████████████   succeeded, restarted once

It needs no style sheet, script or font, and is visible on a white and on a black background.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape

from mpwatch.events.timeline import Lane, Span, Timeline, timelines
from mpwatch.events.types import Event, HeartbeatLate, WorkerFailed
from mpwatch.results.texts import clean_line, format_times

MAX_ROWS = 32
MAX_TICKS = 8
WIDTH = 800  # all lengths are in user units of the SVG, which are pixels unless the drawing is scaled
LEFT, RIGHT = 64, 210  # the widths of the ranks' names and of their outcomes
ROW, BAR, HEAD, FOOT = 20, 12, 24, 22  # heights
COLOURS = {  # in the order of the legend
    "start-up": "#9aa3ad",
    "succeeded": "#2e9e5b",
    "failed": "#d9483b",
    "stopped": "#c98a12",
    "unfinished": "#4a86e8",
}


def draw_timelines(events: Sequence[Event]) -> str:
    """Draw each run that has events about its ranks as one SVG element. Return "" if there is none."""
    return "".join(_Picture(timeline).draw() for timeline in timelines(events) if timeline.lanes)


class _Picture:
    def __init__(self, run: Timeline) -> None:
        self._run = run
        self._seconds = max(run.until - run.start, 1e-3)

    def draw(self) -> str:
        lanes = self._run.lanes
        ranks = sorted(sorted(lanes, key=lambda rank: (_get_order(lanes[rank]), rank))[:MAX_ROWS])
        hidden = len(lanes) - len(ranks)
        height = HEAD + ROW * (len(ranks) + bool(hidden)) + FOOT
        parts = [*self._draw_axis(height - FOOT)]
        for row, rank in enumerate(ranks):
            top, lane = HEAD + ROW * row, lanes[rank]
            parts.append(_text(0, top + BAR - 2, f"rank {rank}"))
            parts += [self._draw_span(span, top) for span in lane.spans if span.kind != "process"]
            parts += [self._draw_mark(mark, top) for mark in lane.marks]
            parts.append(_text(WIDTH - RIGHT + 8, top + BAR - 2, _describe_outcome(lane)))
        if hidden:
            parts.append(_text(LEFT, HEAD + ROW * len(ranks) + BAR, f"{hidden} more ranks are not drawn"))
        x, y = LEFT, height - FOOT + BAR
        for name, colour in COLOURS.items():
            parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" rx="2" fill="{colour}"/>')
            parts.append(_text(x + 15, y, name))
            x += 35 + 7 * len(name)
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="timeline of the ranks"'
            f' viewBox="0 0 {WIDTH} {height}"'
            f' style="display:block;width:100%;max-width:{WIDTH}px;font:12px system-ui,sans-serif" fill="currentColor">'
            f"{''.join(parts)}</svg>"
        )

    def _draw_axis(self, bottom: float) -> Iterator[str]:
        least = self._seconds / MAX_TICKS
        power = 10.0 ** math.floor(math.log10(least))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
        for number in range(int(self._seconds / step) + 1):
            x = self._x(self._run.start + number * step)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD - 6}" y2="{bottom}" stroke="currentColor" opacity=".15"/>'
            yield _text(x, HEAD - 10, f"{number * step:g} s", anchor="middle")

    def _draw_span(self, span: Span, top: float) -> str:
        x, width = self._x(span.start), self._x(span.end) - self._x(span.start)
        if span.kind == "restart":
            y, title = top + BAR / 2, f"waits {span.args['delay']:.1f} s to be restarted"
            shape = f'line x1="{x:.1f}" x2="{x + width:.1f}" y1="{y}" y2="{y}" stroke="currentColor" stroke-dasharray="2 3"'
        else:
            what = f"{span.name}: {span.outcome}" if span.outcome else span.name
            title = f"{what}, {span.start - self._run.start:.3f} s to {span.end - self._run.start:.3f} s"
            colour = COLOURS[span.outcome or span.kind]
            shape = f'rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}"'
        return f"<{shape}><title>{_escape(title)}</title></{shape.partition(' ')[0]}>"

    def _draw_mark(self, mark: Event, top: float) -> str:
        if not isinstance(mark, HeartbeatLate | WorkerFailed):
            return ""
        symbol = "▾" if isinstance(mark, HeartbeatLate) else "✕"
        return (
            f'<text x="{self._x(mark.monotonic):.1f}" y="{top + BAR - 1}" text-anchor="middle" font-weight="bold">{symbol}'
            f"<title>{_escape(str(mark))}</title></text>"
        )

    def _x(self, at: float) -> float:
        return LEFT + (at - self._run.start) / self._seconds * (WIDTH - LEFT - RIGHT)


def _get_order(lane: Lane) -> int:
    """The root causes of all attempts are drawn first, and then other ranks that have failed."""
    failures = [mark.is_root_cause for mark in lane.marks if isinstance(mark, WorkerFailed)]
    return 0 if True in failures else 1 if failures else 2


def _describe_outcome(lane: Lane) -> str:
    """Return how the last process of a rank ended, and how often the rank was restarted."""
    last = lane.latest.get("process")
    if last is None:
        return ""
    attempt = last.args["attempt"]
    is_root_cause = any(isinstance(m, WorkerFailed) and m.is_root_cause and m.attempt == attempt for m in lane.marks)
    restarts = f"restarted {format_times(attempt)}" if attempt else ""
    return ", ".join(filter(None, ("failed first" if is_root_cause else last.outcome, restarts)))


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{_escape(text)}</text>'


def _escape(text: str) -> str:
    return escape(clean_line(text))

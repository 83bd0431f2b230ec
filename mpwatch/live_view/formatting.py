"""Format numbers, states and rows for all displays of the live view. All functions are pure."""

import math
from collections.abc import Iterable, Mapping

from mpwatch.live_view.model import OverallProgress, RankRow, Snapshot, summarize_ranks
from mpwatch.results.model import WorkerState
from mpwatch.results.to_json import encodable

MAX_RANK_ROWS = 16  # if there are more ranks, they are summarized
MAX_METRICS = 6  # metrics that are shown for one rank, in the order in which the rank reports them
MAX_NAME_CHARS = 40  # characters of the name of a metric
COLUMN_TITLES = ("rank", "state", "step", "steps/s", "metrics", "memory", "CPU", "heartbeat")  # of `format_row`
STATE_TEXTS = {
    WorkerState.INIT: "starting",
    WorkerState.HEALTHY: "running",
    WorkerState.UNHEALTHY: "late",
    WorkerState.SUCCEEDED: "returned",
    WorkerState.FAILED: "failed",
    WorkerState.STOPPED: "stopped",
}
UNKNOWN = "–"  # noqa: RUF001  a dash
UNITS = ("kB", "MB", "GB", "TB")
HUNDRED, THOUSAND, MILLION = 100, 1000, 1_000_000
MINUTE, HOUR, DAY = 60, 3600, 86_400


def is_summarized(snapshot: Snapshot) -> bool:
    """Return whether the view shows only a summary, because there are too many ranks to give each rank a row."""
    return len(snapshot.rows) > MAX_RANK_ROWS


def format_overall(snapshot: Snapshot) -> str:
    """Return one line with the overall step, the rate, the time left, metrics, and the number of ranks in each state."""
    progress = _format_progress(snapshot.overall)
    parts = [", ".join(progress)] if progress else []
    parts += [text for text in (_format_metrics(snapshot.overall.metrics), _format_counts(snapshot)) if text]
    return "; ".join(parts)


def format_row(row: RankRow) -> tuple[str, ...]:
    """Return the cells of one rank's row, in the order of COLUMN_TITLES."""
    return (
        str(row.rank),
        _format_state(row),
        _format_step(row.step, row.total),
        UNKNOWN if row.rate is None else _format_number(row.rate),
        _format_metrics(row.metrics),
        UNKNOWN if row.memory is None else _format_bytes(row.memory),
        UNKNOWN if row.cpu is None else _format_percent(row.cpu),
        UNKNOWN if row.heartbeat_age is None else f"{_format_seconds(row.heartbeat_age)} ago",
    )


def format_summary(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Return the rows of a summary of the ranks. Each row is a pair of a name and a text."""
    summary = summarize_ranks(snapshot.rows)
    rows = [("ranks", _format_counts(snapshot))]
    if summary.steps is not None:
        minimum, median, maximum = summary.steps
        rows.append(("steps", f"minimum {minimum}, median {median}, maximum {maximum}"))
    if summary.slowest:
        slowest = ", ".join(f"rank {row.rank} ({_format_step(row.step, row.total)})" for row in summary.slowest)
        rows.append(("slowest", slowest))
    rows.append(("all ranks", ", ".join(_format_usage(summary.total_memory, summary.max_memory, summary.cpu))))
    if summary.max_heartbeat_age is not None:
        rows.append(("heartbeat", f"of every rank in the last {_format_seconds(summary.max_heartbeat_age)}"))
    return [row for row in rows if row[1]]


def _format_state(row: RankRow) -> str:
    state = STATE_TEXTS.get(row.state, row.state.name)
    return f"{state}, restart {row.restart_count}" if row.restart_count else state


def _format_progress(overall: OverallProgress) -> list[str]:
    parts = []
    if overall.step is not None:
        percent = f" ({_format_percent(overall.fraction_done)})" if overall.fraction_done is not None else ""
        parts.append(f"{overall.unit} {_format_step(overall.step, overall.total)}{percent}")
    if overall.rate is not None:
        parts.append(f"{_format_number(overall.rate)} {overall.unit}s/s")
    if overall.seconds_left is not None and overall.seconds_left > 0:
        parts.append(f"{_format_seconds(overall.seconds_left)} left")
    return parts


def _format_counts(snapshot: Snapshot) -> str:
    """Return a text with the number of ranks in each state."""
    if not snapshot.shows_ranks:
        return ""
    if not snapshot.rows:
        return "no ranks yet: waiting for the other nodes"
    noun = "rank" if len(snapshot.rows) == 1 else "ranks"
    counts = [f"{count} {STATE_TEXTS.get(state, state.name)}" for state, count in snapshot.counts.items()]
    if len(counts) == 1:
        count, _, state = counts[0].partition(" ")
        return f"{count} {noun} {state}"
    return f"{len(snapshot.rows)} {noun}: {', '.join(counts)}"


def _format_metrics(metrics: Mapping[str, float]) -> str:
    shown = [f"{_clean_name(name)} {_format_number(value)}" for name, value in list(metrics.items())[:MAX_METRICS]]
    return ", ".join([*shown, "…"] if len(metrics) > MAX_METRICS else shown)


def _format_usage(total_memory: int | None, max_memory: int | None, cpu: float | None) -> Iterable[str]:
    if total_memory is not None and max_memory is not None:
        yield f"memory {_format_bytes(total_memory)} in total, {_format_bytes(max_memory)} at most in one rank"
    if cpu is not None:
        yield f"CPU {_format_percent(cpu)}"


def _clean_name(name: str) -> str:
    """Return the name of a metric, with "?" in place of each character that cannot be printed. Shorten a long name.

    If the name of a metric contained control characters, a terminal would execute them.
    """
    printable = "".join(c if c.isprintable() else "?" for c in encodable(name))
    return printable if len(printable) <= MAX_NAME_CHARS else printable[: MAX_NAME_CHARS - 1] + "…"


def _format_step(step: int | None, total: int | None) -> str:
    if step is None:
        return UNKNOWN
    return str(step) if total is None else f"{step} of {total}"


def _format_number(value: float) -> str:
    """Return a number as a text with three significant digits, or as a whole number if it is between 100 and a million."""
    return f"{value:,.0f}" if HUNDRED <= abs(value) < MILLION else f"{value:.3g}"


def _format_percent(fraction: float) -> str:
    """Return the fraction as a percentage that is rounded down, so that 100 % appears only when all steps are done.

    The float 0.29 is slightly less than 29 %. Without `math.nextafter`, the fraction 0.29 would be shown as 28 %.
    """
    return f"{math.floor(100 * math.nextafter(fraction, math.inf))} %"


def _format_bytes(count: int) -> str:
    number, unit = count / THOUSAND, 0
    while number >= THOUSAND and unit + 1 < len(UNITS):
        number, unit = number / THOUSAND, unit + 1
    return f"{_format_number(number)} {UNITS[unit]}"


def _format_seconds(seconds: float) -> str:
    if seconds < MINUTE:
        return f"{seconds:.1f} s" if seconds < MINUTE / 6 else f"{seconds:.0f} s"
    whole = round(seconds)
    for limit, large, small in ((HOUR, MINUTE, 1), (DAY, HOUR, MINUTE)):
        if whole < limit:
            return _format_two_units(whole, large, small)
    return _format_two_units(whole, DAY, HOUR)


def _format_two_units(seconds: int, large: int, small: int) -> str:
    names = {DAY: "d", HOUR: "h", MINUTE: "min", 1: "s"}
    first, rest = divmod(seconds, large)
    second = rest // small
    return f"{first} {names[large]} {second} {names[small]}" if second else f"{first} {names[large]}"

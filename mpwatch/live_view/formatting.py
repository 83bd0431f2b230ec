"""The texts of the live view, for all displays. Pure."""

import math
from collections.abc import Mapping
from datetime import timedelta

from mpwatch.live_view.model import RankRow, Snapshot, StepProgress
from mpwatch.results.model import WorkerState
from mpwatch.results.texts import clean_line, format_count, format_step

MAX_RANK_ROWS = 16  # if there are more ranks, they are summarized
MAX_METRICS = 6  # metrics that are shown for one rank, in the order in which the rank reports them
MAX_NAME_CHARS = 40  # characters of the name of a metric
MAX_SLOWEST = 3  # ranks that a summary names
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
HUNDRED, MILLION = 100, 1_000_000
MB, GB = 1_000_000, 1_000_000_000
MAX_SECONDS = 1e9


def is_summarized(snapshot: Snapshot) -> bool:
    return len(snapshot.rows) > MAX_RANK_ROWS


def format_overall(snapshot: Snapshot) -> str:
    parts = (_format_progress(snapshot.overall), _format_metrics(snapshot.overall.metrics), _format_counts(snapshot))
    end = "" if snapshot.elapsed is None else f" after {_format_seconds(snapshot.elapsed)}"
    return "; ".join(filter(None, parts)) + end


def format_row(row: RankRow) -> tuple[str, ...]:
    status = row.status
    state = STATE_TEXTS.get(status.state, status.state.name)
    restart = f", restart {status.restart_count}" if status.restart_count else ""
    slow = f", slow ({_format_percent(status.lateness.share)})" if status.lateness is not None else ""
    return (
        str(status.rank),
        f"{state}{restart}{slow}",
        _format_step(row),
        UNKNOWN if row.rate is None else _format_number(row.rate),
        _format_metrics(row.metrics),
        UNKNOWN if row.memory is None else _format_bytes(row.memory),
        UNKNOWN if row.cpu is None else _format_percent(row.cpu),
        UNKNOWN if row.heartbeat_age is None else f"{_format_seconds(row.heartbeat_age)} ago",
    )


def format_summary(snapshot: Snapshot) -> list[tuple[str, str]]:
    rows = [("ranks", _format_counts(snapshot))]
    if steps := sorted(row.step for row in snapshot.rows if row.step is not None):
        rows.append(("steps", f"minimum {steps[0]}, median {steps[len(steps) // 2]}, maximum {steps[-1]}"))
    with_steps = (row for row in snapshot.rows if row.status.state.is_running and row.step is not None)
    running = sorted(with_steps, key=lambda row: row.sort_key)
    if running and running[0].sort_key[:2] != running[-1].sort_key[:2]:
        slowest = (f"rank {row.status.rank} ({_format_step(row)})" for row in running[:MAX_SLOWEST])
        rows.append(("slowest", ", ".join(slowest)))
    late = [row.status.lateness for row in snapshot.rows if row.status.lateness is not None]
    rows += [("slow", f"rank {each.rank}: the others wait for {_format_percent(each.share)} of the time") for each in late]
    usage = []
    if memory := [row.memory for row in snapshot.rows if row.memory is not None]:
        usage.append(f"memory {_format_bytes(sum(memory))} in total, {_format_bytes(max(memory))} at most in one rank")
    if cpus := [row.cpu for row in snapshot.rows if row.cpu is not None]:
        usage.append(f"CPU {_format_percent(sum(cpus))}")
    if usage:
        rows.append(("all ranks", ", ".join(usage)))
    if ages := [row.heartbeat_age for row in snapshot.rows if row.heartbeat_age is not None]:
        rows.append(("heartbeat", f"of every rank in the last {_format_seconds(max(ages))}"))
    return rows


def _format_progress(overall: StepProgress) -> str:
    parts = []
    if overall.step is not None:
        percent = f" ({_format_percent(overall.fraction_done)})" if overall.fraction_done is not None else ""
        parts.append(f"{overall.unit} {_format_step(overall)}{percent}")
    if overall.rate is not None:
        parts.append(f"{_format_number(overall.rate)} {overall.unit}s/s")
    if overall.seconds_left:
        parts.append(f"{_format_seconds(overall.seconds_left)} left")
    return ", ".join(parts)


def _format_counts(snapshot: Snapshot) -> str:
    if not snapshot.shows_ranks:
        return ""
    if not snapshot.rows:
        return "no ranks yet: waiting for the other nodes"
    ranks = format_count(len(snapshot.rows), "rank")
    counts = {STATE_TEXTS.get(state, state.name): count for state, count in snapshot.counts.items()}
    if len(counts) == 1:
        return f"{ranks} {next(iter(counts))}"
    return f"{ranks}: {', '.join(f'{count} {state}' for state, count in counts.items())}"


def _format_metrics(metrics: Mapping[str, float]) -> str:
    shown = [
        f"{clean_line(name)[:MAX_NAME_CHARS]} {_format_number(value)}" for name, value in list(metrics.items())[:MAX_METRICS]
    ]
    return ", ".join([*shown, "…"] if len(metrics) > MAX_METRICS else shown)


def _format_step(row: StepProgress) -> str:
    return UNKNOWN if row.step is None else format_step(row.step, row.total)


def _format_number(value: float) -> str:
    """Three significant digits, or a whole number between 100 and a million."""
    return f"{value:,.0f}" if HUNDRED <= abs(value) < MILLION else f"{value:.3g}"


def _format_percent(fraction: float) -> str:
    """Round down, so that 100 % appears only when all is done. `nextafter`: the float 0.29 is slightly less than 29 %."""
    return f"{math.floor(100 * math.nextafter(fraction, math.inf))} %"


def _format_bytes(count: int) -> str:
    return f"{_format_number(count / GB)} GB" if count >= GB else f"{_format_number(count / MB)} MB"


def _format_seconds(seconds: float) -> str:
    if seconds > MAX_SECONDS:
        return "years"
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))  # noqa: PLR2004

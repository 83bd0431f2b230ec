"""The words of the live view, for all its forms: numbers, states, and the lines that sum up. Pure."""

import math
from collections.abc import Iterable, Mapping

from mpwatch.events.to_json import encodable
from mpwatch.live_view.model import OverallProgress, RankRow, Snapshot, spread_of
from mpwatch.results.model import WorkerState

MOST_LINES = 16  # ranks that have a line each
METRICS = 6  # that are shown of a rank, in the order in which it names them
NAME_LIMIT = 40  # characters of the name of one
HEADING = ("rank", "state", "step", "steps/s", "metrics", "memory", "CPU", "heard of")  # of the columns of `cells`
STATES = {
    WorkerState.INIT: "starting",
    WorkerState.HEALTHY: "at work",
    WorkerState.UNHEALTHY: "late",
    WorkerState.SUCCEEDED: "returned",
    WorkerState.FAILED: "failed",
    WorkerState.STOPPED: "stopped",
}
NOTHING = "–"  # noqa: RUF001  a dash, for what is not known
UNITS = ("kB", "MB", "GB", "TB")
HUNDRED, THOUSAND, MILLION = 100, 1000, 1_000_000
MINUTE, HOUR, DAY = 60, 3600, 86_400


def is_folded(picture: Snapshot) -> bool:
    """Whether there are too many ranks for a line each."""
    return len(picture.lines) > MOST_LINES


def cells(line: RankRow) -> tuple[str, ...]:
    """A rank's line, column by column."""
    return (
        str(line.rank),
        _state(line),
        _step(line.step, line.total),
        NOTHING if line.rate is None else _number(line.rate),
        _metrics(line.metrics),
        NOTHING if line.memory is None else _bytes(line.memory),
        NOTHING if line.cpu is None else _percent(line.cpu),
        NOTHING if line.silence is None else f"{_seconds(line.silence)} ago",
    )


def _state(line: RankRow) -> str:
    """And in which of its lives it is, if not the first."""
    state = STATES.get(line.state, line.state.name)
    return f"{state}, restart {line.restart_count}" if line.restart_count else state


def line_of(picture: Snapshot) -> str:
    """All of it in a line: how far, how fast, how long still, and how many ranks do what."""
    progress = _progress(picture.overall)
    parts = [", ".join(progress)] if progress else []
    parts += [text for text in (_metrics(picture.overall.metrics), _ranks(picture)) if text]
    return "; ".join(parts)


def _progress(overall: OverallProgress) -> list[str]:
    """How far, how fast, how long still."""
    parts = []
    if overall.step is not None:
        percent = f" ({_percent(overall.done)})" if overall.done is not None else ""
        parts.append(f"step {_step(overall.step, overall.total)}{percent}")
    if overall.rate is not None:
        parts.append(f"{_number(overall.rate)} steps/s")
    if overall.seconds_left is not None and overall.seconds_left > 0:
        parts.append(f"{_seconds(overall.seconds_left)} left")
    return parts


def _ranks(picture: Snapshot) -> str:
    """How many ranks do what. There are none as long as the nodes of a job have yet to meet."""
    if not picture.lines:
        return "no ranks yet: waiting for the other nodes"
    word = "rank" if len(picture.lines) == 1 else "ranks"
    counts = [f"{count} {STATES.get(state, state.name)}" for state, count in picture.counts.items()]
    if len(counts) == 1:
        count, _, state = counts[0].partition(" ")
        return f"{count} {word} {state}"
    return f"{len(picture.lines)} {word}: {', '.join(counts)}"


def summary(picture: Snapshot) -> list[tuple[str, str]]:
    """What is told of ranks that are too many for a line each: rows, each with its name."""
    spread = spread_of(picture.lines)
    rows = [("ranks", _ranks(picture))]
    if spread.steps is not None:
        least, middle, most = spread.steps
        rows.append(("steps", f"{least} at least, {middle} in the middle, {most} at most"))
    if spread.slowest:
        rows.append(("slowest", ", ".join(f"rank {line.rank} ({_step(line.step, line.total)})" for line in spread.slowest)))
    rows.append(("machine", ", ".join(_burden(spread.memory, spread.most_memory, spread.cpu))))
    if spread.silence is not None:
        rows.append(("heard of", f"all of them in the last {_seconds(spread.silence)}"))
    return [row for row in rows if row[1]]


def _metrics(metrics: Mapping[str, float]) -> str:
    """The first few of them."""
    shown = [f"{_clean(name)} {_number(value)}" for name, value in list(metrics.items())[:METRICS]]
    return ", ".join([*shown, "…"] if len(metrics) > METRICS else shown)


def _burden(memory: int | None, most: int | None, cpu: float | None) -> Iterable[str]:
    if memory is not None and most is not None:
        yield f"memory {_bytes(memory)} together, {_bytes(most)} at most"
    if cpu is not None:
        yield f"CPU {_percent(cpu)}"


def _clean(name: str) -> str:
    """A rank may name its metrics as it likes, and a terminal does what it is told."""
    printable = "".join(c if c.isprintable() else "?" for c in encodable(name))
    return printable if len(printable) <= NAME_LIMIT else printable[: NAME_LIMIT - 1] + "…"


def _step(step: int | None, total: int | None) -> str:
    if step is None:
        return NOTHING
    return str(step) if total is None else f"{step} of {total}"


def _number(value: float) -> str:
    """Three digits that matter, and all of them before the point."""
    return f"{value:,.0f}" if HUNDRED <= abs(value) < MILLION else f"{value:.3g}"


def _percent(fraction: float) -> str:
    """100 % is said of nothing less; and 29 % of 29 / 100, which is a little less in binary digits."""
    return f"{math.floor(100 * math.nextafter(fraction, math.inf))} %"


def _bytes(count: int) -> str:
    number, unit = count / THOUSAND, 0
    while number >= THOUSAND and unit + 1 < len(UNITS):
        number, unit = number / THOUSAND, unit + 1
    return f"{_number(number)} {UNITS[unit]}"


def _seconds(seconds: float) -> str:
    if seconds < MINUTE:
        return f"{seconds:.1f} s" if seconds < MINUTE / 6 else f"{seconds:.0f} s"
    whole = round(seconds)
    for limit, large, small in ((HOUR, MINUTE, 1), (DAY, HOUR, MINUTE)):
        if whole < limit:
            return _two(whole, large, small)
    return _two(whole, DAY, HOUR)


def _two(seconds: int, large: int, small: int) -> str:
    names = {DAY: "d", HOUR: "h", MINUTE: "min", 1: "s"}
    first, rest = divmod(seconds, large)
    second = rest // small
    return f"{first} {names[large]} {second} {names[small]}" if second else f"{first} {names[large]}"

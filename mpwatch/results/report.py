"""What reports and warnings say about the end of a run: its reason, and notes. Pure.

failure.py describes the failure of one rank, places.py its place in the code, and run_result.py makes the whole report.

A run is *stopped* if it ends before its ranks return. A *requested stop* (`request_stop`, `StopPolicy`) lets the ranks
return by themselves.
"""

from collections.abc import Collection, Iterable, Mapping

from mpwatch.os_support.signals import name_signal
from mpwatch.results.model import Attempt, Progress
from mpwatch.results.texts import format_count, format_ranks, format_step, group_ranks

FATE_LINES = 30  # groups of ranks; further groups are counted
MANY_SECONDS = 100  # durations of this length and more are printed without tenths
STOPPED_AT_EXIT = "the run was stopped: the program ended"


def make_restart_notes(no_restart_reason: str, attempts: Iterable[Attempt]) -> tuple[str, ...]:
    """Return the note that says why ranks were not restarted, or () if `no_restart_reason` is empty."""
    again = " again" if any(attempt.number for attempt in attempts) else ""
    return (f"not restarted{again}: {no_restart_reason}",) if no_restart_reason else ()


def format_ended_ranks(ranks: Collection[int]) -> str:
    return f"the next call starts {format_ranks(ranks)} again; {'its' if len(ranks) == 1 else 'their'} state is lost"


def format_timeout(limit: str, unfinished: Iterable[int], stragglers: Collection[int] = ()) -> str:
    """`stragglers` are the unfinished ranks that were not in the collective in which the other ranks waited."""
    outside = f", and {format_ranks(stragglers)} not in the collective that others waited in" if stragglers else ""
    return f"the run did not end within {limit}: {format_ranks(unfinished)} had not returned{outside}"


def format_unused_heartbeat_timeout(heartbeat_timeout: float) -> str:
    return f"heartbeat_timeout={heartbeat_timeout:g} did not apply: it begins with a rank's first report() or heartbeat()"


def format_silence(seconds: float, heartbeat_timeout: float | None, progress: Progress | None) -> str:
    """Say how long a rank was silent, and at which step. A victim of another failure has no `heartbeat_timeout`."""
    text = f"{seconds:.1f}" if seconds < MANY_SECONDS else f"{seconds:.0f}"
    step = "" if progress is None or progress.step is None else f" at step {format_step(progress.step, progress.total)}"
    if heartbeat_timeout is None:
        return f"silent for {text} s{step}"
    return f"was silent for {text} s (heartbeat_timeout={heartbeat_timeout:g}){',' if step else ''}{step}"


def format_signal(number: int) -> str:
    return f"the run was stopped: this process received {name_signal(number)}"


def format_loss_in_other_call(ranks: Iterable[int]) -> str:
    return f"the call was stopped together with {format_ranks(ranks)}, which it had not called: all ranks restart together"


def format_stop_timeout(stop_timeout: float, cause: str, unfinished: Iterable[int]) -> str:
    ranks = format_ranks(unfinished)
    return f"a stop was requested ({cause}), and {ranks} had not returned within StopPolicy(timeout={stop_timeout:g})"


def format_overdue_ranks(stop_timeout: float, places: Mapping[int, str]) -> str:
    """Name the ranks that did not return after a requested stop. `places`: phrases such as `, at step 20 (train.py:88)`."""
    text = f"{format_ranks(places)} had not returned within StopPolicy(timeout={stop_timeout:g})"
    groups = [f"{ranks}{place}" for ranks, place in group_ranks(places)]
    if len(groups) == 1:
        return text + next(iter(places.values()))
    if len(groups) > FATE_LINES:
        groups[FATE_LINES:] = [f"and {format_count(len(groups) - FATE_LINES, 'more group')} of ranks"]
    return f"{text}: {'; '.join(groups)}"

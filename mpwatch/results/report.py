"""Makes the report of a run. The report says what ended the run, and what happened to each rank.

Read the function `format_report` first. The functions of report.py do no I/O. `format_overdue_ranks` runs in the watcher
thread, and the other functions run in the caller's thread. failure.py describes the failure of one rank, and places.py
describes the place of one rank in the code.

A report looks like this:

    rank 1 failed first: ValueError: x (train.py:88 in step)      the verdict
      its logs: ...                                               details of the root cause
      ranks 0, 2: stopped by the watcher (train.py:12 in step)    the fates of the other ranks, grouped
      last reports: ranks 0-3 at step 30 of 100                   of a run that no failure has ended
      restarted 2 times                                           restarts
        first start, 1.2 s: rank 3 was killed by SIGKILL          failed attempts
      not restarted again: ...                                    notes
      the next call starts ranks 0-2 again; their state is lost   notes of a call of a WorkerGroup
"""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from traceback import walk_tb
from typing import Any

from mpwatch.os_support.signals import name_signal
from mpwatch.results.failure import (
    TEXT_LIMIT,
    FailureKind,
    ProcessFailure,
    describe_failure,
    format_ranks,
    format_root_cause,
    summarize_exception,
)
from mpwatch.results.model import Attempt, Progress, RunData, WorkerState
from mpwatch.results.places import PACKAGE_FOLDER, format_location
from mpwatch.wire.exceptions.decoder import get_builtin_attribute

# The fate of a rank that has not failed, by its state.
FATES_WITHOUT_FAILURE = {
    WorkerState.SUCCEEDED: "had returned",
    WorkerState.STOPPED: "stopped by the watcher",
}
STACK_LINES = 24  # of the stack of a crash: a dozen frames, each with its line of source
STDERR_LINES = 12  # that the report quotes, from the end of stderr
ATTEMPT_LINES = 30
FATE_LINES = 30  # groups of ranks; further groups are counted
STEP_GROUPS = 8  # groups of ranks that have reported the same step last
SAME_MOMENT = 0.1  # seconds in which it is not certain whether an exception or a death was first
MANY_SECONDS = 100  # durations of this length and more are printed without tenths
# Parts in which texts of equal fates may differ: "peer [10.0.0.1]:4711", "host<4711>", "silent for 5.1 s".
SMALL_DIFFERENCES = re.compile(r"(?<=\]:)\d+|(?<=<)\d+(?=>)|(?<=silent for )[\d.]+")
VICTIM = re.compile(r"^(perhaps )?a victim of rank")
SINGULAR = re.compile(r"^(silent for [^;]*; )it (?=has )|^(?=has |waits in )")  # "has not joined", "silent for 5 s; it has"
# Evidence of failures, as phrases that follow the name of the rank or what happened to it.
KEPT_PEERS_WAITING = "kept its peers waiting"
KEPT_PEERS_UNTIL_TIMEOUT = "kept its peers waiting until they timed out"
KEPT_OTHER_NODES_WAITING = "kept its peers on other nodes waiting"
EXITED_BEFORE_TEXT = "the rank ended before the text of the exception was made"
TEXT_DID_NOT_END = "making the text of the exception did not end in time"
EXITED_DURING_TEXT = "its function had raised an exception, and the rank ended while the exception's text was made"
GLOO_SIZE = "gloo ended it: a peer sent more data than it expected, so tensors or splits differ between the ranks"
NCCL_WATCHDOG = "NCCL's watchdog: a peer did not come to a collective in time"


def format_report(result: RunData[Any]) -> str:
    """Return the whole report, which begins with the verdict."""
    groups = [f"  {line}" for line in format_fates(result)]
    if result.root_cause is None and (steps := format_last_steps(result.progress)):
        groups.append(f"  last reports: {steps}")
    restarts = [f"  {text}"] if (text := format_restarts(result)) else []
    restarts += format_attempts(select_failed_attempts(result))
    notes = [f"  {note}" for note in result.notes]
    return "\n".join([format_verdict(result), *_format_details(result), *groups, *restarts, *notes])


def format_restarts(result: RunData[Any]) -> str:
    """Return a text such as `restarted once`, or an empty text."""
    return f"restarted {format_times(result.restarts)}" if result.restarts else ""


def make_restart_notes(no_restart_reason: str, attempts: Iterable[Attempt]) -> tuple[str, ...]:
    """Return the note that says why ranks were not restarted, or () if `no_restart_reason` is empty."""
    again = " again" if any(attempt.number for attempt in attempts) else ""
    return (f"not restarted{again}: {no_restart_reason}",) if no_restart_reason else ()


def format_ended_ranks(ranks: Collection[int]) -> str:
    """Return a sentence about the ranks of a WorkerGroup that have ended with a failed call."""
    return f"the next call starts {format_ranks(ranks)} again; {'its' if len(ranks) == 1 else 'their'} state is lost"


def format_count(count: int, noun: str) -> str:
    """Return the count and the noun as a text, such as `1 rank` or `3 ranks`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_times(count: int) -> str:
    """Return the text `once` for the count 1, and a text such as `3 times` for other counts."""
    return "once" if count == 1 else f"{count} times"


def select_failed_attempts(result: RunData[Any]) -> list[Attempt]:
    """Return the attempts that a report lists."""
    was_restarted = any(attempt.number for attempt in result.attempts)
    return [attempt for attempt in result.attempts if was_restarted and _is_worth_reporting(attempt, result)]


def _is_worth_reporting(attempt: Attempt, result: RunData[Any]) -> bool:
    """Return whether the report of the run describes `attempt` in a line of its own.

    If each rank is restarted alone, the report omits the attempts that a timeout or a signal has ended, because the verdict
    of the run already names this timeout or signal.
    """
    is_of_all = len(attempt.ranks) == len(result.workers)
    return attempt.root_cause is not None or (is_of_all and bool(attempt.reason))


def format_attempts(attempts: Iterable[Attempt]) -> list[str]:
    """For each attempt, return a line that says which rank failed first, or what else ended the attempt."""
    return [f"    {which}: {what}" if which else f"    {what}" for which, what in make_attempt_rows(attempts)]


def make_attempt_rows(attempts: Iterable[Attempt]) -> list[tuple[str, str]]:
    """Return the names and the verdicts of at most ATTEMPT_LINES attempts.

    If there are more than ATTEMPT_LINES attempts, a row such as `and 5 more: see .attempts` replaces the attempts in the
    middle.
    """
    rows = [(attempt.name, format_verdict(attempt)) for attempt in attempts]
    more = len(rows) - ATTEMPT_LINES
    if more > 0:
        rows[ATTEMPT_LINES // 2 : -ATTEMPT_LINES // 2] = [("", f"and {more} more: see .attempts")]
    return rows


def format_verdict(result: RunData[Any] | Attempt) -> str:
    """Return a line that says what ended the run or the attempt, such as `rank 1 failed first: ValueError: ...`."""
    verdict = result.reason if result.root_cause is None else format_root_cause(result.root_cause)
    if isinstance(result, RunData) and result.keep_going and result.failures:
        return f"{len(result.failures)} of {format_count(len(result.workers), 'rank')} failed; {verdict}"
    return verdict


def group_fates(result: RunData[Any]) -> dict[str, list[int]]:
    """Group the ranks by what happened to them. The rank whose failure is the root cause is in no group.

    The keys of the returned dict are texts such as `stopped by the watcher (train.py:12 in step)`. The value for a text is
    the list of the ranks to which this happened. The dict begins with the ranks whose failure is not secondary. A secondary
    failure is the consequence of another failure. Two texts that differ only in a port number or in the seconds of silence
    count as the same text. If the root cause is the loss of a node, the dict contains no rank of this node, because the
    verdict already names all ranks of the node.
    """
    root = result.root_cause
    found: dict[str, tuple[str, list[int]]] = {}
    for rank in sorted(result.worker_states, key=partial(_get_fate_order, result)):
        failure = result.failures.get(rank)
        if root is None or (failure is not root and rank not in root.node_ranks):
            fate = describe_fate(result, rank)
            found.setdefault(SMALL_DIFFERENCES.sub("", fate), (fate, []))[1].append(rank)
    return {fate if len(ranks) == 1 else _use_plural(fate): ranks for fate, ranks in found.values()}


def _use_plural(fate: str) -> str:
    return SINGULAR.sub(r"\1each ", VICTIM.sub(r"\1victims of rank", fate))


def format_fates(result: RunData[Any]) -> list[str]:
    """Return a line for each group that `group_fates` returns, such as `ranks 0-2: had returned`."""
    groups = [f"{format_ranks(ranks)}: {fate}" for fate, ranks in group_fates(result).items()]
    if len(groups) > FATE_LINES:
        more = format_count(len(groups) - FATE_LINES, "more group")
        groups[FATE_LINES:] = [f"and {more} of ranks: see .failures and .stacks"]
    return groups


def format_last_steps(progress: Mapping[int, Progress]) -> str:
    """Return the last reported steps of the ranks, such as `ranks 0-2 at step 30 of 100; rank 3 at step 12 of 100`."""
    ranks_by_step: dict[tuple[int, int | None], list[int]] = {}
    for rank, report in progress.items():
        if report.step is not None:
            ranks_by_step.setdefault((report.step, report.total), []).append(rank)
    steps = sorted(ranks_by_step, key=lambda step: (-step[0], step[1] or 0))
    if len(steps) > STEP_GROUPS:
        ranks = [rank for group in ranks_by_step.values() for rank in group]
        return f"{format_ranks(ranks)} at steps {steps[-1][0]} to {steps[0][0]}"
    texts = [f"step {step}" if total is None else f"step {step} of {total}" for step, total in steps]
    return "; ".join(f"{format_ranks(ranks_by_step[step])} at {text}" for step, text in zip(steps, texts, strict=True))


def _get_fate_order(result: RunData[Any], rank: int) -> tuple[bool, int]:
    failure = result.failures.get(rank)
    return failure is None or failure.is_secondary, rank


def format_timeout(timeout: float, unfinished: Iterable[int], stragglers: Collection[int] = ()) -> str:
    """Return a sentence that says that the timeout of the run expired.

    Args:
        timeout: seconds.
        unfinished: the ranks that had not returned.
        stragglers: the ranks among them that were not in the collective in which the other ranks waited.
    """
    outside = f", and {format_ranks(stragglers)} not in the collective that others waited in" if stragglers else ""
    return f"the run did not end within timeout={timeout:g} s: {format_ranks(unfinished)} had not returned{outside}"


def format_unused_heartbeat_timeout(heartbeat_timeout: float) -> str:
    """Return a sentence that explains why `heartbeat_timeout` had no effect in the run."""
    return f"heartbeat_timeout={heartbeat_timeout:g} did not apply: it begins with a rank's first report() or heartbeat()"


def format_signal(number: int) -> str:
    """Return a sentence that says that a signal to the calling program stopped the run."""
    return f"the run was stopped: this process received {name_signal(number)}"


def format_silence(seconds: float, heartbeat_timeout: float | None, progress: Progress | None) -> str:
    """Return a phrase with the seconds since a rank's last heartbeat, and with the last step that the rank has reported.

    If the rank's failure is the consequence of another failure, pass None as `heartbeat_timeout`. If `heartbeat_timeout` is
    None, the phrase is short, such as `silent for 5.1 s at step 30 of 100`.
    """
    text = f"{seconds:.1f}" if seconds < MANY_SECONDS else f"{seconds:.0f}"
    step = "" if progress is None or progress.step is None else f" at step {progress.step}"
    of = f" of {progress.total}" if step and progress is not None and progress.total is not None else ""
    if heartbeat_timeout is None:
        return f"silent for {text} s{step}{of}"
    return f"was silent for {text} s (heartbeat_timeout={heartbeat_timeout:g}){',' if step else ''}{step}{of}"


def format_stopped_by_caller() -> str:
    """Return a sentence that says that the program called `RunHandle.terminate`."""
    return "the run was stopped: terminate() was called"


def format_stop_request() -> str:
    """Return a sentence that says that a stop was requested while no rank was running."""
    return "the run was stopped: a stop was requested"


def format_stop_timeout(stop_timeout: float, cause: str, unfinished: Iterable[int]) -> str:
    """Return a sentence that says that ranks did not return within `stop_timeout` after a stop was requested.

    Args:
        stop_timeout: seconds.
        cause: what requested the stop.
        unfinished: the ranks that had not returned.
    """
    ranks = format_ranks(unfinished)
    return f"a stop was requested ({cause}), and {ranks} had not returned within StopPolicy(timeout={stop_timeout:g})"


def format_overdue_ranks(stop_timeout: float, places: Mapping[int, str]) -> str:
    """Return a warning that says which ranks did not return within `stop_timeout` seconds after a stop was requested.

    Args:
        stop_timeout: seconds.
        places: where each of these ranks is, as a phrase that may be empty: `, at step 20 (train.py:88 in step: ...)`.
    """
    ranks_by_place: dict[str, list[int]] = {}
    for rank, place in places.items():
        ranks_by_place.setdefault(place, []).append(rank)
    text = f"{format_ranks(places)} had not returned within StopPolicy(timeout={stop_timeout:g})"
    if len(ranks_by_place) == 1:
        return text + next(iter(ranks_by_place))
    groups = [f"{format_ranks(ranks)}{place}" for place, ranks in ranks_by_place.items()]
    if len(groups) > FATE_LINES:
        groups[FATE_LINES:] = [f"and {format_count(len(groups) - FATE_LINES, 'more group')} of ranks"]
    return f"{text}: {'; '.join(groups)}"


def format_end_of_program() -> str:
    """Return a sentence that says that the program ended before the end of the run or the call."""
    return "the run was stopped: the program ended"


def format_loss_in_other_call(ranks: Iterable[int]) -> str:
    """Return a sentence that says that a call was stopped because ranks of another call of the WorkerGroup were lost."""
    return f"the call was stopped together with {format_ranks(ranks)}, which it had not called: all ranks restart together"


def format_not_ready(start_timeout: float) -> str:
    """Return a sentence that says that an interpreter took longer than `start_timeout` to start."""
    return f"its interpreter was not ready after {start_timeout:g} s"


def format_likely_oom(clue: str) -> str:
    """Return a phrase that says that the out-of-memory killer probably ended a process.

    The phrase ends with the evidence `clue`, such as `oom_kill in memory.events rose by 2 during the run`.
    """
    return f"likely the out-of-memory killer: {clue}"


def format_unloadable_value(kind: str, error: BaseException) -> str:
    """Return a sentence that says that the caller could not unpickle a return value of type `kind`, because of `error`."""
    function = _name_first_user_function(error)
    summary = summarize_exception(error).partition("\n")[0][:TEXT_LIMIT]
    why = f"{function} raised {summary}" if function else summary
    return f"its return value cannot be rebuilt in the caller: it is of type {kind} ({why}); return plain data instead"


def _name_first_user_function(error: BaseException) -> str:
    """Return the name of the function of user code that pickle called, such as `train.Model.__setstate__`.

    The returned name is empty if pickle itself raised the exception.
    """
    for frame, _ in walk_tb(get_builtin_attribute(error, "__traceback__")):
        module, code = str(frame.f_globals.get("__name__", "")), frame.f_code
        if not (code.co_filename.startswith((PACKAGE_FOLDER, "<frozen importlib")) or module == "importlib"):
            return f"{module}.{code.co_qualname}"
    return ""


def _format_details(result: RunData[Any]) -> list[str]:
    """Return the lines below the verdict, such as the stack, the stderr and the logs of the root cause."""
    root, lines = result.root_cause, []
    if root is not None and root.kind in (FailureKind.SIGNAL, FailureKind.LOST, FailureKind.OOM) and root.stack:
        frames = [f"  {line}" for line in root.stack.splitlines() if line.startswith(("  File ", "    "))]
        if frames:  # else a thread crashed that runs no Python code
            lines += ["  its Python stack, innermost frame first:", *frames[:STACK_LINES]]
    if root is not None and root.stderr:
        printed = root.stderr.rstrip().splitlines()
        what = "what it printed" if root.kind is FailureKind.START else "the end of its stderr"
        lines += [f"  {what}:", *(f"    {line}" for line in printed[-STDERR_LINES:])]
    if root is not None and root.log_files:
        lines.append(f"  its logs: {', '.join(root.log_files.values())}")
    elif result.log_dir:
        lines.append(f"  logs: {result.log_dir}")
    return lines


def describe_fate(result: RunData[Any], rank: int) -> str:
    """Return a phrase that says what happened to a rank of `result.worker_states`, such as `had returned`."""
    failure, state = result.failures.get(rank), result.worker_states[rank]
    if failure is None:
        return FATES_WITHOUT_FAILURE[state] + (
            format_location(result.stacks.get(rank, "")) if state is WorkerState.STOPPED else ""
        )
    root, what = result.root_cause, describe_failure(failure).removeprefix("was ")
    if failure.is_secondary and root is not None and not root.is_secondary:
        return f"a victim of rank {root.rank}: {what}"
    are_comparable = root is not None and root.group_rank == failure.group_rank and not result.keep_going
    if root is not None and are_comparable and abs(failure.elapsed - root.elapsed) <= SAME_MOMENT:
        if _is_death(root) and not _is_death(failure):
            return f"perhaps a victim of rank {root.rank}: {what}"
        if _is_death(failure) and not _is_death(root):
            return f"{what} at the same moment, so it may have failed first"
    return what


def _is_death(failure: ProcessFailure) -> bool:
    kinds = (FailureKind.SIGNAL, FailureKind.OOM, FailureKind.EXIT, FailureKind.LOST)
    return failure.kind in kinds and not failure.traceback

"""`RunResult` is what `mpwatch.run` returns, and the report that is made from it.

A report looks like this:

    rank 1 failed first: ValueError: x (train.py:88 in step)      the verdict
      its logs: ...                                               details of the root cause
      ranks 0, 2: stopped by the watcher (train.py:12 in step)    the fates of the other ranks, grouped
      last reports: ranks 0-3 at step 30 of 100                   if they have called mpwatch.report()
      restarted 2 times
        first start, 1.2 s: rank 3 was killed by SIGKILL          failed attempts
      not restarted again: ...                                    notes
"""

import json
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, ItemsView, Iterable, Mapping, Sequence, ValuesView
from contextlib import suppress
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any, SupportsIndex, TypeVar, overload

from mpwatch.events.chrome_trace import write_chrome_trace
from mpwatch.events.types import Event, RunStarted
from mpwatch.options.worker_info import Worker
from mpwatch.results.collective import Collective
from mpwatch.results.failure import FailureKind, ProcessFailure, describe_failure
from mpwatch.results.model import Attempt, Lateness, Progress, WorkerState, format_end
from mpwatch.results.places import format_location
from mpwatch.results.report import FATE_LINES
from mpwatch.results.stacks import Stacks
from mpwatch.results.texts import format_count, format_ranks, format_step, format_times, group_ranks
from mpwatch.results.to_json import to_json
from mpwatch.version import __version__
from mpwatch.wire.exceptions.decoder import USER_ERRORS
from mpwatch.wire.pickling import return_values

T = TypeVar("T")
STACK_LINES = 24  # of the stack of a crash: a dozen frames, each with its line of source
STDERR_LINES = 12  # that the report quotes, from the end of stderr
ATTEMPT_LINES = 30
STEP_GROUPS = 8  # groups of ranks that have reported the same step last
HTML_ROWS = 32  # return values in a table; further ones are counted
SAME_MOMENT = 0.1  # seconds in which it is not certain whether an exception or a death was first
# Parts in which texts of equal fates may differ: "peer [10.0.0.1]:4711", "host<4711>", "silent for 5.1 s".
SMALL_DIFFERENCES = re.compile(r"(?<=\]:)\d+|(?<=<)\d+(?=>)|(?<=silent for )[\d.]+")
VICTIM = re.compile(r"^(perhaps )?a victim of rank")
SINGULAR = re.compile(r"^(silent for [^;]*; )it (?=has )|^(?=has |waits in )")  # "has not joined", "silent for 5 s; it has"
DEATHS = (FailureKind.SIGNAL, FailureKind.OOM, FailureKind.EXIT, FailureKind.LOST)


@dataclass(frozen=True, repr=False)
class RunResult(Sequence[T]):
    """The outcome of a run. A RunResult is a sequence of the ranks' return values, with attributes such as `failures`.

    The index is the global rank: `result[3]` is the value of rank 3, `result[-1]` is the value of the last rank, and
    `len(result)` is the world size. A rank has no value here if it has failed or was stopped, if a call of a WorkerGroup did
    not call it, or if it belongs to another node, whose own result has the value. Then `result[rank]` raises LookupError,
    with a text that says what happened to the rank. Iteration and slices that reach this rank raise it, too. `values()` and
    `items()` have only the values that exist.

    If the run has not succeeded, its result can always be pickled, without the values that cannot be pickled or unpickled.

    Attributes:
        state: SUCCEEDED, FAILED, or STOPPED. It is STOPPED if a signal to the calling program ended the run.
        return_values: the return values by global rank, of the ranks that have returned. After a failure, too, it has the
            values of the ranks that had returned before. In a job of several nodes, it has the values of this node's ranks
            only, except in a job that was started on a cluster by one call.
        failures: the failures by global rank.
        root_cause: the failure that came first. It is None if no rank failed, or if the timeout expired.
        workers: the ranks, in order.
        worker_states: the state by global rank: SUCCEEDED, FAILED, or STOPPED if the watcher stopped the rank.
        progress: the last `mpwatch.report()` by global rank. Ranks without a report are missing.
        stacks: the Python stacks of the ranks that the watcher stopped, by global rank. The stacks are from the moment just
            before the watcher stopped the rank. The main thread and the innermost frames are first. Instead of stacks, there
            may be a line that says why there are no stacks. Ranks that wrote no stacks in time are missing.
        collectives: the collective of torch.distributed in which each rank waited, or otherwise the last collective of the
            rank, by global rank. It is empty if the run succeeded. Ranks without a process group, and ranks that did not
            answer in time, are missing. The data comes from torch's flight recorder.
        reason: what ended the run, if no failure ended it: the timeout, or a signal to the calling program. Otherwise it is
            empty.
        log_dir: the folder of the log files, with a file for each attempt, rank and stream. It is empty without log files.
            See `LogSpec`.
        attempts: all attempts, in the order in which they ended. All other fields, except `events`, describe the last
            attempt of each rank.
        notes: sentences for people, which are also lines of the report: why failed ranks were not restarted, that ranks of a
            WorkerGroup have ended with this call, that a value could not be rebuilt, or that the kernel's out-of-memory
            killer killed a process that is not a rank.
        keep_going: whether the run went on with the other ranks after a rank had failed.
        stopped_at: the step at which `should_stop` returned True after a request to stop. It is None if `should_stop`
            returned True on no rank. With scope="worker", each rank has its own step, and this is the highest of these
            steps.
        stop_cause: what requested the stop, such as "SIGUSR1", "request_stop() in rank 3" or "StopPolicy(after=3600)". It is
            empty if nothing requested a stop. If all ranks returned before they called `should_stop` again, there is a
            `stop_cause`, but `stopped_at` is None.
        slow_rank: the rank for which the others often waited in collectives, as of the last check. It is None if no rank
            was slow, if mpwatch is not sure, and on several nodes. See `mpwatch.events.SlowRank`.
        elapsed: seconds of the whole run, from its start to the exit of its last rank, with all restarts. For a call of a
            WorkerGroup, it is the time of the call. For a job on a cluster, it is the time of the node that took longest.
        events: the latest 100,000 events of the run, in the order in which the watcher noticed them. It is always empty for
            a call of a WorkerGroup. Use the option `on_event` of the group instead.
    """

    state: WorkerState
    return_values: Mapping[int, T] = field(default_factory=dict)
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    root_cause: ProcessFailure | None = None
    workers: tuple[Worker, ...] = ()
    worker_states: Mapping[int, WorkerState] = field(default_factory=dict)
    progress: Mapping[int, Progress] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)
    collectives: Mapping[int, Collective] = field(default_factory=dict)
    reason: str = ""
    log_dir: str = ""
    attempts: tuple[Attempt, ...] = ()
    notes: tuple[str, ...] = ()
    keep_going: bool = False
    stopped_at: int | None = None
    stop_cause: str = ""
    slow_rank: Lateness | None = None
    elapsed: float = 0.0
    events: tuple[Event, ...] = ()

    def to_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write the timeline of the run to a file for Perfetto (ui.perfetto.dev) and chrome://tracing.

        In the timeline, each rank has a lane with its processes, calls, failures and restarts.

        Raises:
            OSError: the file cannot be written.
            ValueError: the result has no events, because it is the result of a WorkerGroup's call. Use the option `on_event`
                of the group.
        """
        write_chrome_trace(self.events, path)

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write an HTML file that shows the result in the same way as a notebook, but with more details.

        The HTML file has the table, the timeline of the ranks, the traceback of the root cause, the stacks of the other
        ranks, the whole report, and when, where, how and with which versions the run was started. You can attach it to a
        ticket, because it needs no other file and no network.

        Args:
            path: the path of the file. An existing file is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        from mpwatch.results.html import fold, make_page, make_table

        stacks = fold("Python stacks of the other ranks", str(Stacks(self.stacks)) if self.stacks else "")
        report = "" if self.state is WorkerState.SUCCEEDED else fold("the whole report", format_report(self))
        facts = make_table("", _list_facts(self))
        page = make_page(self._caption, self._repr_html_() + facts + stacks + report).replace(
            "<details>", "<details open>", 1
        )
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)

    def to_json(self) -> str:
        """Return the facts of the result as JSON, for other programs: all attributes except `events`, and the `verdict`.

        The keys are the names of the attributes, and ranks are texts. States and kinds are their names. What JSON cannot
        represent, such as a tensor among the return values, is the text of its `repr`, cut to 1,000 characters. An exception
        is the name of its class; its text and its traceback are in `summary` and `traceback`.
        """
        facts = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "events"}
        return json.dumps({"verdict": self.verdict, **to_json(facts)}, indent=1)

    @property
    def restarts(self) -> int:
        """The number of restarts in this run. A restart of all ranks together counts as one restart.

        If nodes have joined or left a job, the next start of the ranks does not count as a restart.
        """
        return sum(attempt.is_counted for attempt in self.attempts)

    @property
    def verdict(self) -> str:
        """The first line of the report: which rank failed first and why, or what else ended the run, such as the timeout.

        It is empty if the run succeeded.
        """
        verdict = format_end(self.root_cause, self.reason)
        if self.keep_going and self.failures:
            return f"{len(self.failures)} of {format_count(len(self.workers), 'rank')} failed; {verdict}"
        return verdict

    @property
    def fates(self) -> list[str]:
        """The lines of the report about all ranks except the rank that failed first.

        Several ranks can share a line, for example `ranks 0-1: stopped by the watcher …`.
        """
        return [_join(name, fate) for name, fate in _fate_rows(self)]

    def values(self) -> ValuesView[T]:
        """The return values that exist, in the order of ranks."""
        return self.return_values.values()

    def items(self) -> ItemsView[int, T]:
        """The pairs of global rank and return value, for the values that exist, in the order of ranks."""
        return self.return_values.items()

    @overload
    def __getitem__(self, rank: SupportsIndex) -> T: ...

    @overload
    def __getitem__(self, rank: slice) -> list[T]: ...

    def __getitem__(self, rank: SupportsIndex | slice) -> T | list[T]:
        ranks = range(len(self))
        if isinstance(rank, slice):
            return [self._get_value(each) for each in ranks[rank]]
        try:
            number = ranks[rank]
        except IndexError:
            raise IndexError(f"there is no rank {rank}; the number of ranks is {len(ranks)}") from None
        return self._get_value(number)

    def __len__(self) -> int:
        return self.workers[0].world_size if self.workers else max(self.worker_states, default=-1) + 1

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self.state is not WorkerState.SUCCEEDED:  # the failures must arrive, whatever the values are
            state["return_values"] = _convert(self.return_values, return_values.dumps)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["state"] is not WorkerState.SUCCEEDED:
            state = {**state, "return_values": _convert(state["return_values"], return_values.loads)}
        self.__dict__.update(state)

    def _repr_html_(self) -> str:
        from mpwatch.events.timeline_svg import draw_timelines
        from mpwatch.results.html import fold, get_short_repr, make_table

        picture, root = draw_timelines(self.events), self.root_cause
        if self.state is WorkerState.SUCCEEDED:
            rows = [(f"rank {rank}", get_short_repr(value)) for rank, value in [*self.items()][:HTML_ROWS]]
            more = len(self.return_values) - len(rows)
            return make_table(self._caption, [*rows, *([("…", f"{more} more")] if more else [])]) + picture
        restarts = [("all", text)] if (text := self._restart_text) else []
        notes = [("", note) for note in self.notes]
        table = make_table(self._caption, [*_fate_rows(self), *restarts, *_attempt_rows(_failed_attempts(self)), *notes])
        if root is None:
            return table + picture
        name = "traceback" if root.traceback else "Python stack" if root.stack else "what it printed"
        return table + picture + fold(f"{name} of rank {root.rank}", root.traceback or root.stack or root.stderr)

    @property
    def _caption(self) -> str:
        if self.state is not WorkerState.SUCCEEDED:
            return self.verdict
        ranks = format_count(len(self.workers), "rank")
        return ", ".join(filter(None, [f"{ranks} succeeded", self._restart_text]))

    @property
    def _restart_text(self) -> str:
        return f"restarted {format_times(self.restarts)}" if self.restarts else ""

    def __repr__(self) -> str:
        from mpwatch.results.html import get_short_repr

        values = list(self.values()) if len(self.return_values) == len(self) else dict(self.items())
        what = get_short_repr(values) if self.state is WorkerState.SUCCEEDED else self.verdict
        return f"<RunResult {self.state.name} after {self.elapsed:.1f} s: {what}>"

    def _get_value(self, rank: int) -> T:
        if rank in self.return_values:
            return self.return_values[rank]
        failure = self.failures.get(rank)
        why = "this call has not called it"
        if self.worker_states.get(rank) is WorkerState.SUCCEEDED:
            why = "it had returned, but its value could not be pickled or rebuilt"
        elif rank in self.worker_states:
            why = _describe_fate(self, rank)
        elif self.workers and self.workers[0].group_world_size > 1:
            why = "it belongs to another node, where the result has its value"
        text = f"rank {rank} has no value: {why}; .values() and .items() have the values that exist"
        # not IndexError, at which an iteration would end without a word
        raise LookupError(text) from (failure.exception if failure else None)


def _list_facts(result: RunResult[Any]) -> list[tuple[str, str]]:
    """Of the run, and of this program, which has usually made the run."""
    start = next((event for event in result.events if isinstance(event, RunStarted)), None)
    versions = [f"mpwatch {__version__}", f"Python {platform.python_version()}"]
    versions += [f"torch {torch.__version__}"] if (torch := sys.modules.get("torch")) else []
    metrics = [f"{name} {value:g}" for report in [*result.progress.values()][:1] for name, value in report.metrics.items()]
    facts = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(start.time)) if start else "",
        "took": f"{result.elapsed:.1f} s",
        "ranks": f"{format_count(len(result), 'rank')}{f' on {start.hostname}' if start else ''}",
        "command": shlex.join(sys.argv),
        "options": start.options if start else "",
        "versions": ", ".join(versions),
        "last reports": _format_last_steps(result.progress),
        "metrics": ", ".join(metrics),
        "slow rank": str(result.slow_rank or ""),
    }
    return [(name, text) for name, text in facts.items() if text]


def _convert(values: Mapping[int, Any], convert: Callable[[Any], Any]) -> dict[int, Any]:
    """Convert each value, and leave out those whose class raises an exception."""
    converted = {}
    for rank, value in values.items():
        with suppress(*USER_ERRORS):  # from the code of the value's class
            converted[rank] = convert(value)
    return converted


def format_report(result: RunResult[Any]) -> str:
    lines = [f"  {fate}" for fate in result.fates]
    is_hang = result.root_cause is not None and result.root_cause.kind is FailureKind.HANG  # the verdict says its step
    if (steps := _format_last_steps(result.progress)) and not is_hang:
        lines.append(f"  last reports: {steps}")
    lines += [f"  {text}"] if (text := result._restart_text) else []
    lines += format_attempts(_failed_attempts(result))
    lines += [f"  before that, {result.slow_rank}"] if result.slow_rank is not None else []
    lines += [f"  {note}" for note in result.notes]
    return "\n".join([result.verdict, *_format_details(result), *lines])


def format_attempts(attempts: Iterable[Attempt]) -> list[str]:
    """For each attempt, return a line of the report that says which rank failed first, or what else ended the attempt."""
    return [f"    {_join(name, what)}" for name, what in _attempt_rows(attempts)]


def _join(name: str, text: str) -> str:
    return f"{name}: {text}" if name else text


def _format_details(result: RunResult[Any]) -> list[str]:
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


def _failed_attempts(result: RunResult[Any]) -> list[Attempt]:
    """If each rank is restarted alone, the verdict of the run already names the timeout or signal that ended attempts."""
    if not any(attempt.number for attempt in result.attempts):
        return []
    count = len(result.workers)
    return [
        attempt
        for attempt in result.attempts
        if attempt.root_cause is not None or (len(attempt.ranks) == count and attempt.reason)
    ]


def _attempt_rows(attempts: Iterable[Attempt]) -> list[tuple[str, str]]:
    rows = [(attempt.name, format_end(attempt.root_cause, attempt.reason)) for attempt in attempts]
    more = len(rows) - ATTEMPT_LINES
    if more > 0:
        rows[ATTEMPT_LINES // 2 : -ATTEMPT_LINES // 2] = [("", f"and {more} more: see .attempts")]
    return rows


def _fate_rows(result: RunResult[Any]) -> list[tuple[str, str]]:
    """Group the ranks by what happened to them; consequences of other failures come last. The verdict has the first one
    already.
    """
    root, found = result.root_cause, dict[str, tuple[str, list[int]]]()

    def is_consequence(rank: int) -> bool:
        failure = result.failures.get(rank)
        return failure is None or failure.is_secondary

    for rank in sorted(result.worker_states, key=lambda rank: (is_consequence(rank), rank)):
        if root is None or (result.failures.get(rank) is not root and rank not in root.node_ranks):
            fate = _describe_fate(result, rank)
            found.setdefault(SMALL_DIFFERENCES.sub("", fate), (fate, []))[1].append(rank)
    rows = [(format_ranks(ranks), fate if len(ranks) == 1 else _use_plural(fate)) for fate, ranks in found.values()]
    if len(rows) > FATE_LINES:
        more = format_count(len(rows) - FATE_LINES, "more group")
        rows[FATE_LINES:] = [("", f"and {more} of ranks: see .failures and .stacks")]
    return rows


def _use_plural(fate: str) -> str:
    return SINGULAR.sub(r"\1each ", VICTIM.sub(r"\1victims of rank", fate))


def _describe_fate(result: RunResult[Any], rank: int) -> str:
    failure, root = result.failures.get(rank), result.root_cause
    if failure is None:
        if result.worker_states[rank] is WorkerState.SUCCEEDED:
            return "had returned"
        return f"stopped by the watcher{format_location(result.stacks.get(rank, ''))}"
    what = describe_failure(failure).removeprefix("was ")
    if root is None:
        return what
    if failure.is_secondary and not root.is_secondary:
        return f"a victim of rank {root.rank}: {what}"
    are_comparable = root.group_rank == failure.group_rank and not result.keep_going
    if are_comparable and abs(failure.elapsed - root.elapsed) <= SAME_MOMENT:
        if _is_death(root) and not _is_death(failure):
            return f"perhaps a victim of rank {root.rank}: {what}"
        if _is_death(failure) and not _is_death(root):
            return f"{what} at the same moment, so it may have failed first"
    return what


def _is_death(failure: ProcessFailure) -> bool:
    return failure.kind in DEATHS and not failure.traceback


def _format_last_steps(progress: Mapping[int, Progress]) -> str:
    steps = {rank: (report.step, report.total) for rank, report in progress.items() if report.step is not None}
    groups = sorted(group_ranks(steps), key=lambda group: (-group[1][0], group[1][1] or 0))
    if len(groups) > STEP_GROUPS:
        return f"{format_ranks(steps)} at steps {groups[-1][1][0]} to {groups[0][1][0]}"
    return "; ".join(f"{ranks} at step {format_step(*step)}" for ranks, step in groups)

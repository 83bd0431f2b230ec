"""The words for what came of a run: a pure function of the result, called when somebody wants to read it."""

import os
import re
import signal
import sysconfig
from collections.abc import Collection, Iterable
from functools import partial
from traceback import walk_tb
from typing import Any

from mpwatch.results.model import Attempt, FailureKind, ProcessFailure, Progress, RunData, WorkerState
from mpwatch.wire.exceptions.decoder import own
from mpwatch.wire.exceptions.source_lines import cell_name

USUAL_CAUSES = {
    signal.SIGSEGV: "an invalid memory access, usually in compiled code",
    signal.SIGBUS: "a memory error, often a full /dev/shm",
    signal.SIGFPE: "an arithmetic error in compiled code",
    signal.SIGILL: "an instruction this CPU does not have",
    signal.SIGABRT: "compiled code gave up: see its last words on stderr",
    signal.SIGKILL: "not sent by mpwatch: the out-of-memory killer, or somebody's kill -9",
    signal.SIGTERM: "not sent by mpwatch: somebody's kill, or a job scheduler",
}
SUMMARIES = {
    WorkerState.SUCCEEDED: "had returned",
    WorkerState.STOPPED: "stopped by the watcher",
}
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
STACK_LINES = 24  # of the stack of a crash: a dozen frames, each with its line of source
PRINTED_LINES = 12
ATTEMPT_LINES = 30
FATE_LINES = 30  # groups of ranks; more are counted
HERE = os.path.dirname(os.path.dirname(__file__))  # the package mpwatch
LIBRARIES = (HERE, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen ")  # where no user's code is
SMALL_DIFFERENCES = re.compile(r"(?<=\]:)\d+|(?<=<)\d+(?=>)|(?<=silent for )[\d.]+")  # "peer [10.0.0.1]:4711", "host<4711>"
OURS = {  # what a rank does in our own code, by the file of the outermost frame
    "/wire/payload.py": "while it loaded its call",
    "/worker/backend.py": "while it joined its process group",
    "/worker/channel.py": "while it sent its answer",
    "/wire/": "while it made its answer",
}
TEXT_LIMIT = 500  # characters of an exception's text in a line of the report
SOURCE_LIMIT = 100  # of a line of source
MANY_SECONDS = 100  # durations of this length and more are printed without tenths
# Evidence of failures, as phrases that follow the name of the rank or what happened to it.
KEPT_PEERS_WAITING = "kept its peers waiting"
KEPT_PEERS_UNTIL_TIMEOUT = "kept its peers waiting until they timed out"
KEPT_OTHER_NODES_WAITING = "kept its peers on other nodes waiting"
EXITED_BEFORE_TEXT = "it ended before its text was made"
TEXT_DID_NOT_END = "making its text did not end"
EXITED_DURING_TEXT = "its function had raised an exception, and it ended while the exception's text was made"
NCCL_WATCHDOG = "NCCL's watchdog: a peer did not come to a collective in time"


def report(result: RunData[Any]) -> str:
    """The whole story: the verdict in the first line, then a line for each other group of ranks with the same fate."""
    groups = [f"  {line}" for line in fates_text(result)]
    restarts = [f"  {text}"] if (text := restarts_text(result)) else []
    restarts += attempts_text(failed_attempts(result))
    return "\n".join([verdict(result), *_details(result), *groups, *restarts])


def restarts_text(result: RunData[Any]) -> str:
    """How often it was tried, and why not once more; empty if there is nothing to say of that."""
    if not result.restarts:
        return f"not started again: {result.not_restarted}" if result.not_restarted else ""
    return f"started again {times_text(result.restarts)}" + (
        f", and then no more: {result.not_restarted}" if result.not_restarted else ""
    )


def times_text(count: int) -> str:
    """`once`, or `3 times`."""
    return "once" if count == 1 else f"{count} times"


def failed_attempts(result: RunData[Any]) -> list[Attempt]:
    """Those that the story of a run with restarts consists of."""
    return [attempt for attempt in result.attempts if result.restarts and _has_a_story(attempt, result)]


def _has_a_story(attempt: Attempt, result: RunData[Any]) -> bool:
    """Of its own; ranks that are watched each for itself were all ended by the same timeout or signal, say."""
    is_of_all = len(attempt.ranks) == len(result.workers)
    return attempt.root_cause is not None or (is_of_all and bool(attempt.reason))


def attempts_text(attempts: Iterable[Attempt]) -> list[str]:
    """What failed first in each of these, in a line each."""
    return [f"    {which}: {what}" if which else f"    {what}" for which, what in attempt_rows(attempts)]


def attempt_rows(attempts: Iterable[Attempt]) -> list[tuple[str, str]]:
    """Which attempt it was, and what failed first in it; of very many the first and the last, and a row without a name."""
    rows = [(_name(attempt), verdict(attempt)) for attempt in attempts]
    more = len(rows) - ATTEMPT_LINES
    if more > 0:
        rows[ATTEMPT_LINES // 2 : -ATTEMPT_LINES // 2] = [("", f"and {more} more: see .attempts")]
    return rows


def _name(attempt: Attempt) -> str:
    name = f"restart {attempt.number}" if attempt.number else "first start"
    return f"{name}, {attempt.elapsed:.1f} s"


def verdict(result: RunData[Any] | Attempt) -> str:
    """Which rank failed first, and why; or what else ended the run."""
    return result.reason if result.root_cause is None else blame(result.root_cause)


def blame(root: ProcessFailure) -> str:
    """That this is the failure that came first, and what it was."""
    if root.is_secondary:
        return f"no rank was seen to fail by itself; the first to complain of a peer: {_who(root)}: {_what(root)}"
    if root.kind is FailureKind.EXCEPTION:
        return f"{_who(root)} failed first: {_what(root)}"
    return f"{_who(root)} {_what(root)}"


def _who(failure: ProcessFailure) -> str:
    """Which rank it is; in a job of several nodes also where."""
    node = "" if failure.group_rank is None else f" on node {failure.group_rank} ({failure.hostname})"
    return f"rank {failure.rank}{node}"


def failure_text(failure: ProcessFailure) -> str:
    """Which rank failed, and what happened to it."""
    return f"{_who(failure)}: {_what(failure)}"


def fates(result: RunData[Any]) -> dict[str, list[int]]:
    """What became of the other ranks: those with the same fate together; first those that failed for themselves.

    Those that differ only in the port of the peer they lost, or in how long they were silent, are told by the words of the
    first.
    """
    found: dict[str, tuple[str, list[int]]] = {}
    for rank, state in sorted(result.worker_states.items(), key=partial(_rank_of_interest, result)):
        failure = result.failures.get(rank)
        if failure is None or failure is not result.root_cause:
            fate = _fate(result, rank, failure, state)
            found.setdefault(SMALL_DIFFERENCES.sub("", fate), (fate, []))[1].append(rank)
    return dict(found.values())


def fates_text(result: RunData[Any]) -> list[str]:
    """The same in lines, which are counted where there are too many."""
    groups = [f"{ranks_text(ranks)}: {fate}" for fate, ranks in fates(result).items()]
    if len(groups) > FATE_LINES:
        groups[FATE_LINES:] = [f"and {len(groups) - FATE_LINES} more groups of ranks: see .failures and .stacks"]
    return groups


def _rank_of_interest(result: RunData[Any], item: tuple[int, WorkerState]) -> tuple[bool, int]:
    failure = result.failures.get(item[0])
    return failure is None or failure.is_secondary, item[0]


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-2, 4-7`, however many there are."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    word = "rank" if len(runs) == 1 and runs[0][0] == runs[0][1] else "ranks"
    return f"{word} " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def timeout_text(timeout: float, late: Iterable[int], missing: Collection[int] = ()) -> str:
    """Say that the timeout expired for the ranks in `late`. Those in `missing` were not in the collective of the others."""
    absent = f", and {ranks_text(missing)} not in the collective that others waited in" if missing else ""
    return f"the run did not end within timeout={timeout:g} s: {ranks_text(late)} had not returned{absent}"


def interrupt_text(number: int) -> str:
    """Say that a signal to this process stopped the run."""
    return f"the run was stopped: this process received {signal.Signals(number).name}"


def silence_text(seconds: float, heartbeat_timeout: float | None, progress: Progress | None) -> str:
    """Say how long a rank sent no heartbeat, and which step it last reported, as a phrase that follows its name."""
    text = f"{seconds:.1f}" if seconds < MANY_SECONDS else f"{seconds:.0f}"
    step = "" if progress is None or progress.step is None else f", at step {progress.step}"
    of = f" of {progress.total}" if step and progress is not None and progress.total is not None else ""
    return f"was silent for {text} s (heartbeat_timeout={heartbeat_timeout:g}){step}{of}"


def not_ready_text(start_timeout: float) -> str:
    """Say that an interpreter took longer than `start_timeout` to start."""
    return f"its interpreter was not ready after {start_timeout:g} s"


def likely_oom_text(clue: str) -> str:
    """Say why the out-of-memory killer probably killed a rank, where there is no proof."""
    return f"likely the out-of-memory killer: {clue}"


def unloadable_value_text(rank: int) -> str:
    """Say where an exception was raised that no rank raised: the note for a return value that cannot be unpickled."""
    return f"raised here, in the caller, while the return value of rank {rank} was rebuilt"


def _details(result: RunData[Any]) -> list[str]:
    """What belongs to the verdict and is longer than a line."""
    root, lines = result.root_cause, []
    if root is not None and root.kind in (FailureKind.SIGNAL, FailureKind.LOST, FailureKind.OOM) and root.stack:
        frames = [f"  {line}" for line in root.stack.splitlines() if line.startswith(("  File ", "    "))]
        lines += ["  its Python stack, innermost frame first:", *frames[:STACK_LINES]]
    if root is not None and root.stderr:
        printed = root.stderr.rstrip().splitlines()
        what = "what it printed" if root.kind is FailureKind.START else "the end of its stderr"
        lines += [f"  {what}:", *(f"    {line}" for line in printed[-PRINTED_LINES:])]
    if root is not None and root.log_files:
        lines.append(f"  its logs: {', '.join(root.log_files.values())}")
    elif result.log_dir:
        lines.append(f"  logs: {result.log_dir}")
    if result.helpers_oom:
        lines.append(f"  the kernel's out-of-memory killer struck here, if not at a rank: {result.helpers_oom}")
    return lines


def _fate(result: RunData[Any], rank: int, failure: ProcessFailure | None, state: WorkerState) -> str:
    if failure is None:
        return SUMMARIES[state] + (where(result.stacks.get(rank, "")) if state is WorkerState.STOPPED else "")
    root = result.root_cause
    if failure.is_secondary and root is not None and not root.is_secondary:
        return f"a victim of rank {root.rank}: {_what(failure)}"
    return _what(failure)


def where(stacks: str) -> str:
    """Where the first thread of a stack is, as a phrase to follow another: ` in all_reduce (train.py:88 in step: ...)`."""
    lines = stacks.partition("\n\n")[0].splitlines()
    frames = [(frame, lines[n + 1 : n + 2]) for n, line in enumerate(lines) if (frame := FRAME.match(line))]
    if not frames:
        return f" ({lines[0]})" if len(lines) == 1 else ""
    outermost = frames[-1][0][1]
    for file, doing in OURS.items():
        if outermost.startswith(HERE + file):
            return f" {doing}"
    frame, source = frames[_first_of_user(frame[1] for frame, _ in frames)]
    inner = frames[0][0][3] if frame is not frames[0][0] else ""
    line = source[0].strip() if source and source[0].startswith("    ") else ""
    text = f": {line[:SOURCE_LIMIT]}" if line else ""
    return f"{f' in {inner}' if inner else ''} ({_base(frame[1])}:{frame[2]} in {frame[3]}{text})"


def _what(failure: ProcessFailure) -> str:
    """What happened to a rank, as a phrase that follows its name."""
    if failure.kind is FailureKind.SIGNAL:
        return _killed(failure.signal, failure.evidence)
    if failure.kind is FailureKind.OOM:
        return f"was killed by the kernel's out-of-memory killer ({failure.evidence})"
    if failure.kind is FailureKind.EXCEPTION:
        return _raised(failure)
    if failure.kind is FailureKind.START:
        return _not_started(failure)
    if failure.kind is FailureKind.HANG:
        return f"{failure.evidence or 'hung'}: still at work{where(failure.stack)}"
    if failure.kind is FailureKind.TIMEOUT:
        return f"still at work{where(failure.stack)}"
    if failure.kind is FailureKind.LOST and failure.pid is None and failure.evidence:  # with the node that it was on
        return f"was lost: {failure.evidence}"
    because = failure.evidence or (_raised(failure) if failure.exception else "")
    if failure.kind is FailureKind.EXIT:
        return f"ended with exit code {failure.exit_code} and no result" + (f" ({because})" if because else "")
    usual = "os._exit(0), os.exec*(), or its exit status was taken by somebody else"
    return f"ended without returning a result ({because or usual})"


def exit_text(code: int) -> str:
    """How a process ended, from its exit code as multiprocessing has it (negative: the signal), after "it"."""
    return _killed(-code) if code < 0 else f"ended with exit code {code}"


def _killed(number: int | None, evidence: str = "") -> str:
    try:
        name = signal.Signals(number or 0)
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {number}"
    cause = evidence or USUAL_CAUSES.get(name)
    return f"was killed by {name.name}" + (f" ({cause})" if cause else "")


def _not_started(failure: ProcessFailure) -> str:
    if failure.signal is not None:
        return f"never started: it {_killed(failure.signal, failure.evidence)}"
    if failure.evidence:
        return f"never started: {failure.evidence}"
    if failure.exception is not None:
        hint = "; a rank imports what the function needs with the caller's sys.path, from where the caller found it"
        lacks = isinstance(failure.exception, ImportError | AttributeError)
        return f"could not load the call: {_raised(failure)}{hint if lacks else ''}"
    return f"never started: its interpreter ended with exit code {failure.exit_code}"


def _raised(failure: ProcessFailure) -> str:
    """Each rank has one line here; the whole text is in the exception and its traceback."""
    if failure.exception is None:
        return "raised an exception that could not be sent" + (f" ({failure.evidence})" if failure.evidence else "")
    text = (failure.summary or summary_of(failure.exception)).strip()
    line = text.partition("\n")[0]
    return line[:TEXT_LIMIT] + (" …" if line[:TEXT_LIMIT] != text else "") + _raised_in(failure.exception)


def summary_of(error: BaseException) -> str:
    """The type and the text of an exception that was raised here."""
    try:
        text = str(error).strip()
    except BaseException as broken:  # noqa: BLE001  the class's own code, which may even exit
        text = f"<its __str__ raised {type(broken).__name__}>"
    return f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__


def _raised_in(error: BaseException) -> str:
    """The innermost frame of the user's own code; of any code, if there is none."""
    frames = [(trace.f_code.co_filename, line, trace.f_code.co_name) for trace, line in walk_tb(own(error, "__traceback__"))]
    if not frames:
        return ""
    frames.reverse()
    path, line, name = frames[_first_of_user(path for path, _, _ in frames)]
    return f" ({_base(path)}:{line} in {name})"


def _first_of_user(files: Iterable[str]) -> int:
    """Which of these frames, innermost first, is of the user's own code: rather of a file than of a string, which may be
    what a dataclass was made of. The innermost, if none is.
    """
    own_code = [
        (n, file) for n, file in enumerate(files) if not file.startswith(LIBRARIES) and "/site-packages/" not in file
    ]
    in_files = [n for n, file in own_code if not file.startswith("<")]
    return next(iter(in_files), own_code[0][0] if own_code else 0)


def _base(path: str) -> str:
    return cell_name(path) or path.rpartition("/")[2].replace("\n", "\\n")

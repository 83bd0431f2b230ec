"""The words for what came of a run: a pure function of the result, called when somebody wants to read it."""

import signal
import sysconfig
from collections.abc import Iterable
from itertools import takewhile
from traceback import walk_tb
from typing import Any

from .result import FailureKind, ProcessFailure, RunResult, WorkerState

__all__ = ["exit_text", "ranks_text", "report"]

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
CRASH_FRAMES = 12
LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen ")  # where no user's code is
TEXT_LIMIT = 500  # characters of an exception's text in a line of the report


def report(result: RunResult[Any]) -> str:
    """The whole story: the verdict in the first line, then a line for each other group of ranks with the same fate."""
    fates: dict[str, list[int]] = {}
    for rank, state in sorted(result.worker_states.items()):
        failure = result.failures.get(rank)
        if failure is None or failure is not result.root_cause:
            fates.setdefault(_fate(failure, state), []).append(rank)
    return "\n".join(
        [
            _verdict(result),
            *_crash_lines(result.root_cause),
            *(f"  {ranks_text(ranks)}: {fate}" for fate, ranks in fates.items()),
        ]
    )


def _crash_lines(root: ProcessFailure | None) -> list[str]:
    """The innermost frames of a crash; an exception's frames are in its traceback."""
    if root is None or root.kind not in (FailureKind.SIGNAL, FailureKind.LOST):
        return []
    frames = [line for line in root.traceback.splitlines() if line.startswith("  File ")]
    frames = list(takewhile(lambda line: "/mpwatch/worker/" not in line, frames))
    return ["  its Python stack, innermost frame first:", *(f"  {line}" for line in frames[:CRASH_FRAMES])] if frames else []


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


def _verdict(result: RunResult[Any]) -> str:
    root = result.root_cause
    if root is None:
        return result.reason
    if root.is_secondary:
        return f"no rank was seen to fail by itself; the first to complain of a peer: rank {root.rank}: {_what(root)}"
    if root.kind is FailureKind.EXCEPTION:
        return f"rank {root.rank} failed first: {_what(root)}"
    return f"rank {root.rank} {_what(root)}"


def _fate(failure: ProcessFailure | None, state: WorkerState) -> str:
    if failure is None:
        return SUMMARIES[state]
    return _what(failure) + (" (a consequence: it lost a peer)" if failure.is_secondary else "")


def _what(failure: ProcessFailure) -> str:
    """What happened to a rank, as a phrase that follows its name."""
    if failure.kind is FailureKind.SIGNAL:
        return _killed(failure.signal)
    if failure.kind is FailureKind.EXCEPTION:
        return _raised(failure.exception)
    if failure.kind is FailureKind.START:
        return _not_started(failure)
    if failure.kind is FailureKind.TIMEOUT:
        return "still at work"
    if failure.kind is FailureKind.EXIT:
        return f"ended with exit code {failure.exit_code} and no result" + _by(failure.exception)
    return "ended without returning a result (os._exit(0), os.exec*(), or its exit status was taken by somebody else)"


def exit_text(code: int) -> str:
    """How a process ended, from its exit code as multiprocessing has it (negative: the signal), after "it"."""
    return _killed(-code) if code < 0 else f"ended with exit code {code}"


def _killed(number: int | None) -> str:
    try:
        name = signal.Signals(number or 0)
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {number}"
    cause = USUAL_CAUSES.get(name)
    return f"was killed by {name.name}" + (f" ({cause})" if cause else "")


def _not_started(failure: ProcessFailure) -> str:
    if failure.exception is not None:
        return (
            f"could not load the call: {_raised(failure.exception)}; a rank imports what the function needs "
            "with the caller's sys.path, from where the caller found it"
        )
    if failure.signal is not None:
        return f"never started: it {_killed(failure.signal)}"
    return f"never started: its interpreter ended with exit code {failure.exit_code}; what it printed is on stderr"


def _by(error: BaseException | None) -> str:
    return f" ({_raised(error)})" if error is not None else ""


def _raised(error: BaseException | None) -> str:
    if error is None:
        return "raised an exception that could not be sent"
    text = _first_line(error)
    said = f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__
    return said + _where(error)


def _first_line(error: BaseException) -> str:
    """Each rank has one line here; the whole text is in the exception and its traceback."""
    try:
        text = str(error).strip()
    except BaseException as broken:  # noqa: BLE001  the class's own code, which may even exit
        return f"<its __str__ raised {type(broken).__name__}>"
    line = text.partition("\n")[0]
    return line[:TEXT_LIMIT] + (" …" if line[:TEXT_LIMIT] != text else "")


def _where(error: BaseException) -> str:
    """The innermost frame of the user's own code; of any code, if there is none."""
    frames = [(trace.f_code.co_filename, line, trace.f_code.co_name) for trace, line in walk_tb(error.__traceback__)]
    if not frames:
        return ""
    own = [frame for frame in frames if not frame[0].startswith(LIBRARIES) and "/site-packages/" not in frame[0]]
    path, line, name = (own or frames)[-1]
    return f" ({path.rpartition('/')[2]}:{line} in {name})"

"""Who failed first, and why: facts in, a RunResult out. Pure but for the rebuilding of exceptions and values.

That happens here and last, when no rank is left that could be kept waiting: unpickling runs code of the user's.

The rank to blame is found by class before time: a complaint that a peer has gone is secondary whatever its time, since a
rank that is about to fail often closes its connections first. Among equals the earliest counts: a rank stamps its own
report at the `except`; a death is stamped when the watcher hears of it.
"""

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ..report import ranks_text
from ..result import FailureKind, ProcessFailure, RunResult, WorkerState
from ..spec import Worker
from ..wire import exceptions
from ..wire.messages import Kind, Message
from ..wire.values import loads
from .machine import START_SECONDS, Verdict

__all__ = ["Facts", "RankFacts", "diagnose", "is_secondary"]


class Complaint(NamedTuple):
    """What an exception looks like that only says that a peer has gone."""

    type_name: str  # the end of the class's name
    text: str = ""  # a part of its text, in lower case
    raised_in: str = ""  # the end of the file that the innermost frame is in


# What libraries say when a peer has gone, read in their sources and seen in runs.
COMPLAINTS = (
    Complaint("RuntimeError", text="gloo/transport/"),  # pair.cc: closed or reset by a peer; unbound_buffer.cc: timed out
    Complaint("RuntimeError", text="connectfullmesh failed"),
    Complaint("DistNetworkError"),  # torch's TCPStore
    Complaint("DistStoreError"),
    Complaint("DistBackendError", text="remote process exited or there was a network error"),  # NCCL
    Complaint("DistBackendError", text="nccl communicator was aborted"),
    Complaint("DistBackendError", text="connection closed by remote peer"),
    Complaint("DistBackendError", text="socket timeout"),
    Complaint("EOFError", raised_in="multiprocessing/connection.py"),
    Complaint("BrokenPipeError", raised_in="multiprocessing/connection.py"),
    Complaint("ConnectionResetError", raised_in="multiprocessing/connection.py"),
)
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)


@dataclass
class RankFacts:
    """What the watcher saw of one rank."""

    worker: Worker
    pid: int | None = None
    was_ready: bool = False
    report: Message | None = None
    died_at: float | None = None
    exit_code: int | None = None
    """As multiprocessing has it, negative for a signal; None if it is not known."""
    crash: str = ""
    """The Python stack at the moment of a crash, in faulthandler's words."""
    signals_sent: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Facts:
    """What the watcher saw of a run. Times are of CLOCK_MONOTONIC, in seconds."""

    ranks: Mapping[int, RankFacts]
    hostname: str
    started_at: float
    stopped_at: float | None
    verdict: Verdict | None
    never_ready: Iterable[int] = ()
    timeout: float | None = None
    signum: int | None = None


def is_secondary(body: bytes) -> bool:
    """Whether a report is only a complaint about a peer. Looks at names and texts; builds nothing of the user's."""
    return any(_complains(link) for link in exceptions.outline(body))


def _complains(link: exceptions.Outline) -> bool:
    return any(
        link.name.endswith(complaint.type_name)
        and complaint.text in link.text.lower()
        and link.raised_in.endswith(complaint.raised_in)
        for complaint in COMPLAINTS
    )


def diagnose(facts: Facts) -> RunResult[Any]:
    """The result of a run that is over."""
    timed: dict[int, tuple[float, ProcessFailure]] = {}
    values: dict[int, Any] = {}
    for rank, seen in facts.ranks.items():
        if facts.verdict is Verdict.SUCCEEDED and _has_returned(facts, seen):
            _load_value(facts, seen, values, timed)
        elif (found := _failure_of(facts, seen)) is not None:
            timed[rank] = found
    root = min(timed.values(), key=partial(_order_of_blame, facts), default=(0.0, None))[1]
    failures = {rank: failure for rank, (_, failure) in timed.items()}
    states = {rank: _state_of(facts, seen, rank in failures) for rank, seen in facts.ranks.items()}
    return RunResult(
        state=_state_of_all(facts.verdict, failures),
        return_values=values if not failures else {},
        failures=failures,
        root_cause=None if facts.verdict is Verdict.TIMED_OUT else root,
        workers=tuple(seen.worker for seen in facts.ranks.values()),
        worker_states=states,
        reason=_reason(facts, states),
    )


def _order_of_blame(facts: Facts, found: tuple[float, ProcessFailure]) -> tuple[bool, bool, float]:
    """What came after the ranks had been told to stop is a consequence of that; then class comes before time."""
    at, failure = found
    return not _before_stop(facts, at), failure.is_secondary, at


def _load_value(
    facts: Facts, seen: RankFacts, values: dict[int, Any], timed: dict[int, tuple[float, ProcessFailure]]
) -> None:
    assert seen.report is not None
    try:
        values[seen.worker.rank] = loads(seen.report.body)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  the user's classes are rebuilt here, and may raise anything
        note = f"raised here, in the caller, while the return value of rank {seen.worker.rank} was rebuilt"
        notes = getattr(error, "__notes__", None)
        # not add_note(): a class may forbid attributes (a frozen dataclass)
        BaseException.__setattr__(error, "__notes__", [*(notes if isinstance(notes, list) else ()), note])
        at = seen.report.stamp
        timed[seen.worker.rank] = (at, _failure(facts, seen, at, FailureKind.EXCEPTION, 1, exception=error))


def _failure_of(facts: Facts, seen: RankFacts) -> tuple[float, ProcessFailure] | None:
    """When and how this rank failed by itself; None if it did not."""
    if _has_returned(facts, seen):
        return _lost_after_returning(facts, seen)
    if seen.report is not None and _before_stop(facts, seen.report.stamp):
        return _reported(facts, seen, seen.report)
    if seen.worker.rank in facts.never_ready:
        at = facts.stopped_at or facts.started_at
        late = TimeoutError(f"its interpreter was not ready after {START_SECONDS:g} s")
        return at, _failure(facts, seen, at, FailureKind.START, 1, exception=late)
    if seen.report is None and seen.died_at is not None and (_before_stop(facts, seen.died_at) or _not_our_doing(seen)):
        return seen.died_at, _died(facts, seen, seen.died_at)
    if facts.verdict is Verdict.TIMED_OUT and facts.stopped_at is not None:
        return facts.stopped_at, _failure(facts, seen, facts.stopped_at, FailureKind.TIMEOUT, 1)
    return None


def _lost_after_returning(facts: Facts, seen: RankFacts) -> tuple[float, ProcessFailure] | None:
    """A rank that had returned, and was then killed while others were still at work, and may have needed it."""
    if seen.died_at is None or facts.stopped_at is None or seen.died_at > facts.stopped_at or not seen.exit_code:
        return None
    return seen.died_at, _died(facts, seen, seen.died_at)


def _has_returned(facts: Facts, seen: RankFacts) -> bool:
    """What a function returns once it has been told to stop is no result: it may be `sys.exit(0)` in a handler."""
    report = seen.report
    return report is not None and report.kind is Kind.RETURNED and _before_stop(facts, report.stamp)


def _before_stop(facts: Facts, at: float) -> bool:
    return facts.stopped_at is None or at <= facts.stopped_at


def _not_our_doing(seen: RankFacts) -> bool:
    """Whether a rank that was being stopped died of something else: a crash, or a SIGKILL that we had not sent."""
    number = -(seen.exit_code or 0)
    return number > 0 and number not in seen.signals_sent and (number in CRASHES or number == signal.SIGKILL)


def _reported(facts: Facts, seen: RankFacts, report: Message) -> tuple[float, ProcessFailure]:
    error = exceptions.decode(report.body)
    kind, code = FailureKind.EXCEPTION, 1
    if report.kind is Kind.UNLOADED:
        kind = FailureKind.START
    elif isinstance(error, SystemExit):
        kind, code = FailureKind.EXIT, _exit_status(error.code)
    failure = _failure(
        facts,
        seen,
        report.stamp,
        kind,
        code,
        exception=error,
        traceback=exceptions.text_of(report.body),
        is_secondary=is_secondary(report.body),
    )
    return report.stamp, failure


def _exit_status(code: object) -> int:
    """What a shell would see of sys.exit(code), except that a failure never looks like a success (sys.exit(256))."""
    return (code & 0xFF) or 1 if isinstance(code, int) else 1


def _died(facts: Facts, seen: RankFacts, at: float) -> ProcessFailure:
    code = seen.exit_code
    number = -code if code is not None and code < 0 else None
    if not seen.was_ready:
        kind = FailureKind.START
    elif number is not None:
        kind = FailureKind.SIGNAL
    else:
        kind = FailureKind.EXIT if code else FailureKind.LOST
    status = 128 + number if number is not None else code or 1
    return _failure(facts, seen, at, kind, status, signal=number, traceback=seen.crash)


def _failure(facts: Facts, seen: RankFacts, at: float, kind: FailureKind, exit_code: int, **more: Any) -> ProcessFailure:
    return ProcessFailure(
        rank=seen.worker.rank,
        local_rank=seen.worker.local_rank,
        pid=seen.pid,
        hostname=facts.hostname,
        kind=kind,
        exit_code=exit_code,
        elapsed=at - facts.started_at,
        **more,
    )


def _state_of(facts: Facts, seen: RankFacts, failed: bool) -> WorkerState:
    if failed:
        return WorkerState.FAILED
    if _has_returned(facts, seen):
        return WorkerState.SUCCEEDED
    return WorkerState.STOPPED


def _state_of_all(verdict: Verdict | None, failures: Mapping[int, ProcessFailure]) -> WorkerState:
    if verdict is Verdict.INTERRUPTED:
        return WorkerState.STOPPED
    return WorkerState.SUCCEEDED if verdict is Verdict.SUCCEEDED and not failures else WorkerState.FAILED


def _reason(facts: Facts, states: Mapping[int, WorkerState]) -> str:
    if facts.verdict is Verdict.TIMED_OUT:
        late = [rank for rank, state in states.items() if state is not WorkerState.SUCCEEDED]
        return f"the run did not end within timeout={facts.timeout:g} s: {ranks_text(late)} had not returned"
    if facts.verdict is Verdict.INTERRUPTED and facts.signum is not None:
        return f"the run was stopped: this process received {signal.Signals(facts.signum).name}"
    return ""

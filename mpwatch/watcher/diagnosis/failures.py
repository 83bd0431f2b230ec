"""Builds the ProcessFailure of one rank from what the watcher observed of it. Runs in the caller's thread.

Whether the failure is the root cause, or a consequence of another failure, is decided in diagnose.py. Only an exception that
is certain to complain about a peer is marked here as secondary.
"""

import signal
from typing import Any

from mpwatch.os_support.signals import DUMP_SIGNAL
from mpwatch.results import report as texts
from mpwatch.results.model import FailureKind, ProcessFailure
from mpwatch.watcher.diagnosis.observations import AttemptObservations, RankObservations
from mpwatch.watcher.diagnosis.peer_errors import PeerErrorKind, complaint_in, complaint_of_death
from mpwatch.watcher.diagnosis.stragglers import stacks_of
from mpwatch.watcher.machine.transitions import StopReason
from mpwatch.wire.exceptions import decoder
from mpwatch.wire.messages import Message, MessageKind

TimedFailure = tuple[float, ProcessFailure]  # the time is of CLOCK_MONOTONIC, in seconds
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)


def may_be_oom_kill(observed: RankObservations) -> bool:
    """Whether a SIGKILL that the watcher did not send ended this rank."""
    return observed.exit_code == -signal.SIGKILL and signal.SIGKILL not in observed.signals_sent


def is_crash(exit_code: int | None) -> bool:
    """Whether a process ended by a signal for which faulthandler writes a stack, or by a similar signal."""
    return -(exit_code or 0) in CRASHES


def is_before_stop(attempt: AttemptObservations, at: float) -> bool:
    """Whether this time is before the watcher told the ranks to stop."""
    return attempt.stopped_at is None or at <= attempt.stopped_at


def has_returned(attempt: AttemptObservations, observed: RankObservations) -> bool:
    """Whether this rank returned in time.

    A value that comes after the stop is no result: the function may have called `sys.exit(0)` in a signal handler.
    """
    report = observed.report
    if report is None or report.kind is not MessageKind.RETURNED or not is_before_stop(attempt, report.stamp):
        return False
    # A value that was still being pickled or sent when the timeout expired is no result either.
    return (
        attempt.verdict is not StopReason.TIMED_OUT
        or observed.heard_at is None
        or is_before_stop(attempt, observed.heard_at)
    )


def find_failure(attempt: AttemptObservations, observed: RankObservations) -> TimedFailure | None:
    """Return when and how this rank failed by itself, or None if it did not fail."""
    if has_returned(attempt, observed):
        return _find_death_after_return(attempt, observed)
    if (
        observed.report is not None
        and observed.report.kind is not MessageKind.RETURNED
        and is_before_stop(attempt, observed.report.stamp)
    ):
        return _build_reported(attempt, observed, observed.report)
    if observed.worker.rank in attempt.never_ready:
        at = attempt.stopped_at or attempt.started_at
        why = texts.not_ready_text(attempt.start_timeout)
        return _build(attempt, observed, at, FailureKind.START, evidence=why, stderr=observed.printed or observed.stderr)
    if observed.report is None and observed.died_at is not None and _died_by_itself(attempt, observed, observed.died_at):
        return _build_death(attempt, observed, observed.died_at)
    if observed.failing_at is not None and is_before_stop(attempt, observed.failing_at):
        return _build_unreported_exception(attempt, observed, observed.failing_at)
    if attempt.verdict is StopReason.TIMED_OUT and attempt.stopped_at is not None:
        return _build(attempt, observed, attempt.stopped_at, FailureKind.TIMEOUT, stack=stacks_of(observed))
    return None


def build_hang(
    attempt: AttemptObservations, observed: RankObservations, at: float, evidence: str, *, is_secondary: bool = False
) -> TimedFailure:
    """Build the failure of a rank that was silent for too long, or that kept its peers waiting."""
    stack = stacks_of(observed)
    return _build(attempt, observed, at, FailureKind.HANG, stack=stack, evidence=evidence, is_secondary=is_secondary)


def build_unloadable_value(
    attempt: AttemptObservations, observed: RankObservations, at: float, error: BaseException
) -> TimedFailure:
    """Build the failure of a rank whose return value raised this exception when the caller unpickled it."""
    summary = texts.summary_of(error)
    return _build(attempt, observed, at, FailureKind.EXCEPTION, exception=error, summary=summary)


def _find_death_after_return(attempt: AttemptObservations, observed: RankObservations) -> TimedFailure | None:
    """Return the death of a rank that had returned, if other ranks were still running and may have needed it."""
    if (
        observed.died_at is None
        or attempt.stopped_at is None
        or observed.died_at > attempt.stopped_at
        or not observed.exit_code
    ):
        return None
    return _build_death(attempt, observed, observed.died_at)


def _died_by_itself(attempt: AttemptObservations, observed: RankObservations, at: float) -> bool:
    """Whether something other than the stop ended a rank. During the stop, this is a crash or a SIGKILL from elsewhere."""
    if is_before_stop(attempt, at):
        return True
    number = -(observed.exit_code or 0)
    if observed.was_asked and number == DUMP_SIGNAL:
        return False
    if not observed.signals_sent:
        return True  # the watcher was still dumping its stacks
    return number > 0 and number not in observed.signals_sent and (number in CRASHES or number == signal.SIGKILL)


def _build_reported(attempt: AttemptObservations, observed: RankObservations, report: Message) -> TimedFailure:
    try:
        error = decoder.decode(report.body, observed.details)
    except Exception:  # noqa: BLE001  unpickling runs the user's code; the first message needs none of the user's classes
        error = decoder.decode(report.body)
    kind, exit_code = FailureKind.EXCEPTION, 1
    if report.kind is MessageKind.LOAD_FAILED:
        kind = FailureKind.START
    elif issubclass(type(error), SystemExit):  # isinstance() asks the object, whose __class__ may be a property
        kind, exit_code = FailureKind.EXIT, _get_exit_status(SystemExit.__dict__["code"].__get__(error))
    return _build(
        attempt,
        observed,
        report.stamp,
        kind,
        exit_code=exit_code,
        exception=error,
        summary=decoder.summary_of(report.body),
        traceback=decoder.text_of(report.body),
        is_secondary=complaint_in(report.body) in (PeerErrorKind.CONNECTION_LOST, PeerErrorKind.PEER_TIMEOUT),
    )


def _get_exit_status(code: object) -> int:
    """Return the status a shell shows for sys.exit(code), but never 0: sys.exit(256) must not look like a success."""
    return (code & 0xFF) or 1 if isinstance(code, int) else 1


def _build_unreported_exception(attempt: AttemptObservations, observed: RankObservations, at: float) -> TimedFailure:
    """Build the failure of a rank that announced an exception, and never sent it."""
    ended = observed.exit_code is not None and -observed.exit_code not in observed.signals_sent
    why = texts.EXITED_BEFORE_TEXT if ended else texts.TEXT_DID_NOT_END
    return _build(attempt, observed, at, FailureKind.EXCEPTION, stack=stacks_of(observed), evidence=why)


def _build_death(attempt: AttemptObservations, observed: RankObservations, at: float) -> TimedFailure:
    code = observed.exit_code
    number = -code if code is not None and code < 0 else None
    if observed.oom:
        kind = FailureKind.OOM
    elif not observed.was_ready:
        kind = FailureKind.START
    elif number is not None:
        kind = FailureKind.SIGNAL
    else:
        kind = FailureKind.EXIT if code else FailureKind.LOST
    return _build(
        attempt,
        observed,
        at,
        kind,
        exit_code=128 + number if number is not None else code or 1,
        signal=number,
        stack=observed.crash,
        stderr=observed.printed or observed.stderr,
        evidence=_find_evidence(observed),
        is_secondary=complaint_of_death(code, observed.stderr) is not None,
    )


def _find_evidence(observed: RankObservations) -> str:
    if observed.failing_at is not None and observed.report is None:
        return texts.EXITED_DURING_TEXT
    if complaint_of_death(observed.exit_code, observed.stderr) is not None:
        return texts.NCCL_WATCHDOG
    return observed.oom or (texts.likely_oom_text(observed.likely_oom) if observed.likely_oom else "")


def _build(
    attempt: AttemptObservations,
    observed: RankObservations,
    at: float,
    kind: FailureKind,
    *,
    exit_code: int = 1,
    **fields: Any,
) -> TimedFailure:
    return at, ProcessFailure(
        rank=observed.worker.rank,
        local_rank=observed.worker.local_rank,
        pid=observed.pid,
        hostname=attempt.hostname,
        group_rank=observed.worker.group_rank if observed.worker.group_world_size > 1 else None,
        kind=kind,
        exit_code=exit_code,
        elapsed=at - attempt.started_at,
        log_files=dict(observed.stderr_tail.files),
        **{"stderr": observed.stderr, **fields},
    )

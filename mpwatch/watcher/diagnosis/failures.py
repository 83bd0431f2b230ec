"""Builds the ProcessFailure of one rank from what the watcher observed of the rank.

Runs in the caller's thread, except `may_be_oom_kill` and `is_crash`. A failure that is clearly an error in the communication
with a peer (peer_errors.py) is secondary; diagnose.py finds the other secondary failures, and the root cause.
"""

import signal
from dataclasses import replace
from typing import Any

from mpwatch.results.collective import CollectiveState
from mpwatch.results.failure import TEXT_LIMIT, FailureKind, ProcessFailure, add_summary, summarize_exception
from mpwatch.watcher.diagnosis.observations import AttemptObservations, RankObservations
from mpwatch.watcher.diagnosis.peer_errors import PeerErrorKind, classify_death, classify_exception
from mpwatch.watcher.diagnosis.stragglers import get_stacks_or_state
from mpwatch.watcher.machine.transitions import StopReason
from mpwatch.wire.exceptions import decoder
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from mpwatch.wire.messages import Message, MessageKind
from mpwatch.wire.resource_errors import is_resource_shortage, with_remedy

CRASH_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)


def may_be_oom_kill(observed: RankObservations) -> bool:
    return observed.exit_code == -signal.SIGKILL and signal.SIGKILL not in observed.signals_sent


def is_crash(exit_code: int | None) -> bool:
    return -(exit_code or 0) in CRASH_SIGNALS


def is_before_stop(attempt: AttemptObservations, at: float) -> bool:
    return attempt.stopped_at is None or at <= attempt.stopped_at


def has_returned(attempt: AttemptObservations, observed: RankObservations) -> bool:
    """A value counts if it came before the watcher began to stop the ranks, and within `timeout`."""
    answer = observed.answer
    if answer is None or answer.kind is not MessageKind.RETURNED:
        return False
    received_at = observed.answer_received_at if attempt.stop_reason is StopReason.TIMED_OUT else None
    return is_before_stop(attempt, max(answer.stamp, received_at or 0.0))


def find_failure(attempt: AttemptObservations, observed: RankObservations) -> ProcessFailure | None:
    answer, died_at = observed.answer, observed.died_at
    if has_returned(attempt, observed):
        # the other ranks, which are still running, may need the dead one
        is_needed = died_at is not None and attempt.stopped_at is not None and died_at <= attempt.stopped_at
        return _build_death(attempt, observed, died_at) if died_at is not None and is_needed and observed.exit_code else None
    if answer is not None and answer.kind is not MessageKind.RETURNED and is_before_stop(attempt, answer.stamp):
        return _build_reported(attempt, observed, answer)
    if observed.worker.rank in attempt.never_ready:
        at = attempt.stopped_at or attempt.run_started_at
        why = f"its interpreter was not ready after {attempt.start_timeout:g} s"
        stderr = observed.startup_output or observed.stderr
        return _build(attempt, observed, at, FailureKind.START, evidence=why, stderr=stderr)
    if answer is None and died_at is not None and _died_by_itself(attempt, observed, died_at):
        return _build_death(attempt, observed, died_at)
    if observed.raised_at is not None and is_before_stop(attempt, observed.raised_at):
        return _build_unreported_exception(attempt, observed, observed.raised_at)
    if attempt.stop_reason is StopReason.TIMED_OUT and attempt.stopped_at is not None:
        return _build(attempt, observed, attempt.stopped_at, FailureKind.TIMEOUT, stack=get_stacks_or_state(observed))
    return None


def get_death_kind(observed: RankObservations) -> PeerErrorKind | None:
    collective = observed.collective
    backend = collective.backend if collective is not None and collective.state is CollectiveState.WAITING else ""
    return classify_death(observed.exit_code, observed.stderr, observed.crash_stack, backend)


def build_hang(
    attempt: AttemptObservations, observed: RankObservations, at: float, evidence: str, *, is_secondary: bool = False
) -> ProcessFailure:
    stack = get_stacks_or_state(observed)
    return _build(attempt, observed, at, FailureKind.HANG, stack=stack, evidence=evidence, is_secondary=is_secondary)


def build_mismatch(
    attempt: AttemptObservations, observed: RankObservations, at: float, evidence: str, before: ProcessFailure | None
) -> ProcessFailure:
    """`before` is what the mismatch has caused in this rank, if anything. Its exception, exit code and stack are kept."""
    if before is None:
        return _build(attempt, observed, at, FailureKind.MISMATCH, stack=get_stacks_or_state(observed), evidence=evidence)
    return add_summary(replace(before, kind=FailureKind.MISMATCH, evidence=evidence, summary="", is_secondary=False))


def build_unloadable_value(attempt: AttemptObservations, observed: RankObservations, error: BaseException) -> ProcessFailure:
    assert observed.answer is not None  # it has returned
    plain = ExceptionEncoder(error).plain()
    return _build(
        attempt,
        observed,
        observed.answer.stamp,
        FailureKind.EXCEPTION,
        exception=error,
        summary=decoder.read_summary(plain),
        traceback=decoder.read_traceback_text(plain),
    )


def explain_unloadable_value(kind: str, error: BaseException) -> BaseException:
    explained: BaseException
    is_of_system = isinstance(error, OSError | MemoryError) or type(error) is RuntimeError  # the last one is torch's
    if is_of_system and is_resource_shortage(error):
        cls = MemoryError if isinstance(error, MemoryError) else OSError
        explained = cls(with_remedy("the return value could not be rebuilt in the caller", error))
    else:
        why = summarize_exception(error).partition("\n")[0][:TEXT_LIMIT]
        text = f"its return value cannot be rebuilt in the caller: it is of type {kind} ({why}); return plain data instead"
        explained = TypeError(text)
    explained.__cause__ = error
    return explained


def _died_by_itself(attempt: AttemptObservations, observed: RankObservations, at: float) -> bool:
    """Return False if the watcher caused the death, or may have: some schedulers send a signal to the ranks, too."""
    if is_before_stop(attempt, at):
        return True
    number = -(observed.exit_code or 0)
    is_cancelled = attempt.stop_reason is StopReason.CANCELLED_BY_JOB and attempt.signum is not None
    if not (observed.signals_sent or is_cancelled or attempt.stop_reason is StopReason.INTERRUPTED):
        return True  # the watcher was still reading stacks, and had not sent SIGTERM
    return number > 0 and number not in observed.signals_sent and (number in CRASH_SIGNALS or number == signal.SIGKILL)


def _build_reported(attempt: AttemptObservations, observed: RankObservations, answer: Message) -> ProcessFailure:
    try:
        error = decoder.decode_exception(answer.body, observed.details, observed.local_variables)
    except Exception:  # noqa: BLE001  unpickling runs user code; the answer alone can be decoded without the user's classes
        error = decoder.decode_exception(answer.body)
    kind, exit_code = FailureKind.EXCEPTION, 1
    if answer.kind is MessageKind.LOAD_FAILED:
        kind = FailureKind.START
    elif issubclass(type(error), SystemExit):  # not isinstance(), which reads __class__, and that may be the user's property
        kind = FailureKind.EXIT
        if isinstance(code := SystemExit.__dict__["code"].__get__(error), int):
            exit_code = (code & 0xFF) or 1
    return _build(
        attempt,
        observed,
        answer.stamp,
        kind,
        exit_code=exit_code,
        exception=error,
        summary=decoder.read_summary(answer.body),
        traceback=decoder.read_traceback_text(answer.body),
        is_secondary=classify_exception(answer.body) in (PeerErrorKind.CONNECTION_LOST, PeerErrorKind.PEER_TIMEOUT),
    )


def _build_unreported_exception(attempt: AttemptObservations, observed: RankObservations, at: float) -> ProcessFailure:
    """The rank has announced an exception (message FAILING), but not sent it."""
    why = "making the text of the exception did not end in time"
    if observed.exit_code is not None and -observed.exit_code not in observed.signals_sent:
        why = "the rank ended before the text of the exception was made"
    return _build(attempt, observed, at, FailureKind.EXCEPTION, stack=get_stacks_or_state(observed), evidence=why)


def _build_death(attempt: AttemptObservations, observed: RankObservations, at: float) -> ProcessFailure:
    code = observed.exit_code
    number = -code if code is not None and code < 0 else None
    if observed.oom_proof:
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
        stack=observed.crash_stack,
        stderr=observed.startup_output or observed.stderr,
        evidence=_find_evidence(observed),
        is_secondary=get_death_kind(observed) is not None,
    )


def _find_evidence(observed: RankObservations) -> str:
    if observed.raised_at is not None and observed.answer is None:
        return "its function had raised an exception, and the rank ended while the exception's text was made"
    if (peer_error := get_death_kind(observed)) is PeerErrorKind.OTHER_SIZE:
        return "gloo ended it: a peer sent more data than it expected, so tensors or splits differ between the ranks"
    if peer_error is not None:
        return "NCCL's watchdog: a peer did not come to a collective in time"
    if not observed.was_ready and observed.exit_code is not None and observed.exit_code >= 0:
        return f"its interpreter ended with exit code {observed.exit_code}"
    return observed.oom_proof


def _build(
    attempt: AttemptObservations,
    observed: RankObservations,
    at: float,
    kind: FailureKind,
    *,
    exit_code: int = 1,
    **fields: Any,
) -> ProcessFailure:
    failure = ProcessFailure(
        rank=observed.worker.rank,
        local_rank=observed.worker.local_rank,
        pid=observed.pid,
        hostname=attempt.hostname,
        group_rank=observed.worker.group_rank if observed.worker.group_world_size > 1 else None,
        kind=kind,
        exit_code=exit_code,
        elapsed=at - attempt.run_started_at,
        log_files=dict(observed.stderr_tail.log_files),
        collective=observed.collective,
        **{"stderr": observed.stderr, **fields},
    )
    return add_summary(failure)

"""Who failed first, and why: facts in, a RunResult out. Pure but for the rebuilding of exceptions and values, and the source
lines of stacks.

That happens here and last, when no rank is left that could be kept waiting: unpickling runs code of the user's.

The rank to blame is found by class before time: a complaint that a peer has gone is secondary whatever its time, since a
rank that is about to fail often closes its connections first. Among equals the earliest counts: a rank stamps its own
report at the `except`; for deaths see order.py. If ranks only complain that a peer has not come, it is one that has not.
"""

import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..os_support.signals import DUMP_SIGNAL
from ..result import FailureKind, ProcessFailure, RunResult, WorkerState
from ..wire import exceptions
from ..wire.messages import Kind, Message
from ..wire.values import load
from ..wording import ranks_text, summary_of, timeout_text
from .facts import Facts, RankFacts
from .hangs import away, culprits, culprits_of_silence, is_waiting, stacks_of
from .signatures import Complaint, complaint_in, complaint_of_death
from .states import Verdict

__all__ = ["absent", "diagnose", "is_crash", "is_suspect", "lacking_a_peer", "maybe_victims"]

MANY_SECONDS = 100  # are told without tenths
WAITED_FOR = "kept its peers waiting"
WAITED_FOR_ELSEWHERE = "kept its peers on other nodes waiting"
Failures = dict[int, tuple[float, ProcessFailure]]  # by rank, with their times
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)
# The kernel closes a process's connections before it says that the process has ended: 0.2 to 4 ms were seen, and more on a
# machine that is busy. So much later than what it led to may a death be heard of.
DEATH_LAG_SECONDS = 0.1


def diagnose(facts: Facts) -> RunResult[Any]:
    """The result of a run that is over."""
    timed: Failures = {}
    values: dict[int, Any] = {}
    for rank, seen in facts.ranks.items():
        if facts.verdict is Verdict.SUCCEEDED and _has_returned(facts, seen):
            _load_value(facts, seen, values, timed)
        elif (found := _failure_of(facts, seen)) is not None:
            timed[rank] = found
    timed |= _victims(facts, timed)
    timed |= _hung(facts, timed)
    root = min(timed.values(), key=partial(_order_of_blame, facts), default=(0.0, None))[1]
    failures = {rank: failure for rank, (_, failure) in sorted(timed.items())}
    states = {rank: _state_of(facts, seen, rank in failures) for rank, seen in facts.ranks.items()}
    return RunResult(
        state=_state_of_all(facts.verdict, failures),
        return_values=values if not failures else {},
        failures=failures,
        root_cause=None if facts.verdict is Verdict.TIMED_OUT else root,
        workers=tuple(seen.worker for seen in facts.ranks.values()),
        worker_states=states,
        progress={rank: told for rank, seen in facts.ranks.items() if (told := seen.progress(facts.started_at)) is not None},
        stacks={rank: text for rank, seen in facts.ranks.items() if (text := stacks_of(seen))},
        reason=_reason(facts, timed, states),
        helpers_oom=facts.helpers_oom if failures else "",
        log_dir=facts.log_dir,
    )


def lacking_a_peer(facts: Facts) -> set[int]:
    """The ranks that complain of one that has not come, or were silent while they waited. To be asked before the reports are
    forgotten.
    """
    waited = {rank for rank in facts.silent if is_waiting(facts.ranks[rank])}
    return waited | {rank for rank in facts.ranks if _complaint_of(facts, rank) is Complaint.LATE}


def maybe_victims(facts: Facts) -> set[int]:
    """The ranks that have lost a connection, maybe one to a peer. To be asked before the reports are forgotten."""
    return {rank for rank in facts.ranks if _complaint_of(facts, rank) is Complaint.MAYBE}


def absent(facts: Facts, result: RunResult[Any]) -> list[ProcessFailure]:
    """Of the ranks that did not fail: those that have, should ranks elsewhere have waited for them in vain, since they were
    doing something else when all were stopped.
    """
    at = facts.stopped_at
    if at is None:
        return []
    at_work = {
        rank: seen
        for rank, seen in facts.ranks.items()
        if rank not in result.failures and seen.was_ready and not _has_returned(facts, seen)
    }
    return [_hang(facts, rank, at, WAITED_FOR_ELSEWHERE)[1] for rank in sorted(away(at_work))]


def is_suspect(seen: RankFacts) -> bool:
    """Whether this rank was killed by a SIGKILL that the watcher did not send."""
    return seen.exit_code == -signal.SIGKILL and signal.SIGKILL not in seen.signals_sent


def is_crash(exit_code: int | None) -> bool:
    """Whether a process ended by a signal that faulthandler writes a stack for, or one like it."""
    return -(exit_code or 0) in CRASHES


def _order_of_blame(facts: Facts, found: tuple[float, ProcessFailure]) -> tuple[bool, bool, float]:
    """What came after the ranks had been told to stop is a consequence of that; then class comes before time."""
    at, failure = found
    return not _before_stop(facts, at - _lag(failure)), failure.is_secondary, at


def _lag(failure: ProcessFailure) -> float:
    return 0.0 if _has_words(failure) else DEATH_LAG_SECONDS


def _has_words(failure: ProcessFailure) -> bool:
    """Whether the rank said itself what happened, and did not just die."""
    return failure.exception is not None or failure.kind in (FailureKind.EXCEPTION, FailureKind.TIMEOUT)


def _victims(facts: Facts, timed: Failures) -> Failures:
    """Ranks whose exception may be a complaint about a peer, and is one since there is a peer to complain of."""
    complaints = {rank: _complaint_of(facts, rank) for rank in timed}
    deaths = [at for at, failure in timed.values() if not _has_words(failure)]
    causes = [at for rank, (at, _) in timed.items() if complaints[rank] in (None, Complaint.HINT)]
    found: Failures = {}
    for rank, (at, failure) in timed.items():
        if complaints[rank] is Complaint.MAYBE:
            is_victim = bool(deaths) or any(cause < at for cause in causes)
        else:
            is_victim = complaints[rank] is Complaint.HINT and any(death - DEATH_LAG_SECONDS <= at for death in deaths)
        if is_victim:
            found[rank] = (at, replace(failure, is_secondary=True))
    return found


def _complaint_of(facts: Facts, rank: int) -> Complaint | None:
    seen = facts.ranks[rank]
    if seen.report is None:
        return complaint_of_death(seen.exit_code, seen.stderr)
    return complaint_in(seen.report.body) if seen.report.kind is not Kind.RETURNED else None


def _hung(facts: Facts, timed: Failures) -> Failures:
    """Those who were silent for too long, or kept the others waiting until these gave up."""
    at = facts.stopped_at
    if at is None:
        return {}
    at_work = _at_work(facts, timed)
    if facts.silent:
        return _silent(facts, at_work)
    complaints = {_complaint_of(facts, rank) for rank in timed}
    if Complaint.LATE in complaints and all(failure.is_secondary for _, failure in timed.values()):
        return {rank: _hang(facts, rank, at, f"{WAITED_FOR} until they timed out") for rank in away(at_work)}
    return {}


def _at_work(facts: Facts, timed: Failures) -> dict[int, RankFacts]:
    """Those who were at work when the run was stopped."""
    return {rank: seen for rank, seen in facts.ranks.items() if _was_at_work(facts, timed, rank)}


def _was_at_work(facts: Facts, timed: Failures, rank: int) -> bool:
    """Or was silent, and that was why the run was stopped, even if it has returned meanwhile."""
    if rank in timed and timed[rank][1].kind is not FailureKind.TIMEOUT:
        return False
    return rank in facts.silent or (facts.ranks[rank].was_ready and not _has_returned(facts, facts.ranks[rank]))


def _silent(facts: Facts, at_work: Mapping[int, RankFacts]) -> Failures:
    """Each with the time of its last beat. Who waits for another one is its victim, even if that one did beat."""
    silent = set(facts.silent.keys() & at_work.keys())
    to_blame = culprits_of_silence(at_work, silent) or silent
    return {
        rank: _hang(facts, rank, facts.silent[rank], _silence(facts, rank), is_secondary=rank not in to_blame)
        for rank in silent
    } | {rank: _hang(facts, rank, facts.stopped_at or 0.0, WAITED_FOR) for rank in to_blame - silent}


def _silence(facts: Facts, rank: int) -> str:
    assert facts.stopped_at is not None
    seconds = facts.stopped_at - facts.silent[rank]
    text = f"{seconds:.1f}" if seconds < MANY_SECONDS else f"{seconds:.0f}"
    progress = facts.ranks[rank].progress(facts.started_at)
    step = "" if progress is None or progress.step is None else f", at step {progress.step}"
    of = f" of {progress.total}" if step and progress is not None and progress.total is not None else ""
    return f"was silent for {text} s (heartbeat_timeout={facts.heartbeat_timeout:g}){step}{of}"


def _hang(facts: Facts, rank: int, at: float, why: str, *, is_secondary: bool = False) -> tuple[float, ProcessFailure]:
    seen = facts.ranks[rank]
    stack = stacks_of(seen)
    return at, _failure(facts, seen, at, FailureKind.HANG, 1, stack=stack, evidence=why, is_secondary=is_secondary)


def _load_value(facts: Facts, seen: RankFacts, values: dict[int, Any], timed: Failures) -> None:
    assert seen.report is not None
    body, file = seen.report.body, seen.report.file
    try:
        if isinstance(file, OSError):
            raise file
        values[seen.worker.rank] = load(body if file is None else file)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  the user's classes are rebuilt here, and may raise anything
        note = f"raised here, in the caller, while the return value of rank {seen.worker.rank} was rebuilt"
        exceptions.annotate(error, note)
        at = seen.report.stamp
        failure = _failure(facts, seen, at, FailureKind.EXCEPTION, 1, exception=error, summary=summary_of(error))
        timed[seen.worker.rank] = (at, failure)


def _failure_of(facts: Facts, seen: RankFacts) -> tuple[float, ProcessFailure] | None:
    """When and how this rank failed by itself; None if it did not."""
    if _has_returned(facts, seen):
        return _lost_after_returning(facts, seen)
    if seen.report is not None and seen.report.kind is not Kind.RETURNED and _before_stop(facts, seen.report.stamp):
        return _reported(facts, seen, seen.report)
    if seen.worker.rank in facts.never_ready:
        at = facts.stopped_at or facts.started_at
        why = f"its interpreter was not ready after {facts.start_timeout:g} s"
        return at, _failure(facts, seen, at, FailureKind.START, 1, evidence=why, stderr=seen.printed or seen.stderr)
    if seen.report is None and seen.died_at is not None and (_before_stop(facts, seen.died_at) or _not_our_doing(seen)):
        return seen.died_at, _died(facts, seen, seen.died_at)
    if seen.failing_at is not None and _before_stop(facts, seen.failing_at):
        return seen.failing_at, _untold(facts, seen, seen.failing_at)
    if facts.verdict is Verdict.TIMED_OUT and facts.stopped_at is not None:
        at = facts.stopped_at
        return at, _failure(facts, seen, at, FailureKind.TIMEOUT, 1, stack=stacks_of(seen))
    return None


def _lost_after_returning(facts: Facts, seen: RankFacts) -> tuple[float, ProcessFailure] | None:
    """A rank that had returned, and was then killed while others were still at work, and may have needed it."""
    if seen.died_at is None or facts.stopped_at is None or seen.died_at > facts.stopped_at or not seen.exit_code:
        return None
    return seen.died_at, _died(facts, seen, seen.died_at)


def _has_returned(facts: Facts, seen: RankFacts) -> bool:
    """What a function returns once it has been told to stop is no result: it may be `sys.exit(0)` in a handler."""
    report = seen.report
    if report is None or report.kind is not Kind.RETURNED or not _before_stop(facts, report.stamp):
        return False
    # nor is one that was still being packed, or on its way, when time was up
    return facts.verdict is not Verdict.TIMED_OUT or seen.heard_at is None or _before_stop(facts, seen.heard_at)


def _before_stop(facts: Facts, at: float) -> bool:
    return facts.stopped_at is None or at <= facts.stopped_at


def _not_our_doing(seen: RankFacts) -> bool:
    """Whether a rank that was being stopped died of something else: a crash, or a SIGKILL that we had not sent."""
    number = -(seen.exit_code or 0)
    if seen.was_asked and number == DUMP_SIGNAL:
        return False
    if not seen.signals_sent:
        return True  # it was still being looked at
    return number > 0 and number not in seen.signals_sent and (number in CRASHES or number == signal.SIGKILL)


def _reported(facts: Facts, seen: RankFacts, report: Message) -> tuple[float, ProcessFailure]:
    try:
        error = exceptions.decode(report.body, seen.details)
    except Exception:  # noqa: BLE001  it worked in the rank; what was told first needs none of its classes
        error = exceptions.decode(report.body)
    kind, code = FailureKind.EXCEPTION, 1
    if report.kind is Kind.UNLOADED:
        kind = FailureKind.START
    elif issubclass(type(error), SystemExit):  # isinstance() asks the object, which may have its own answer
        kind, code = FailureKind.EXIT, _exit_status(SystemExit.__dict__["code"].__get__(error))
    failure = _failure(
        facts,
        seen,
        report.stamp,
        kind,
        code,
        exception=error,
        summary=exceptions.summary_of(report.body),
        traceback=exceptions.text_of(report.body),
        is_secondary=complaint_in(report.body) in (Complaint.GONE, Complaint.LATE),
    )
    return report.stamp, failure


def _exit_status(code: object) -> int:
    """What a shell would see of sys.exit(code), except that a failure never looks like a success (sys.exit(256))."""
    return (code & 0xFF) or 1 if isinstance(code, int) else 1


def _untold(facts: Facts, seen: RankFacts, at: float) -> ProcessFailure:
    """It said that its function had raised, and then nothing more until it was killed."""
    ended = seen.exit_code is not None and -seen.exit_code not in seen.signals_sent
    why = "it ended before its text was made" if ended else "making its text did not end"
    return _failure(facts, seen, at, FailureKind.EXCEPTION, 1, stack=stacks_of(seen), evidence=why)


def _died(facts: Facts, seen: RankFacts, at: float) -> ProcessFailure:
    code = seen.exit_code
    number = -code if code is not None and code < 0 else None
    if seen.oom:
        kind = FailureKind.OOM
    elif not seen.was_ready:
        kind = FailureKind.START
    elif number is not None:
        kind = FailureKind.SIGNAL
    else:
        kind = FailureKind.EXIT if code else FailureKind.LOST
    return _failure(
        facts,
        seen,
        at,
        kind,
        128 + number if number is not None else code or 1,
        signal=number,
        stack=seen.crash,
        stderr=seen.printed or seen.stderr,
        evidence=_evidence(seen),
        is_secondary=complaint_of_death(code, seen.stderr) is not None,
    )


def _evidence(seen: RankFacts) -> str:
    if seen.failing_at is not None and seen.report is None:
        return "its function had raised an exception, and it ended while the exception's text was made"
    if complaint_of_death(seen.exit_code, seen.stderr) is not None:
        return "NCCL's watchdog: a peer did not come to a collective in time"
    return seen.oom or (f"likely the out-of-memory killer: {seen.likely_oom}" if seen.likely_oom else "")


def _failure(facts: Facts, seen: RankFacts, at: float, kind: FailureKind, exit_code: int, **more: Any) -> ProcessFailure:
    return ProcessFailure(
        rank=seen.worker.rank,
        local_rank=seen.worker.local_rank,
        pid=seen.pid,
        hostname=facts.hostname,
        group_rank=seen.worker.group_rank if seen.worker.group_world_size > 1 else None,
        kind=kind,
        exit_code=exit_code,
        elapsed=at - facts.started_at,
        log_files=dict(seen.words.files),
        **{"stderr": seen.stderr, **more},
    )


def _state_of(facts: Facts, seen: RankFacts, failed: bool) -> WorkerState:
    if failed:
        return WorkerState.FAILED
    if _has_returned(facts, seen):
        return WorkerState.SUCCEEDED
    return WorkerState.STOPPED


def _state_of_all(verdict: Verdict | None, failures: Mapping[int, ProcessFailure]) -> WorkerState:
    if verdict is Verdict.INTERRUPTED or (verdict is Verdict.CALLED_OFF and not failures):
        return WorkerState.STOPPED
    return WorkerState.SUCCEEDED if verdict is Verdict.SUCCEEDED and not failures else WorkerState.FAILED


def _reason(facts: Facts, timed: Failures, states: Mapping[int, WorkerState]) -> str:
    if facts.verdict is Verdict.TIMED_OUT:
        late = [rank for rank, state in states.items() if state is not WorkerState.SUCCEEDED]
        # Nobody is blamed: in the midst of sound work, too, some are at a collective before others.
        missing = culprits(_at_work(facts, timed))
        but = f", and {ranks_text(missing)} not in the collective that others waited in" if missing else ""
        return timeout_text(facts.timeout or 0.0, late) + but
    if facts.verdict is Verdict.INTERRUPTED and facts.signum is not None:
        return f"the run was stopped: this process received {signal.Signals(facts.signum).name}"
    return ""

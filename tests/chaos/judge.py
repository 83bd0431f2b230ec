"""Compare a run with its history: a history and the evidence of its run in, a list of errors out. Pure.

Only what mpwatch promises is checked. If two things happened too close together to tell which came first, both orders are
accepted.
"""

from chaos.acts import CHAIN_LENGTH, expected_value
from chaos.harness import Evidence
from chaos.histories import ACTIONS, DEATH_REPORT_DELAY, ENDS_THE_RUN, Fate, Fault, History, RankPlan

TIE = 0.02  # seconds between two failures, in which either may be first: a rank that is not running cannot fail
REPORT_SECONDS = 0.5  # a failure this long before a fault has been reported
EDGE = 0.05  # seconds: a fault this close to the end of the run may affect the host program instead of the run
STOP_SECONDS = 1.0  # what mpwatch promises in addition to the grace period
SLACK = 1.5  # seconds for a loaded machine
STATUSES = {  # exit statuses of the host program
    Fault.INTERRUPT: -2,
    Fault.INTERRUPT_TWICE: -2,
    Fault.TERMINATE: -15,
    Fault.TERMINATE_HANDLED: 143,
    Fault.HANG_UP: -1,
}
OUTCOMES = {-2: "KeyboardInterrupt", 143: "SystemExit"}  # of host programs that print a report before they exit so


def find_errors(history: History, evidence: Evidence) -> list[str]:
    if evidence.stack_dump:
        return [f"it hangs: {evidence.stack_dump}", *find_leftovers(history, evidence)]
    errors = [] if history.fault is Fault.KILL else _check_outcome(history, evidence)
    return errors + find_leftovers(history, evidence) + _check_duration(history, evidence)


def find_leftovers(history: History, evidence: Evidence) -> list[str]:
    """Report the processes and files that are left, and the changes to the state of the host program."""
    errors = [f"left 1 s after the end: {process}" for process in evidence.left_later]
    if history.fault is not Fault.KILL:
        errors += [f"left at the end: {process}" for process in evidence.left_at_exit]
        errors += [f"left in the folder for temporary files: {file}" for file in evidence.left_files]
    changed = evidence.report["changed"] if evidence.report else {}
    return errors + [f"{name} changed from {before} to {after}" for name, (before, after) in changed.items()]


def seconds_over_limit(history: History, evidence: Evidence) -> float | None:
    """Return how many seconds after its deadline the run ended: negative if before, None if it has no deadline."""
    if history.fault is Fault.KILL:
        return evidence.cleaned_up_at - evidence.injected_at[0] - STOP_SECONDS
    deadline = _deadline(history, evidence)
    return None if deadline is None else (evidence.ended_at or evidence.exited_at) - deadline


def _check_duration(history: History, evidence: Evidence) -> list[str]:
    over = seconds_over_limit(history, evidence)
    is_late = over is not None and over > SLACK and history.fault is not Fault.KILL  # `left_later` shows that one
    return [f"it took {over:.2f} s longer than allowed"] if is_late else []


def _deadline(history: History, evidence: Evidence) -> float | None:
    """Return when the run must have ended. The time counts from the first event that ends the run."""
    reasons = list(_failure_times(history, evidence).values())
    grace, faults = history.grace_period, _ending_fault_times(history, evidence)
    if history.fault is Fault.INTERRUPT_TWICE and len(faults) > 1:
        return max(faults[0], min(faults[1], faults[0] + grace)) + STOP_SECONDS  # the second SIGINT ends the grace period
    if faults:
        reasons.append(faults[0])
    exit_wait = 0.0
    if not reasons and len(evidence.acted_at) == len(history.plans):
        reasons.append(max(evidence.acted_at.values()))
        exit_wait = grace if any(plan.fate is Fate.NEVER_EXITS for plan in history.plans) else 0.0
    if not reasons:
        return None
    start = min(reasons)
    if history.fault is Fault.SUSPEND and len(evidence.injected_at) > 1 and start < evidence.injected_at[1]:
        start = evidence.injected_at[1]  # before that the watcher was suspended
    return start + exit_wait + grace + STOP_SECONDS


def _failure_times(history: History, evidence: Evidence) -> dict[int, float]:
    """Return the ranks that have failed, and when."""
    return {rank: at for rank, at in evidence.acted_at.items() if history.plans[rank].fate is Fate.FAILS}


def _ending_fault_times(history: History, evidence: Evidence) -> list[float]:
    """Return the times of the faults that end the run."""
    if history.fault not in ENDS_THE_RUN:
        return []
    times = [evidence.timer_fired_at] if history.fault is Fault.TIMER else evidence.injected_at
    return [at for at in times if at is not None and (evidence.ended_at is None or at <= evidence.ended_at)]


def _check_outcome(history: History, evidence: Evidence) -> list[str]:
    faults, report = _ending_fault_times(history, evidence), evidence.report
    if report is None:
        return _check_without_report(history, evidence)
    fails = any(plan.fate is Fate.FAILS for plan in history.plans)
    outcome_without_fault = "RunFailedError" if fails else "returned"
    fault_came_too_late = (
        evidence.ended_at is not None
        and bool(faults)
        and faults[0] > evidence.ended_at - EDGE
        and report["outcome"] == outcome_without_fault
    )
    if faults and not fault_came_too_late:
        return _check_after_fault(history, evidence, report, faults[0])
    if fails:
        return _check_failure(history, evidence, report) + _check_status(history, evidence, 1)
    return _check_success(history, evidence, report)


def _check_without_report(history: History, evidence: Evidence) -> list[str]:
    """Check a program without a report: a signal has ended it, or has interrupted it while it printed the report."""
    status = STATUSES.get(history.fault) if history.fault else None
    if status in (None, 143) and not (status == 143 and _is_near_start_or_end(evidence)):
        return [f"the program ended with status {evidence.status} and printed no report: {evidence.stderr[-3000:]}"]
    if status == -2 and not _is_near_start_or_end(evidence):
        return [f"an interrupted program printed no report: {evidence.stderr[-3000:]}"]
    return _check_status(history, evidence, status)


def _is_near_start_or_end(evidence: Evidence) -> bool:
    """Whether a fault was injected before the call of `run` or after its end."""
    called, ended = evidence.called_at, evidence.ended_at
    return any(
        called is None or at < called + EDGE or (ended is not None and at > ended - EDGE) for at in evidence.injected_at
    )


def _check_after_fault(history: History, evidence: Evidence, report: dict, fault_at: float) -> list[str]:
    """Check that the signal has its usual effect, and that earlier failures are reported."""
    if history.fault is Fault.TIMER:
        # the handler may raise inside the user's code, too: then its exception is a cause of the outcome
        return [] if "TimerError" in report["chain"] else [f"the timer's exception was lost: {report['chain']}"]
    status = STATUSES[history.fault]
    expected = OUTCOMES.get(status)
    if report["outcome"] != expected:
        return [
            f"after {history.fault.name}, run ended with {report['outcome']} and not with {expected}: {report.get('text')}"
        ]
    errors = _check_status(history, evidence, status)
    if "root" in report:
        return errors + _check_failure(history, evidence, report)
    early = sorted(rank for rank, at in _failure_times(history, evidence).items() if at + REPORT_SECONDS < fault_at)
    return errors + [f"ranks {early} had failed long before the signal, and are not reported"] * bool(early)


def _check_status(history: History, evidence: Evidence, expected: int | None) -> list[str]:
    accepted = {expected}
    if history.fault is not None and _is_near_start_or_end(evidence):  # the interpreter removes handlers as it exits
        accepted |= {STATUSES.get(history.fault), *(-number for number in history.fault.signals)}
    if evidence.status in accepted:
        return []
    return [f"the program ended with status {evidence.status} and not {expected}: {evidence.stderr[-3000:]}"]


def _check_success(history: History, evidence: Evidence, report: dict) -> list[str]:
    if report["outcome"] != "returned":
        return [f"no rank failed, but run ended with {report['outcome']}: {report.get('text')}"]
    expected = [None if plan.action == "exits_with_0" else expected_value(rank) for rank, plan in enumerate(history.plans)]
    errors = [] if report["values"] == expected else [f"the values are {report['values']}"]
    if set(report["states"].values()) != {"SUCCEEDED"}:
        errors.append(f"not all ranks are reported as succeeded: {report['states']}")
    return errors + _check_status(history, evidence, 0)


def _check_failure(history: History, evidence: Evidence, report: dict) -> list[str]:
    if "failures" not in report:
        return [f"a rank failed, but run ended with {report['outcome']}: {report.get('text') or report.get('values')}"]
    failure_times = _failure_times(history, evidence)
    errors = []
    for rank, failure in report["failures"].items():
        if rank not in failure_times:
            errors.append(f"rank {rank} is reported as failed, but did not fail: {failure}")
        else:
            errors += _check_failure_fields(rank, history.plans[rank], failure)
    root = report["root"]
    accepted = _possible_root_causes(history, failure_times)
    if root not in accepted:
        times = _describe_times(history, evidence)
        return [*errors, f"rank {root} is the root cause, and not one of {accepted}: {report['verdict']}; {times}"]
    if report["exit_code"] != history.plans[root].exit_code:
        errors.append(f"the exit code is {report['exit_code']}")
    if history.plans[root].action == "raises_a_deep_chain" and report["chain_length"] != CHAIN_LENGTH:
        errors.append(f"the chain of rank {root} has {report['chain_length']} exceptions and not {CHAIN_LENGTH}")
    return errors + _check_states(history, report)


def _check_failure_fields(rank: int, plan: RankPlan, failure: dict) -> list[str]:
    action = ACTIONS[plan.action]
    expected = {"kind": action.kind, "exit_code": plan.exit_code, "exception": action.exception, "is_secondary": False}
    return [
        f"rank {rank} {plan.action}: {name} is {failure[name]}" for name, value in expected.items() if failure[name] != value
    ]


def _check_states(history: History, report: dict) -> list[str]:
    errors = []
    for rank, state in report["states"].items():
        returns = history.plans[rank].fate in (Fate.RETURNS, Fate.NEVER_EXITS)
        accepted = ("FAILED",) if rank in report["failures"] else ("STOPPED", "SUCCEEDED") if returns else ("STOPPED",)
        if state not in accepted:
            errors.append(f"rank {rank} {history.plans[rank].action} has the state {state}")
    return errors


def _possible_root_causes(history: History, failure_times: dict[int, float]) -> list[int]:
    """Return the ranks that may be the root cause: no other rank has certainly failed before them."""
    return [
        rank
        for rank in failure_times
        if not any(_failed_before(history, failure_times, other, rank) for other in failure_times)
    ]


def _failed_before(history: History, failure_times: dict[int, float], one: int, other: int) -> bool:
    died = {rank: ACTIONS[history.plans[rank].action].has_no_exception for rank in (one, other)}
    margin = DEATH_REPORT_DELAY if died[one] and not died[other] else TIE
    return failure_times[one] + margin < failure_times[other]


def _describe_times(history: History, evidence: Evidence) -> str:
    first = min(evidence.acted_at.values())
    return ", ".join(
        f"rank {rank} {history.plans[rank].action} {1000 * (at - first):.1f} ms"
        for rank, at in sorted(evidence.acted_at.items())
    )

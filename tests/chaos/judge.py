"""Compare a run with its history: a history and the evidence of its run in, a list of errors out. Pure.

Only what mpwatch promises is checked. If two things happened too close together to tell which came first, both orders are
accepted.
"""

from chaos.harness import Evidence
from chaos.histories import ENDS_THE_RUN, Fate, Fault, History
from support.acts import CHAIN_LENGTH

TIE = 0.1  # seconds between two failures, in which either may be first: a rank that is not running cannot fail
REPORT_SECONDS = 0.5  # a failure this long before a fault has been reported
EDGE = 0.05  # seconds: a fault this close to the begin or the end of the run may affect the host program instead of the run
STOP_SECONDS = 1.0  # what mpwatch promises in addition to the grace period
SLACK = 1.5  # seconds for a loaded machine
OUTCOMES = {  # how the host program reports a run that the fault has ended (None: not at all), and its exit status
    Fault.INTERRUPT: ("KeyboardInterrupt", -2),
    Fault.INTERRUPT_TWICE: ("KeyboardInterrupt", -2),
    Fault.TERMINATE: (None, -15),
    Fault.TERMINATE_HANDLED: ("SystemExit", 143),
    Fault.HANG_UP: (None, -1),
    Fault.TIMER: ("TimerError", 1),
}


def find_errors(history: History, evidence: Evidence) -> list[str]:
    if evidence.stack_dump:
        return [f"it hangs: {evidence.stack_dump}", *find_leftovers(history, evidence)]
    errors = [] if history.fault is Fault.KILL else _check_outcome(history, evidence)
    over = seconds_over_limit(history, evidence)
    if over is not None and over > SLACK and history.fault is not Fault.KILL:  # `left_later` shows that one
        errors.append(f"it took {over:.2f} s longer than allowed")
    return errors + find_leftovers(history, evidence)


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


def _deadline(history: History, evidence: Evidence) -> float | None:
    """Return when the run must have ended. The time counts from the first event that ends the run."""
    reasons = list(_failure_times(history, evidence).values())
    grace, faults = history.grace_period, _ending_fault_times(history, evidence)
    if history.fault is Fault.INTERRUPT_TWICE and len(faults) > 1:
        return max(faults[0], min(faults[1], faults[0] + grace)) + STOP_SECONDS  # the second SIGINT ends the grace period
    reasons += faults[:1]
    exit_wait = 0.0
    if not reasons and len(evidence.acted_at) == len(history.plans):
        reasons.append(max(evidence.acted_at.values()))
        exit_wait = grace if any(plan.promised.fate is Fate.NEVER_EXITS for plan in history.plans) else 0.0
    if not reasons:
        return None
    start = min(reasons)
    if history.fault is Fault.SUSPEND and len(evidence.injected_at) > 1:
        start = max(start, evidence.injected_at[1])  # before that the watcher was suspended
    return start + exit_wait + grace + STOP_SECONDS


def _failure_times(history: History, evidence: Evidence) -> dict[int, float]:
    return {rank: at for rank, at in evidence.acted_at.items() if history.plans[rank].promised.fate is Fate.FAILS}


def _ending_fault_times(history: History, evidence: Evidence) -> list[float]:
    if history.fault not in ENDS_THE_RUN:
        return []
    times = [evidence.timer_fired_at] if history.fault is Fault.TIMER else evidence.injected_at
    return [at for at in times if at is not None and (evidence.ended_at is None or at <= evidence.ended_at)]


def _check_outcome(history: History, evidence: Evidence) -> list[str]:
    report, faults = evidence.report or {}, _ending_fault_times(history, evidence)
    fails = any(plan.promised.fate is Fate.FAILS for plan in history.plans)
    usual = ("RunFailedError", 1) if fails else ("returned", 0)
    expected = OUTCOMES[history.fault] if faults else usual
    accepted = {expected}
    if _is_near_start_or_end(history, evidence):
        names, statuses = zip(expected, usual, OUTCOMES.get(history.fault, usual), strict=True)
        signals = [-number for number in history.fault.signals]
        accepted = {(name, status) for name in (None, *names) for status in (*statuses, *signals)}
    # the handler of a timer may raise inside the user's code, too: then its exception is a cause of the outcome
    outcome = "TimerError" if "TimerError" in report.get("chain", ()) else report.get("outcome")
    if (outcome, evidence.status) not in accepted:
        text = report.get("text") or evidence.stderr[-3000:]
        return [f"the run and the program ended with {outcome} and {evidence.status}, and not with {expected}: {text}"]
    if "failures" in report:
        return _check_failure(history, evidence, report)
    if outcome == "returned":
        return _check_success(history, report)
    early = [rank for rank, at in _failure_times(history, evidence).items() if faults and at + REPORT_SECONDS < faults[0]]
    is_missed = early and outcome in ("KeyboardInterrupt", "SystemExit")
    return [f"ranks {early} had failed long before the signal, and are not reported"] if is_missed else []


def _is_near_start_or_end(history: History, evidence: Evidence) -> bool:
    """The interpreter of the host program removes its handlers as it exits."""
    called, ended = evidence.called_at, evidence.ended_at
    times = [*evidence.injected_at, *([] if evidence.timer_fired_at is None else [evidence.timer_fired_at])]
    is_near = [called is None or at < called + EDGE or (ended is not None and at > ended - EDGE) for at in times]
    return history.fault is not None and any(is_near)


def _check_success(history: History, report: dict) -> list[str]:
    expected = [
        None if plan.action == "exits_with_0" else f"the value of rank {rank}" for rank, plan in enumerate(history.plans)
    ]
    errors = [] if report["values"] == expected else [f"the values are {report['values']}"]
    if set(report["states"].values()) != {"SUCCEEDED"}:
        errors.append(f"not all ranks are reported as succeeded: {report['states']}")
    return errors


def _check_failure(history: History, evidence: Evidence, report: dict) -> list[str]:
    times, root, errors = _failure_times(history, evidence), report["root"], []
    for rank, failure in report["failures"].items():
        action = history.plans[rank].promised
        expected = {"kind": action.kind, "exit_code": action.exit_code, "exception": action.exception, "is_secondary": False}
        if rank not in times:
            errors.append(f"rank {rank} is reported as failed, but did not fail: {failure}")
        elif failure != expected:
            errors.append(f"rank {rank} {history.plans[rank].action} is reported as {failure}")
    accepted = [rank for rank in times if times[rank] <= min(times.values()) + TIE]
    if root not in accepted:
        at = sorted(evidence.acted_at.items())
        return [*errors, f"rank {root} is the root cause, and not one of {accepted}: {report['verdict']}; {at}"]
    if report["exit_code"] != history.plans[root].promised.exit_code:
        errors.append(f"the exit code is {report['exit_code']}")
    if history.plans[root].action == "raises_a_deep_chain" and report["chain_length"] != CHAIN_LENGTH:
        errors.append(f"the chain of rank {root} has {report['chain_length']} exceptions and not {CHAIN_LENGTH}")
    return errors + _check_states(history, report)


def _check_states(history: History, report: dict) -> list[str]:
    errors = []
    for rank, state in report["states"].items():
        returns = history.plans[rank].promised.fate in (Fate.RETURNS, Fate.NEVER_EXITS)
        accepted = ("FAILED",) if rank in report["failures"] else ("STOPPED", "SUCCEEDED") if returns else ("STOPPED",)
        if state not in accepted:
            errors.append(f"rank {rank} {history.plans[rank].action} has the state {state}")
    return errors

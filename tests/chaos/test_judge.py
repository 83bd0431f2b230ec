"""judge.py accepts correct runs, and finds the error of each wrong one."""

from dataclasses import replace

import pytest

from chaos.harness import Evidence
from chaos.histories import Fault, History, RankPlan
from chaos.judge import find_errors

RAISED = {"kind": "EXCEPTION", "exit_code": 1, "exception": "ValueError", "is_secondary": False}
DIED = {"kind": "SIGNAL", "exit_code": 137, "exception": "", "is_secondary": False}
FAILS = History(1, 0.5, (RankPlan("waits"), RankPlan("raises"), RankPlan("is_killed"), RankPlan("returns")))
SUCCEEDS = History(1, 0.5, (RankPlan("returns"), RankPlan("exits_with_0")))


def failed_report(root=1, failures=None, states=None, **more):
    failures = failures or {root: RAISED if root == 1 else DIED}
    states = states or {rank: "FAILED" if rank in failures else "STOPPED" for rank in range(4)}
    known = {"outcome": "RunFailedError", "chain": ["RunFailedError"], "chain_length": 1, "verdict": "", "changed": {}}
    exit_code = failures[root]["exit_code"] if root in failures else None
    return {**known, "root": root, "exit_code": exit_code, "failures": failures, "states": states, **more}


def evidence(report, acted_at=None, **more):
    fields = {"status": 1, "called_at": 9.0, "ended_at": 10.5, "exited_at": 10.6, "cleaned_up_at": 10.6}
    return Evidence(report=report, acted_at=acted_at or {0: 9.9, 1: 10.0}, **{**fields, **more})


def with_fault(fault):
    return replace(FAILS, fault=fault, fault_at=0.1)


INTERRUPTED, TERMINATED, KILLED = map(with_fault, (Fault.INTERRUPT, Fault.TERMINATE, Fault.KILL))
SUCCEEDED = {"outcome": "returned", "states": {0: "SUCCEEDED"}, "changed": {}, "values": ["the value of rank 0", None]}
RIGHT = [
    (FAILS, evidence(failed_report())),
    (FAILS, evidence(failed_report(2), {1: 10.0, 2: 10.09})),  # a tie
    (SUCCEEDS, evidence(SUCCEEDED, status=0)),
    (INTERRUPTED, evidence(failed_report(outcome="KeyboardInterrupt"), injected_at=[10.2], status=-2)),
    (TERMINATED, evidence(None, injected_at=[10.2], status=-15, ended_at=None)),
]
UNREPORTED = evidence({"outcome": "KeyboardInterrupt", "changed": {}}, {1: 9.5}, injected_at=[10.2], status=-2)
WRONG = [
    ("rank 1 is the root cause, and not", FAILS, evidence(failed_report(1), {1: 10.2, 2: 10.0})),
    ("rank 0 is reported as failed", FAILS, evidence(failed_report(failures={0: RAISED, 1: RAISED}))),
    ("rank 1 raises is reported as", FAILS, evidence(failed_report(failures={1: RAISED | {"kind": "EXIT"}}))),
    ("the exit code is 3", FAILS, evidence(failed_report(exit_code=3))),
    ("rank 0 waits has the state SUCCEEDED", FAILS, evidence(failed_report(states={0: "SUCCEEDED"}))),
    ("ended with returned and 1", FAILS, evidence(SUCCEEDED)),
    ("ended with RunFailedError and 1", SUCCEEDS, evidence(failed_report())),
    ("it took 2.00 s longer than allowed", FAILS, evidence(failed_report(), ended_at=13.5)),
    ("left at the end: 77", FAILS, evidence(failed_report(), left_at_exit=["77"])),
    ("left 1 s after the end: 77", KILLED, evidence(None, injected_at=[10.2], left_later=["77"])),
    ("environment changed from a to b", FAILS, evidence(failed_report(changed={"environment": ["a", "b"]}))),
    ("it hangs", FAILS, evidence(None, stack_dump="in poll")),
    ("ended with None and 1", FAILS, evidence(None)),
    ("and not with (None, -15)", TERMINATED, evidence(None, injected_at=[10.2])),
    ("had failed long before the signal", INTERRUPTED, UNREPORTED),
    ("not with ('TimerError', 1)", with_fault(Fault.TIMER), evidence(failed_report(), timer_fired_at=10.2)),
]


@pytest.mark.parametrize(("history", "evidence"), RIGHT)
def test_no_errors_are_found_in_a_correct_run(history, evidence):
    assert find_errors(history, evidence) == []


@pytest.mark.parametrize(("expected", "history", "evidence"), WRONG, ids=[expected for expected, *_ in WRONG])
def test_the_error_of_a_wrong_run_is_found(expected, history, evidence):
    assert any(expected in error for error in find_errors(history, evidence))

"""The judge of the histories is not blind: it lets a right run pass, and says what is wrong with each wrong one."""

from dataclasses import replace

import pytest
from acts import value_of
from harness import Evidence
from histories import Blow, History, Part, Strike
from judge import complaints_about

TOLD = {"kind": "EXCEPTION", "exit_code": 1, "exception": "ValueError", "is_secondary": False}
DIED = {"kind": "SIGNAL", "exit_code": 137, "exception": "", "is_secondary": False}
FAILS = History(1, 0.5, (Part("waits"), Part("raises"), Part("is_killed"), Part("returns")), None)
SUCCEEDS = History(1, 0.5, (Part("returns"), Part("exits_well")), None)


def failed(root=1, failures=None, states=None, **more):
    failures = {root: TOLD if root == 1 else DIED} if failures is None else failures
    states = states or {rank: "FAILED" if rank in failures else "STOPPED" for rank in range(4)}
    return {
        "outcome": "RunFailedError",
        "chain": ["RunFailedError", "ValueError"],
        "changed": {},
        "root": root,
        "verdict": "",
        "exit_code": 1 if root == 1 else 137,
        "links": 1,
        "failures": failures,
        "states": states,
        **more,
    }


def seen(said, ranks=None, **more):
    facts = {"status": 1, "began": 9.0, "ended": 10.5, "exited": 10.6, "cleared": 10.6}
    return Evidence(said=said, ranks=ranks or {0: 9.9, 1: 10.0}, **{**facts, **more})


RIGHT = [
    (FAILS, seen(failed())),
    (FAILS, seen(failed(), {1: 10.0, 2: 10.01})),
    (FAILS, seen(failed(2), {1: 10.0, 2: 10.01})),  # a tie
    (FAILS, seen(failed(1), {1: 10.05, 2: 10.0})),  # a death is heard of later than words
    (
        SUCCEEDS,
        seen({"outcome": "returned", "values": [value_of(0), None], "states": {0: "SUCCEEDED"}, "changed": {}}, status=0),
    ),
    (
        replace(FAILS, strike=Strike(Blow.INTERRUPT, 0.1, 0.0)),
        seen(failed(outcome="KeyboardInterrupt"), struck=[10.2], status=-2),
    ),
    (replace(FAILS, strike=Strike(Blow.TERMINATE, 0.1, 0.0)), seen(None, struck=[10.2], status=-15, ended=None)),
]
WRONG = [
    ("rank 2 is blamed", FAILS, seen(failed(2), {1: 10.0, 2: 10.05})),
    ("rank 1 is blamed", FAILS, seen(failed(1), {1: 10.2, 2: 10.0})),
    ("rank 0 is said to have failed", FAILS, seen(failed(failures={0: TOLD, 1: TOLD}))),
    ("rank 1 raises: kind is EXIT", FAILS, seen(failed(failures={1: TOLD | {"kind": "EXIT"}}))),
    ("rank 1 raises: is_secondary is True", FAILS, seen(failed(failures={1: TOLD | {"is_secondary": True}}))),
    ("the exit code is 3", FAILS, seen(failed(exit_code=3))),
    ("rank 0 waits is said to be SUCCEEDED", FAILS, seen(failed(states={0: "SUCCEEDED"}))),
    ("a rank failed, and yet", FAILS, seen({"outcome": "returned", "values": [], "changed": {}})),
    ("nobody failed, and yet", SUCCEEDS, seen(failed())),
    ("it took 2.00 s longer than it may", FAILS, seen(failed(), ended=13.5)),
    ("left at the end: 77", FAILS, seen(failed(), left_at_once=["77"])),
    (
        "left 1 s after the end: 77",
        replace(FAILS, strike=Strike(Blow.KILL, 0.1, 0.0)),
        seen(None, struck=[10.2], left=["77"]),
    ),
    ("environment changed from a to b", FAILS, seen(failed(changed={"environment": ["a", "b"]}))),
    ("it hangs", FAILS, seen(None, dump="in poll")),
    ("said nothing", FAILS, seen(None)),
    ("ended with status 1 and not -15", replace(FAILS, strike=Strike(Blow.TERMINATE, 0.1, 0.0)), seen(None, struck=[10.2])),
    (
        "had failed long before the signal",
        replace(FAILS, strike=Strike(Blow.INTERRUPT, 0.1, 0.0)),
        seen({"outcome": "KeyboardInterrupt", "changed": {}}, {1: 9.5}, struck=[10.2], status=-2),
    ),
    (
        "the timer's exception was lost",
        replace(FAILS, strike=Strike(Blow.ALARM, 0.1, 0.0)),
        seen(failed(), rang=10.2),
    ),
]


@pytest.mark.parametrize(("history", "evidence"), RIGHT)
def test_a_right_run_passes(history, evidence):
    assert complaints_about(history, evidence) == []


@pytest.mark.parametrize(("complaint", "history", "evidence"), WRONG, ids=[complaint for complaint, *_ in WRONG])
def test_a_wrong_run_does_not(complaint, history, evidence):
    assert any(complaint in said for said in complaints_about(history, evidence))

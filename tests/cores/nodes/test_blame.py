"""What the nodes of a job report about an attempt in, who failed first and what all nodes do next out."""

from dataclasses import replace

import pytest

from mpwatch import FailureKind, ProcessFailure, RestartPolicy
from mpwatch.nodes.failure_codec import decode_failure, encode_failure
from mpwatch.nodes.frames import MAX_BYTES
from mpwatch.nodes.job_decision import JobAttempt
from mpwatch.nodes.job_verdict import make_records
from mpwatch.nodes.messages import AttemptOutcome, AttemptReport, NextStep, NodeInfo, RankRecord, encode_message
from mpwatch.results.collective import Collective, CollectiveState
from mpwatch.results.failure import add_summary
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.restarts.restart_budget import RestartBudget

ONCE, AGAIN = RestartPolicy(0), RestartPolicy(1)
DONE, FAILED, RESTART = NextStep.DONE, NextStep.FAILED, NextStep.RESTART

OWN, OTHER_OWN = {"rank": 0, "is_secondary": False}, {"rank": 1, "is_secondary": False}
VICTIM, MISSING = {"rank": 0, "is_secondary": True}, {"rank": 1, "is_secondary": False}


def report(node, outcome, *failures, **details):
    """Return the number of the node, and its report."""
    return node, AttemptReport(0, AttemptOutcome[outcome], failures=failures, **details)


def decide(*reports, policy=ONCE, sizes=None, host=None, lost_nodes=(), newcomers=0, min_nodes=None, stop_cause="", **facts):
    """Decide about an attempt of nodes with one rank each, unless `sizes` has other numbers."""
    reports, lost = dict(reports), dict(lost_nodes)
    nodes, sizes = range(len(reports.keys() | lost.keys())), sizes or {}
    infos = [
        NodeInfo("job", f"host{node}", "", 1, sizes.get(node, 1), "default", None, node == host, 10.0, 600.0, None, {})
        for node in nodes
    ]
    failed = [node for node, of_node in reports.items() if of_node.outcome is AttemptOutcome.FAILED]
    attempt = JobAttempt(infos=infos, failure_order=failed, reports=reports, lost=lost, **facts)
    least = len(nodes) if min_nodes is None else min_nodes
    return attempt.decide(policy, RestartBudget(policy), min_nodes=least, newcomers=newcomers, stop_cause=stop_cause)


OK0, OK1 = report(0, "SUCCEEDED"), report(1, "SUCCEEDED")
STOPPED1 = report(1, "STOPPED")
OWN0, OWN1 = report(0, "FAILED", OWN), report(1, "FAILED", OTHER_OWN)
RESET0 = report(0, "FAILED", OWN, may_be_victim=True)  # it has lost a connection
SILENT0 = report(0, "FAILED", OWN, waited_for_other_nodes=True)
WAITED0 = report(0, "FAILED", VICTIM, waited_for_other_nodes=True)
VICTIM0 = report(0, "FAILED", VICTIM)
AWAY1 = report(1, "STOPPED", missing_ranks=(MISSING,))
STOPPED_FIRST = {"was_stopped_for_newcomers": True, "newcomers": 1}


BLAME = {
    # the reports, what else is known: the rank that is blamed, the next step
    "all have succeeded": ([OK0, OK1], {}, -1, DONE),
    "one rank has failed": ([OWN0, STOPPED1], {}, 0, FAILED),
    "a victim was first": ([VICTIM0, OWN1], {}, 1, FAILED),
    "a rank that may be a victim was first": ([RESET0, OWN1], {}, 1, FAILED),
    "a rank that may be a victim is alone": ([RESET0, STOPPED1], {}, 0, FAILED),
    "a rank of another node was waited for": ([WAITED0, AWAY1], {}, 1, FAILED),
    "nobody has waited when connections broke": ([VICTIM0, AWAY1], {}, 0, FAILED),
    "a silent rank that had waited for a missing one": ([SILENT0, AWAY1], {}, 1, FAILED),
    "a silent rank that had waited for nobody": ([SILENT0, STOPPED1], {}, 0, FAILED),
    "a silent rank that had waited for a lost node": ([SILENT0], {"lost_nodes": {1: "gone"}}, 1, FAILED),
    "an own failure beside a lost node": ([OWN0], {"lost_nodes": {1: "gone"}}, 0, FAILED),
    "enough nodes remain": ([STOPPED1], {"lost_nodes": {0: "gone"}, "min_nodes": 1}, 0, RESTART),
    "stopped for a newcomer, with a victim": ([VICTIM0, STOPPED1], STOPPED_FIRST, -1, RESTART),
    "stopped for a newcomer, while ranks waited": ([WAITED0, AWAY1], STOPPED_FIRST, -1, RESTART),
    "stopped for a newcomer, with an own failure": ([OWN0, STOPPED1], STOPPED_FIRST, 0, FAILED),
}


@pytest.mark.parametrize(("reports", "facts", "blamed", "next_step"), BLAME.values(), ids=BLAME)
def test_the_rank_that_failed_first_is_blamed(reports, facts, blamed, next_step):
    decision = decide(*reports, **facts)
    assert (decision.root_cause_rank, decision.next_step, decision.is_restart_counted) == (blamed, next_step, False)
    if decision.failures and blamed >= 0 and not facts.get("lost_nodes"):
        assert decision.failures[0]["rank"] == blamed


BROKEN, UNMADE = "node 0 (host0): KeyError: of retry_if", "node 0 (host0): ValueError: of env"
BROKEN0 = report(0, "ABORTED", OWN, reason="KeyError: of retry_if")
UNMADE0 = report(0, "ABORTED", reason="ValueError: of env")
TIMED_OUT = [report(0, "TIMED_OUT", reason="timeout: rank 0 had not returned"), report(1, "STOPPED", unfinished=(1,))]
LATE_RANKS = "node 0 (host0): timeout: rank 0 had not returned; on other nodes rank 1 had not returned"
HOST_LOST = {"lost_nodes": {1: "gone"}, "min_nodes": 1, "host": 1}
NO_HOST = "the coordinator ran on node 1 (host1), and the others cannot go on without it"
STOP, STOP_CAUSE = "a stop was requested (SIGUSR1)", {"stop_cause": "SIGUSR1"}


@pytest.mark.parametrize(
    ("reports", "facts", "blamed", "reason", "no_restart_reason"),
    [
        ([BROKEN0, STOPPED1], {}, 0, BROKEN, BROKEN),
        ([UNMADE0, STOPPED1], {}, -1, UNMADE, ""),
        (TIMED_OUT, {}, -1, LATE_RANKS, ""),
        ([OK0], HOST_LOST, 1, f"node 1 (host1) was lost: gone; {NO_HOST}", NO_HOST),
        ([OWN0, STOPPED1], STOP_CAUSE, 0, "", STOP),
        ([STOPPED1], {"lost_nodes": {0: "gone"}, "min_nodes": 1, **STOP_CAUSE}, 0, None, STOP),
    ],
)
def test_the_reason_why_a_job_ends_without_a_restart_is_named(reports, facts, blamed, reason, no_restart_reason):
    decision = decide(*reports, **{"policy": AGAIN, **facts})
    assert (decision.next_step, decision.root_cause_rank, decision.is_restart_counted) == (FAILED, blamed, False)
    assert decision.reason == reason or reason is None
    assert decision.no_restart_reason == no_restart_reason


@pytest.mark.parametrize(
    ("reports", "facts", "next_step", "left", "is_counted"),
    [
        ([OWN0, STOPPED1], {}, RESTART, 0, True),
        ([OWN0, STOPPED1], {"newcomers": 1}, RESTART, 0, True),
        ([OK0], {"lost_nodes": {1: "gone"}}, RESTART, 0, True),
        ([OK0], {"lost_nodes": {1: "gone"}, "min_nodes": 1}, RESTART, 1, False),
        ([VICTIM0, STOPPED1], STOPPED_FIRST, RESTART, 1, False),
    ],
)
def test_a_restart_is_counted_unless_nodes_come_or_enough_remain(reports, facts, next_step, left, is_counted):
    decision = decide(*reports, policy=AGAIN, **facts)
    assert (decision.next_step, decision.restarts_left, decision.is_restart_counted) == (next_step, left, is_counted)


def test_the_policy_is_asked_about_the_rank_that_is_blamed():
    """If `retry_if` is a function, its answer about the victim counts: it has seen no other failure."""
    hangs, others = (RestartPolicy(1, retry_if=[kind]) for kind in (FailureKind.HANG, FailureKind.EXCEPTION))
    by_function = RestartPolicy(1, retry_if=lambda _: False)
    refused = 0, replace(WAITED0[1], no_restart_reason="it is not wanted")
    assert decide(refused, AWAY1, policy=hangs).next_step is RESTART
    assert decide(WAITED0, AWAY1, policy=others).no_restart_reason
    assert decide(refused, AWAY1, policy=by_function).no_restart_reason == "it is not wanted"


def test_a_decision_with_many_long_failures_fits_into_a_message():
    n = 64
    long = [report(node, "FAILED", {"rank": node, "is_secondary": node != 7, "text": "x" * 60_000}) for node in range(n)]
    decision = decide(*long)
    assert len(encode_message(decision)) < MAX_BYTES
    assert decision.root_cause_rank == decision.failures[0]["rank"] == 7
    assert decision.failures_omitted == n - len(decision.failures)


# --- collectives of all nodes: ranks 0 and 1 on node 0, rank 2 on node 1


def make_record(rank, name, sequence=1, *, elements=16, state=CollectiveState.WAITING):
    sizes = {"input_shapes": ((elements,),), "input_dtypes": ("float32",)}
    call = Collective(name=name, sequence=sequence, group="default", ranks=(0, 1, 2), state=state, seconds=60.0, **sizes)
    return RankRecord(rank, False, RankCollectives(collectives=(call,), torch_rank=rank).to_json(), 100 + rank)


def encode(rank, **facts):
    known = {"local_rank": rank, "pid": 100 + rank, "hostname": "host0", "group_rank": 0, "exit_code": 134}
    return encode_failure(add_summary(ProcessFailure(rank=rank, **known | facts)))


ABORTED = encode(0, kind=FailureKind.SIGNAL, signal=6)
CRASHED = encode(0, kind=FailureKind.SIGNAL, signal=11)
HUNG = encode(2, kind=FailureKind.HANG, stack="where it was")
REDUCING = [make_record(rank, "all_reduce") for rank in (0, 1)]
REDUCING_AGAIN = [make_record(rank, "all_reduce", 2) for rank in (0, 1)]
ODD = [make_record(2, "all_reduce", elements=17)]
LATE = [make_record(2, "broadcast", state=CollectiveState.COMPLETED)]
RETURNED = [replace(LATE[0], has_returned=True)]


def decide_on_collectives(failure, first, second, **facts):
    of_first = report(0, "FAILED", failure, waited_for_other_nodes=failure is VICTIM, collectives=tuple(first))
    missing = {"missing_ranks": (HUNG,)} if second is LATE else {}
    return decide(of_first, report(1, "STOPPED", collectives=tuple(second), **missing), sizes={0: 2}, **facts)


def test_stacks_of_ranks_leave_room_for_the_collectives_of_many():
    answers = {rank: RankCollectives(stack='  File "train.py", line 1 in f\n' * 50, torch_rank=rank) for rank in range(100)}
    assert len(make_records(answers, (), {})) == 100


@pytest.mark.parametrize(
    ("failure", "first", "second", "kind", "summary"),
    [
        (ABORTED, REDUCING, ODD, "MISMATCH", "called all_reduce #1 with float32[17], ranks 0-1 with float32[16]"),
        (VICTIM, REDUCING_AGAIN, RETURNED, "MISMATCH", "has returned, but ranks 0-1 wait for it in all_reduce #2 "),
        (VICTIM, REDUCING_AGAIN, LATE, "HANG", "has not joined all_reduce #2 "),
    ],
    ids=["another collective", "returned", "late"],
)
def test_a_rank_whose_collectives_do_not_fit_those_of_other_nodes_is_blamed(failure, first, second, kind, summary):
    """Gloo aborts a rank that is not to blame."""
    decision = decide_on_collectives(failure, first, second)
    blamed = decode_failure(decision.failures[0])
    assert (decision.next_step, decision.root_cause_rank, blamed.rank) == (FAILED, 2, 2)
    assert (blamed.kind, blamed.is_secondary) == (FailureKind[kind], False)
    assert blamed.summary.startswith(summary)
    assert blamed.stack == ("where it was" if second is LATE else "")
    if second is ODD:
        assert (blamed.local_rank, blamed.pid, blamed.group_rank, blamed.hostname) == (0, 102, 1, "host1")
    assert all(failure["is_secondary"] for failure in decision.failures[1:])


@pytest.mark.parametrize(("failure", "facts"), [(CRASHED, {}), (ABORTED, {"lost_nodes": {2: "silent"}})])
def test_a_failure_of_its_own_comes_before_a_mismatch(failure, facts):
    decision = decide_on_collectives(failure, REDUCING, ODD, **facts)
    assert (decision.root_cause_rank, decision.failures[0]) == (0, failure)

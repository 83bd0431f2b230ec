"""Simulated jobs with any faults at any time. Hypothesis searches for a history that breaks a guarantee."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cores.nodes.simulation import TIMEOUT, SimulatedJob
from mpwatch.nodes.messages import NO_ATTEMPT, Dismissed, NextStep
from mpwatch.nodes.node_machine import NodeMachine, NodeStage

AT_ONCE = 1.0  # seconds, for a few messages
NODES, WORK = 4, 40.0
MESSAGES_OF_A_FAILURE = 10  # for each node: failing, stop, report, decision and start, each written and read

TIMES = st.floats(0.0, 90.0, allow_nan=False).map(lambda seconds: round(seconds, 1))
NODE = st.integers(0, NODES - 1)
SEEDS = st.integers(0, 3)
FAILURE, KILL, LEAVE, REQUEST = (
    st.tuples(st.just(kind), TIMES, NODE) for kind in ("fail_rank", "kill", "leave", "request_stop")
)
FAULTS = st.one_of(
    *(FAILURE, FAILURE, KILL, LEAVE, REQUEST),
    st.tuples(st.just("join"), TIMES, st.integers(10, 12)),
    st.tuples(st.just("suspend"), TIMES, NODE, st.sampled_from([2.0, 9.0, 11.0, 12.0, 14.0, 16.0, 25.0, 40.0])),
    st.tuples(st.just("cut"), TIMES, NODE, st.sampled_from([2.0, 11.0, 14.0, 20.0, 40.0])),
    st.tuples(st.just("env_seconds"), TIMES, NODE, st.sampled_from([1.0, 10.0, 20.0])),
    st.tuples(st.just("has_failing_env"), TIMES, NODE, st.just(True)),
)


def cause(job, fault):
    kind, _, number, *more = fault
    if kind == "join":
        job.add_node(number)
    elif kind in ("env_seconds", "has_failing_env"):
        setattr(job.nodes[number], kind, *more)
    elif kind in ("kill", "suspend", "cut"):
        getattr(job.nodes[number], kind)(*more)
    else:  # the node itself does it, so not while it is suspended
        job.nodes[number].after(0.0, getattr(job.nodes[number], kind))


def run_history(least, max_restarts, faults, seed):
    job = SimulatedJob(NODES, nnodes=(least, NODES), max_restarts=max_restarts, work=WORK, seed=seed)
    for fault in faults:
        job.after(fault[1], lambda fault=fault: cause(job, fault))
    return job.run()


@settings(max_examples=200)
@given(st.integers(1, NODES), st.integers(0, 2), st.lists(FAULTS, max_size=7), SEEDS)
@example(1, 0, [("suspend", 1.0, 0, 16.0), ("env_seconds", 0.0, 0, 1.0)], 0)
@example(1, 0, [("suspend", 0.0, 0, 25.0), ("cut", 0.0, 0, 20.0)], 0)
@example(4, 0, [("kill", 0.0, 1), ("suspend", 0.0, 0, 16.0)], 0)
@example(1, 0, [*(("leave", 0.0, node) for node in (0, 1, 3)), ("join", 2.0, 10), ("suspend", 2.0, 2, 16.0)], 0)
def test_no_history_breaks_a_guarantee(least, max_restarts, faults, seed):
    job = run_history(least, max_restarts, faults, seed)
    assert job.is_over(), "a node waits without limit"
    nodes = [node for node in job.alive() if not node.is_out and node.decision.attempt != NO_ATTEMPT]
    lost = {lost.hostname for decision in job.decisions for lost in decision.lost_nodes}  # after a request, they end alone
    decisions = [node.decision for node in nodes if node.name not in lost or node.decision in job.decisions]
    assert len({(each.next_step, each.restarts_left, each.root_cause_rank, each.attempt) for each in decisions}) <= 1
    assert sum(bool(decision.failures) for decision in job.decisions if not decision.ends_job) <= max_restarts
    decided = [decision.attempt for decision in job.decisions]
    assert len(decided) == len(set(decided)), "two decisions about one attempt"
    assert not job.overlaps, "ranks of two rounds run at the same time"


@settings(max_examples=50)
@given(TIMES, st.integers(1, NODES), st.integers(0, 2), st.lists(FAILURE, max_size=3), SEEDS)
def test_no_node_waits_for_others_if_all_leave(at, least, max_restarts, failures, seed):
    job = run_history(least, max_restarts, [*failures, *(("leave", at, node) for node in range(NODES))], seed)
    assert job.is_over()
    assert job.now < at + AT_ONCE


@settings(max_examples=50)
@given(st.lists(st.tuples(st.just("suspend"), TIMES, NODE, st.floats(0.1, TIMEOUT / 3)), max_size=5), SEEDS)
def test_nodes_that_are_silent_for_a_short_time_cost_no_attempt(faults, seed):
    job = run_history(NODES, 0, faults, seed)
    assert {(node.decision.next_step, node.decision.attempt) for node in job.nodes.values()} == {(NextStep.DONE, 0)}


REQUESTS = st.lists(st.tuples(st.just("request_stop"), st.floats(2.0, 30.0), NODE), min_size=1, max_size=3)


@settings(max_examples=50)
@given(REQUESTS, SEEDS)
def test_all_nodes_stop_at_the_same_step(requests, seed):
    job = run_history(NODES, 2, requests, seed)
    assert {node.decision.next_step for node in job.nodes.values()} == {NextStep.DONE}
    (step,) = {node.stop_step for node in job.nodes.values()}
    assert step == max(node.held_step for node in job.nodes.values())
    assert job.now < WORK


def test_a_node_that_is_dismissed_after_a_request_to_stop_joins_no_more():
    machine = NodeMachine()
    machine.stage = NodeStage.AWAITING_DECISION
    machine.request_stop("SIGUSR1")
    (decision,) = machine.handle(Dismissed("it was silent"))
    assert (decision.next_step, decision.reason) == (NextStep.FAILED, "a stop was requested (SIGUSR1)")


@pytest.mark.parametrize("late", [0, 1])
def test_a_node_whose_program_is_busy_before_it_reports_is_not_lost(late):
    """Its ranks have exited: it waits for a slow observer, for example."""
    job = SimulatedJob(2, max_restarts=1)
    job.nodes[late].report_seconds = 1000.0
    job.nodes[0].after(20.0, job.nodes[0].fail_rank)
    failed, done = job.run().decisions
    assert (failed.root_cause_rank, failed.lost_nodes, failed.is_restart_counted) == (0, (), True)
    assert (done.next_step, done.lost_nodes) == (NextStep.DONE, ())


def test_a_node_that_still_waits_at_the_end_is_refused_and_then_told_no_more():
    job = SimulatedJob(1, work=20.0)
    job.after(19.0, lambda: job.add_node(10))
    job.run()
    assert job.nodes[10].is_out
    assert job.coordinator.handle_deadline(job.now + 5.0) == []


@pytest.mark.parametrize("n", [2, 100])
def test_messages_of_a_failure_grow_with_the_nodes_and_no_faster(n):
    quiet, job = SimulatedJob(n), SimulatedJob(n)
    for number in range(3):
        node = job.nodes[number % n]
        node.after(20.0 + 30.0 * number, node.fail_rank)
    assert {node.decision.next_step for node in job.run().nodes.values()} == {NextStep.DONE}
    assert len(job.decisions) == 4
    assert job.messages - quiet.run().messages <= 3 * MESSAGES_OF_A_FAILURE * n

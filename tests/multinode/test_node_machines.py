"""Histories of the leader and the nodes of a job, and its decisions, without a network."""

from contextlib import closing
from dataclasses import replace

import pytest

from mpwatch.multinode.job_decision import AttemptSummary, decide_next_step
from mpwatch.multinode.job_verdict import find_job_verdicts, make_records, read_records
from mpwatch.multinode.leader import (
    NODE_INFO_SHARE,
    Broadcast,
    Leader,
    LogWarning,
    PublishAssignments,
    ReservePort,
    RoundStage,
)
from mpwatch.multinode.local_ranks import LocalRanks
from mpwatch.multinode.node_machine import (
    AgreeOnStep,
    HoldRanks,
    NodeMachine,
    PrepareRanks,
    Rejoin,
    ReportJob,
    SendToLeader,
    StartRanks,
    StopRanks,
)
from mpwatch.multinode.protocol.failure_codec import decode_failure, encode_failure
from mpwatch.multinode.protocol.messages import (
    NO_ATTEMPT,
    AttemptDecision,
    AttemptReport,
    HoldSteps,
    JobConfig,
    JobFinished,
    NextStep,
    NodeInfo,
    NodeLeaving,
    NodeOutcome,
    RankRecord,
    RestartHistory,
    StartAttempt,
    StopAttempt,
    encode_message,
)
from mpwatch.multinode.protocol.signed_json import SignedJson
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.results.collective import Collective, CollectiveState
from mpwatch.results.failure import FailureKind, ProcessFailure, add_summary
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.commands import CommandQueue
from mpwatch.watcher.machine.transitions import CancelAttempt

TIMEOUT, GRACE = 15.0, 10.0
MAX_ENTRY = 1 << 20  # bytes, of the longest broadcast
DONE = AttemptReport(0, 0, NodeOutcome.SUCCEEDED)
NEW = RestartHistory()
STALL_AFTER = 60.0
ONCE = RestartPolicy(0)


def make_node_info(node, *, history=NEW, function="train", serves_store=False):
    job_config = JobConfig((("the function", function),))
    return NodeInfo(node, f"host{node}", "", 1, "default", serves_store, GRACE, job_config, history)


def make_node_machine(node, *, size, min_nodes=1, max_restarts=0, **of_node_info):
    return NodeMachine(
        make_node_info(node, **of_node_info),
        size=size,
        min_nodes=min_nodes,
        max_restarts=max_restarts,
        node_timeout=TIMEOUT,
        now=0.0,
    )


class SimulatedRound:
    """A leader and the node machines of a round. Each message is delivered at once."""

    def __init__(self, size, *, nnodes=None, policy=ONCE, functions=None, lost=()):
        self.leader = Leader(
            size=size,
            nnodes=nnodes or (size, size),
            policy=policy,
            node_timeout=TIMEOUT,
            exit_barrier_timeout=300.0,
            stall_after=STALL_AFTER,
            now=0.0,
        )
        self.machines = {
            node: make_node_machine(
                node, size=size, max_restarts=policy.max_restarts, function=(functions or {}).get(node, "train")
            )
            for node in range(size)
            if node not in lost
        }
        self.broadcasts, self.actions, self.assignments, self.warnings = [], [], {}, []
        for node, machine in self.machines.items():
            self.execute(node, machine.send_node_info())

    def execute(self, node, actions, now=0.0):
        for action in actions:
            if isinstance(action, SendToLeader):
                self.execute_leader_actions(self.leader.handle_message(action.message, now), now)
                self.execute_leader_actions(self.leader.judge_stalls(now), now)
            else:
                self.actions.append((node, action))

    def execute_leader_actions(self, actions, now=0.0):
        for action in actions:
            if isinstance(action, PublishAssignments):
                self.assignments |= {
                    (assignment.attempt, assignment.group_rank): assignment for assignment in action.assignments
                }
            elif isinstance(action, ReservePort):
                self.execute_leader_actions(self.leader.start_attempt(29500), now)
            elif isinstance(action, LogWarning):
                self.warnings.append(action.text)
            elif isinstance(action, Broadcast):
                self.broadcasts.append(action.message)
                self.broadcast(action.message, now)

    def broadcast(self, message, now):
        for node, machine in self.machines.items():
            self.execute(node, machine.handle_broadcast(message), now)
            if (attempt := machine.awaited_assignment) is not None:
                self.execute(node, machine.handle_assignment(self.assignments[attempt, node]), now)

    def start_ranks(self, *nodes):
        """Start the ranks of these nodes, or of all: their environments have been made."""
        for node in nodes or self.machines:
            self.execute(node, self.machines[node].start_ranks(self.machines[node].attempt))

    def actions_of(self, node, kind):
        return [action for other, action in self.actions if other == node and isinstance(action, kind)]

    @property
    def decisions(self):
        return [message for message in self.broadcasts if isinstance(message, AttemptDecision)]


def test_environments_of_a_stopped_attempt_start_no_ranks():
    round_ = SimulatedRound(2, policy=RestartPolicy(1))
    round_.start_ranks(0)
    round_.execute(0, round_.machines[0].report_failing())
    round_.execute(0, round_.machines[0].report_attempt(AttemptReport(0, 0, NodeOutcome.FAILED)))
    late = round_.machines[1]
    assert late.attempt == 1
    round_.execute(1, late.start_ranks(0))
    assert not round_.actions_of(1, StartRanks)
    round_.execute(1, late.start_ranks(1))
    assert round_.actions_of(1, StartRanks) == [StartRanks(1)]
    assert [prepare.start.attempt for prepare in round_.actions_of(1, PrepareRanks)] == [0, 1]


def test_the_leader_does_not_wait_for_a_node_that_aborts():
    round_ = SimulatedRound(2)
    round_.start_ranks(0)
    round_.execute(1, round_.machines[1].abort(AttemptReport(0, 0, NodeOutcome.ABORTED, reason="ValueError: of env")))
    assert round_.leader.stage is RoundStage.STOPPING
    round_.execute(0, round_.machines[0].report_attempt(replace(DONE, outcome=NodeOutcome.STOPPED)))
    (decision,) = round_.decisions
    assert (decision.next_step, decision.reason) == (NextStep.FAILED, "node 1 (host1): ValueError: of env")
    round_.execute(0, round_.machines[0].acknowledge_shutdown())
    assert round_.broadcasts[-1] == JobFinished()


def test_nodes_with_different_options_all_leave_at_once():
    """Each node raises LaunchError, and sends its ShutdownAck before."""
    round_ = SimulatedRound(2, functions={1: "another"})
    assert [decision.next_step for decision in round_.decisions] == [NextStep.FAILED]
    for node, machine in round_.machines.items():
        round_.execute(node, machine.abort(DONE))
    assert round_.broadcasts[-1] == JobFinished()


def test_the_node_that_serves_the_store_stays_until_all_others_know_that_it_leaves():
    leaving = make_node_machine(1, size=2, serves_store=True)
    assert leaving.report_signal("it received SIGINT") == [SendToLeader(NodeLeaving(1, "it received SIGINT"))]
    assert not leaving.is_finished
    leaving.handle_broadcast(JobFinished())
    assert leaving.is_finished


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("max_restarts", [0, 1])
def test_the_leader_waits_for_no_node_if_all_leave(size, max_restarts):
    round_ = SimulatedRound(size, policy=RestartPolicy(max_restarts))
    round_.start_ranks()
    for node, machine in round_.machines.items():
        assert not round_.leader.is_finished
        round_.execute(node, machine.report_signal("it received SIGTERM"))
    assert round_.leader.is_finished
    assert len(round_.decisions) == 1


def test_a_node_that_leaves_when_the_job_is_decided_acknowledges_the_decision():
    """Its caller's thread may end before it reads the decision. The leader does not wait for `node_timeout`."""
    round_ = SimulatedRound(2)
    round_.start_ranks()
    for node, machine in round_.machines.items():
        round_.execute(node, machine.report_attempt(DONE))
    assert [decision.next_step for decision in round_.decisions] == [NextStep.DONE]
    for node, machine in round_.machines.items():
        round_.execute(node, machine.report_signal("it received SIGTERM"))
    assert round_.broadcasts[-1] == JobFinished()


def test_a_node_that_sends_heartbeats_but_no_node_info_is_lost():
    round_ = SimulatedRound(3, nnodes=(2, 3), lost=[2])
    for now in range(int(NODE_INFO_SHARE * TIMEOUT)):
        round_.execute_leader_actions(round_.leader.check_heartbeats(dict.fromkeys(range(3), now), now), now)
        assert not round_.broadcasts
    round_.execute_leader_actions(round_.leader.handle_deadline(NODE_INFO_SHARE * TIMEOUT + 1.0))
    (decision,) = round_.decisions
    assert decision.next_step is NextStep.RE_RENDEZVOUS
    assert "has not sent its data (NodeInfo) in time" in decision.reason


@pytest.mark.parametrize("attempts", [0, 3])
def test_a_job_that_ends_before_an_attempt_starts_is_reported_for_no_attempt(attempts):
    machine = make_node_machine(1, size=2, history=RestartHistory(attempts))
    (job_report,) = machine.handle_store_loss("gone")
    assert isinstance(job_report, ReportJob)
    assert job_report.decision.attempt == NO_ATTEMPT
    assert job_report.decision.history.attempts == attempts


def test_a_free_restart_leaves_all_restarts():
    round_ = SimulatedRound(2, nnodes=(1, 2), policy=RestartPolicy(3, delay=5.0))
    round_.start_ranks()
    round_.execute_leader_actions(round_.leader.handle_message(NodeLeaving(1, "it received SIGTERM"), 1.0), 1.0)
    round_.execute(0, round_.machines[0].report_attempt(replace(DONE, outcome=NodeOutcome.STOPPED)))
    (decision,) = round_.decisions
    assert (decision.next_step, decision.restarts_left, decision.delay) == (NextStep.RE_RENDEZVOUS, 3, 0.0)
    assert not decision.is_restart_counted


@pytest.mark.parametrize("is_stop_first", [True, False])
def test_a_stop_for_newcomers_costs_no_restart_even_if_a_rank_fails_because_of_it(is_stop_first):
    """Nodes stop at different times, so a rank may fail because its peer was stopped. An earlier failure has another reason."""
    round_ = SimulatedRound(2, nnodes=(2, 3), policy=RestartPolicy(1))
    round_.start_ranks()
    victim = round_.machines[1]
    if not is_stop_first:
        round_.execute(1, victim.report_failing())
    round_.execute_leader_actions(round_.leader.update_waiting_nodes(1, 1.0), 1.0)
    round_.execute(0, round_.machines[0].report_attempt(replace(DONE, outcome=NodeOutcome.STOPPED)))
    victim_failure = {"rank": 1, "is_secondary": True}
    round_.execute(1, victim.report_attempt(AttemptReport(0, 0, NodeOutcome.FAILED, (victim_failure,))))
    (decision,) = round_.decisions
    assert (decision.next_step, decision.failures) == (NextStep.RE_RENDEZVOUS, (victim_failure,))
    assert (decision.root_cause_rank, decision.restarts_left) == ((-1, 1) if is_stop_first else (1, 0))
    assert decision.is_restart_counted is not is_stop_first
    assert ("more nodes want to join" in decision.reason) == is_stop_first


def test_a_decision_with_many_long_failures_fits_into_an_entry_of_the_store():
    n = 64
    text = "x" * 60_000
    reports = {
        node: AttemptReport(node, 0, NodeOutcome.FAILED, ({"rank": node, "is_secondary": node != 7, "text": text},))
        for node in range(n)
    }
    summary = AttemptSummary(
        attempt=0,
        has_started=True,
        history=RestartHistory(),
        node_infos={node: make_node_info(node) for node in range(n)},
        first_ranks={node: node for node in range(n)},
        size=n,
        min_nodes=n,
        waiting_nodes=0,
        failure_order=list(range(n)),
        reports=reports,
        lost_nodes={},
    )
    decision = decide_next_step(summary, ONCE)
    SignedJson(b"secret", "job").encode("word/1", encode_message(decision), limit=MAX_ENTRY)
    assert decision.root_cause_rank == decision.failures[0]["rank"] == 7
    assert decision.failures_omitted == n - len(decision.failures)


def test_a_leader_that_was_silent_for_too_long_broadcasts_nothing_more():
    round_ = SimulatedRound(3, nnodes=(2, 3))
    round_.start_ranks()
    round_.execute_leader_actions(round_.leader.step_down("it was silent for 20 s"))
    assert round_.leader.is_finished
    assert not round_.leader.check_heartbeats({}, 100.0)
    assert not round_.leader.handle_message(AttemptReport(1, 0, NodeOutcome.STOPPED), 100.0)
    assert not round_.leader.handle_deadline(1000.0)
    assert [type(message) for message in round_.broadcasts] == [StartAttempt, StopAttempt]
    assert all(round_.actions_of(node, StopRanks) for node in round_.machines)


def test_a_node_that_was_silent_for_too_long_starts_no_ranks_until_it_rejoins():
    """The leader may be lost meanwhile, without any message about it."""
    round_ = SimulatedRound(3, nnodes=(2, 3))
    round_.start_ranks(0, 1)
    late = round_.machines[2]
    round_.execute(2, late.withdraw("it was silent for 16.0 s"))
    round_.execute(2, late.start_ranks(0))
    round_.broadcast(StartAttempt(1, 3, 3, "host0", 29500, "host0", 1), 0.0)
    assert not round_.actions_of(2, StartRanks)
    for node in (0, 1):
        round_.execute(node, round_.machines[node].report_attempt(replace(DONE, outcome=NodeOutcome.STOPPED)))
    (decision,) = round_.decisions
    assert (decision.next_step, decision.reason) == (
        NextStep.RE_RENDEZVOUS,
        "node 2 (host2) was lost: it was silent for 16.0 s",
    )
    assert late.is_finished
    assert [rejoin.history for rejoin in round_.actions_of(2, Rejoin)] == [decision.history]


def test_a_rank_that_failed_before_the_callers_own_code_is_the_root_cause():
    """`retry_if` raises when it is asked about a failure. The ranks of the other node were stopped because of that failure."""
    round_ = SimulatedRound(2, policy=RestartPolicy(3))
    round_.start_ranks()
    broken = round_.machines[1]
    round_.execute(1, broken.report_failing())
    failure = {"rank": 1, "is_secondary": False}
    round_.execute(1, broken.abort(AttemptReport(0, 0, NodeOutcome.ABORTED, (failure,), reason="KeyError: of retry_if")))
    round_.execute(0, round_.machines[0].report_attempt(replace(DONE, outcome=NodeOutcome.STOPPED)))
    (decision,) = round_.decisions
    why = "node 1 (host1): KeyError: of retry_if"
    assert (decision.next_step, decision.root_cause_rank, decision.no_restart_reason, decision.failures) == (
        NextStep.FAILED,
        1,
        why,
        (failure,),
    )


VICTIM = {"rank": 0, "is_secondary": True}
MISSING = {"rank": 1, "is_secondary": False}


def decide_after_victim(policy=ONCE, *, waited_for_other_nodes=True, no_restart_reason="", **summary):
    """Decide when a rank of node 0 is a victim, and node 1 has a rank that may be the one it waited for."""
    reports = {
        0: AttemptReport(
            0,
            0,
            NodeOutcome.FAILED,
            (VICTIM,),
            waited_for_other_nodes=waited_for_other_nodes,
            no_restart_reason=no_restart_reason,
        ),
        1: AttemptReport(1, 0, NodeOutcome.STOPPED, missing_ranks=(MISSING,)),
    }
    facts = {
        "attempt": 0,
        "has_started": True,
        "history": NEW,
        "size": 2,
        "min_nodes": 2,
        "waiting_nodes": 0,
        "failure_order": [0],
        "lost_nodes": {},
    }
    node_infos = {node: make_node_info(node) for node in reports}
    return decide_next_step(
        AttemptSummary(**{**facts, "node_infos": node_infos, "first_ranks": {0: 0, 1: 1}, "reports": reports, **summary}),
        policy,
    )


def test_a_rank_that_another_node_waited_for_is_the_root_cause():
    decision = decide_after_victim()
    assert (decision.next_step, decision.root_cause_rank, decision.failures) == (NextStep.FAILED, 1, (MISSING, VICTIM))


def test_missing_ranks_that_do_not_fit_into_the_report_are_counted():
    reports = {
        0: AttemptReport(0, 0, NodeOutcome.FAILED, (VICTIM,), waited_for_other_nodes=True),
        1: AttemptReport(1, 0, NodeOutcome.STOPPED, missing_ranks=(MISSING,), missing_ranks_omitted=7),
    }
    assert decide_after_victim(reports=reports).failures_omitted == 7
    assert (
        decide_after_victim(reports={**reports, 0: AttemptReport(0, 0, NodeOutcome.FAILED, (VICTIM,))}).failures_omitted == 0
    )


def test_a_rank_that_ran_elsewhere_when_connections_broke_is_not_the_root_cause():
    assert decide_after_victim(waited_for_other_nodes=False).failures == (VICTIM,)


def test_a_missing_rank_is_not_the_root_cause_if_a_rank_failed_on_its_own_or_a_node_is_lost():
    failure = {"rank": 1, "is_secondary": False}
    reports = {
        0: AttemptReport(0, 0, NodeOutcome.FAILED, (VICTIM,), waited_for_other_nodes=True),
        1: AttemptReport(1, 0, NodeOutcome.FAILED, (failure,)),
        2: AttemptReport(2, 0, NodeOutcome.STOPPED, missing_ranks=({**MISSING, "rank": 2},)),
    }
    assert decide_after_victim(reports=reports, failure_order=[0, 1], size=3).root_cause_rank == 1
    assert decide_after_victim(
        lost_nodes={2: "silent"}, size=3, node_infos={node: make_node_info(node) for node in range(3)}
    ).failures == (VICTIM,)


def test_a_rank_that_was_silent_while_it_waited_is_not_the_root_cause():
    """It is the root cause only if no other node has a missing rank or a failure, and no node is lost."""
    silent = {"rank": 0, "is_secondary": False}
    waiting = AttemptReport(0, 0, NodeOutcome.FAILED, (silent,), waited_for_other_nodes=True)
    away, still = (
        AttemptReport(1, 0, NodeOutcome.STOPPED, missing_ranks=(MISSING,)),
        AttemptReport(1, 0, NodeOutcome.STOPPED),
    )
    own = AttemptReport(1, 0, NodeOutcome.FAILED, ({"rank": 1, "is_secondary": False},))
    assert decide_after_victim(reports={0: waiting, 1: away}).root_cause_rank == 1
    assert decide_after_victim(reports={0: waiting, 1: own}, failure_order=[0, 1]).root_cause_rank == 1
    assert decide_after_victim(reports={0: waiting, 1: still}).root_cause_rank == 0
    assert decide_after_victim(reports={0: waiting}, lost_nodes={1: "silent"}).root_cause_rank == 1


def test_the_policy_is_asked_about_the_missing_rank_and_not_about_a_victim_on_its_node():
    """If `retry_if` is a function, its answer about the victim counts: it has seen no other failure."""
    hangs, others = RestartPolicy(1, retry_if=[FailureKind.HANG]), RestartPolicy(1, retry_if=[FailureKind.EXCEPTION])
    other_victim = AttemptReport(
        1, 0, NodeOutcome.FAILED, ({**VICTIM, "rank": 2},), missing_ranks=(MISSING,), no_restart_reason="it is no HANG"
    )
    reports = {0: AttemptReport(0, 0, NodeOutcome.FAILED, (VICTIM,), waited_for_other_nodes=True), 1: other_victim}
    assert decide_after_victim(hangs, reports=reports, failure_order=[0, 1]).next_step is NextStep.RESTART
    assert decide_after_victim(hangs, no_restart_reason="it is no HANG").next_step is NextStep.RESTART
    assert decide_after_victim(others).no_restart_reason
    assert decide_after_victim(RestartPolicy(1)).next_step is NextStep.RESTART
    by_function = RestartPolicy(1, retry_if=lambda _: False)
    assert decide_after_victim(by_function, no_restart_reason="it is not wanted").no_restart_reason == "it is not wanted"


def test_a_possible_victim_is_not_the_root_cause_if_a_rank_of_another_node_failed():
    """The order of the inbox does not matter. If no other rank failed, the possible victim is the root cause."""
    reset, killed = {"rank": 0, "is_secondary": False}, {"rank": 1, "is_secondary": False}
    victim = AttemptReport(0, 0, NodeOutcome.FAILED, (reset,), may_be_victim=True)
    assert (
        decide_after_victim(
            reports={0: victim, 1: AttemptReport(1, 0, NodeOutcome.FAILED, (killed,))}, failure_order=[0, 1]
        ).root_cause_rank
        == 1
    )
    assert decide_after_victim(reports={0: victim, 1: AttemptReport(1, 0, NodeOutcome.STOPPED)}).root_cause_rank == 0
    assert decide_after_victim(reports={0: victim}, lost_nodes={1: "silent"}).root_cause_rank == 1


def make_call(name, *, sequence=1, elements=16, state=CollectiveState.WAITING, world=3, seconds=STALL_AFTER):
    return Collective(
        name=name,
        sequence=sequence,
        group="default",
        ranks=tuple(range(world)),
        input_shapes=((elements,),),
        input_dtypes=("float32",),
        state=state,
        seconds=seconds,
    )


def make_record(rank, name, *, has_returned=False, **details):
    answer = RankCollectives(collectives=(make_call(name, **details),), rank_in_world=rank)
    return RankRecord(rank, has_returned, answer.to_json(), 100 + rank)


def decide_on_collectives(policy=ONCE, *, failures, records, **summary):
    """Decide for two nodes: ranks 0 and 1, and rank 2. `failures` and `records` are those of each node."""
    reports = {
        node: AttemptReport(
            node, 0, NodeOutcome.FAILED if of_node else NodeOutcome.STOPPED, of_node, collectives=tuple(found)
        )
        for node, (of_node, found) in enumerate(zip(failures, records, strict=True))
    }
    first_ranks = {0: 0, 1: 2}
    return decide_after_victim(policy, reports=reports, first_ranks=first_ranks, **summary)


ABORTED = encode_failure(
    add_summary(
        ProcessFailure(
            rank=0, local_rank=0, pid=100, hostname="host0", group_rank=0, kind=FailureKind.SIGNAL, exit_code=134, signal=6
        )
    )
)
MISMATCHED = [make_record(0, "all_reduce"), make_record(1, "all_reduce")], [make_record(2, "all_reduce", elements=17)]


def test_a_rank_that_called_another_collective_on_another_node_is_the_root_cause():
    """gloo aborts a rank that is not to blame."""
    decision = decide_on_collectives(failures=[(ABORTED,), ()], records=MISMATCHED)
    blamed, victim = map(decode_failure, decision.failures)
    assert (decision.next_step, decision.root_cause_rank) == (NextStep.FAILED, 2)
    assert (blamed.rank, blamed.local_rank, blamed.pid, blamed.group_rank, blamed.hostname) == (2, 0, 102, 1, "host1")
    assert (blamed.kind, blamed.is_secondary) == (FailureKind.MISMATCH, False)
    assert blamed.summary == "called all_reduce #1 with float32[17], ranks 0-1 with float32[16]"
    assert decision.reason == f"rank 2 {blamed.summary}"
    assert (victim.rank, victim.kind, victim.is_secondary) == (0, FailureKind.SIGNAL, True)


def test_a_rank_of_another_node_that_has_returned_is_the_root_cause():
    ended = make_record(2, "broadcast", state=CollectiveState.COMPLETED, has_returned=True)
    waiting = [make_record(rank, "all_reduce", sequence=2) for rank in (0, 1)]
    decision = decide_on_collectives(failures=[(VICTIM,), ()], records=[waiting, [ended]])
    blamed = decode_failure(decision.failures[0])
    assert (blamed.rank, blamed.kind) == (2, FailureKind.MISMATCH)
    assert blamed.summary.startswith("has returned, but ranks 0-1 wait for it in all_reduce #2 ")


def test_a_missing_rank_that_is_late_for_a_collective_keeps_its_stack():
    late = make_record(2, "broadcast", state=CollectiveState.COMPLETED)
    waiting = [make_record(rank, "all_reduce", sequence=2) for rank in (0, 1)]
    missing = decode_failure(ABORTED)
    missing = encode_failure(
        replace(missing, rank=2, signal=None, kind=FailureKind.HANG, stack="where it was", summary="hung")
    )
    reports = {
        0: AttemptReport(0, 0, NodeOutcome.FAILED, (VICTIM,), waited_for_other_nodes=True, collectives=tuple(waiting)),
        1: AttemptReport(1, 0, NodeOutcome.STOPPED, missing_ranks=(missing,), collectives=(late,)),
    }
    blamed = decode_failure(decide_after_victim(reports=reports, first_ranks={0: 0, 1: 2}).failures[0])
    assert (blamed.rank, blamed.kind, blamed.stack) == (2, FailureKind.HANG, "where it was")
    assert blamed.evidence.startswith("has not joined all_reduce #2 ")


def test_two_ranks_that_do_not_agree_are_named_and_nobody_is_blamed():
    records = [make_record(0, "all_reduce", world=2)], [make_record(1, "broadcast", world=2)]
    decision = decide_on_collectives(failures=[(ABORTED,), ()], records=records)
    assert (decision.next_step, decision.root_cause_rank) == (NextStep.FAILED, -1)
    assert decision.reason == "rank 0 called all_reduce #1 with float32[16], rank 1 broadcast #1 with float32[16]"
    assert [failure["is_secondary"] for failure in decision.failures] == [True]


@pytest.mark.parametrize(
    ("failures", "summary"),
    [
        pytest.param([({**ABORTED, "signal": 11},), ()], {}, id="a rank has crashed"),
        pytest.param([(ABORTED,), ({"rank": 2, "is_secondary": False},)], {}, id="a rank has failed on its own"),
        pytest.param([(ABORTED,), ()], {"lost_nodes": {2: "silent"}, "size": 3}, id="a node is lost"),
    ],
)
def test_a_failure_of_its_own_comes_before_a_mismatch(failures, summary):
    decision = decide_on_collectives(failures=failures, records=MISMATCHED, **summary)
    assert decision.root_cause_rank == 0
    assert decision.failures[0] == failures[0][0]


def test_the_policy_is_asked_about_the_mismatch():
    facts = {"failures": [(ABORTED,), ()], "records": MISMATCHED}
    signals, mismatches = (RestartPolicy(1, retry_if=[kind]) for kind in (FailureKind.SIGNAL, FailureKind.MISMATCH))
    assert decide_on_collectives(signals, **facts).no_restart_reason
    assert decide_on_collectives(mismatches, **facts).next_step is NextStep.RESTART


def test_a_timeout_names_the_rank_of_another_node_that_has_not_joined():
    reports = {
        0: AttemptReport(0, 0, NodeOutcome.TIMED_OUT, (), reason="timeout", collectives=tuple(MISMATCHED[0])),
        1: AttemptReport(1, 0, NodeOutcome.STOPPED, collectives=tuple(MISMATCHED[1])),
    }
    decision = decide_after_victim(reports=reports, first_ranks={0: 0, 1: 2})
    assert decision.timed_out
    assert decision.reason.startswith("node 0 (host0): timeout; rank 2 called all_reduce #1 with float32[17]")


def test_a_timeout_names_the_ranks_of_all_nodes_that_had_not_returned():
    reports = {
        0: AttemptReport(0, 0, NodeOutcome.STOPPED, unfinished=(0, 1)),
        1: AttemptReport(1, 0, NodeOutcome.TIMED_OUT, reason="timeout: rank 2 had not returned", unfinished=(2,)),
    }
    decision = decide_after_victim(reports=reports, first_ranks={0: 0, 1: 2})
    assert decision.reason == "node 1 (host1): timeout: rank 2 had not returned; on other nodes ranks 0-1 had not returned"


def start_round():
    """Start the ranks of two nodes, each with one rank."""
    round_ = SimulatedRound(2)
    round_.start_ranks()
    return round_


def report_stall(round_, node, *records):
    round_.execute(node, round_.machines[node].report_stall(records))


def report_all(round_, *records):
    """Let both nodes report that they have stopped their ranks. Return the decision."""
    for node, record in enumerate(records):
        round_.execute(
            node, round_.machines[node].report_attempt(AttemptReport(0, 0, NodeOutcome.STOPPED, collectives=record))
        )
    (decision,) = round_.decisions
    return decision


LATE = make_record(1, "broadcast", state=CollectiveState.COMPLETED, world=2)
WAITING = make_record(0, "all_reduce", sequence=2, world=2)


def test_there_is_one_warning_of_ranks_that_wait_for_another_node():
    round_ = start_round()
    report_stall(round_, 0, WAITING)
    assert round_.warnings == []
    for _ in range(2):
        report_stall(round_, 1, LATE)
    (text,) = round_.warnings
    assert "rank 1 has not joined all_reduce #2 (float32[16], default group), in which rank 0 waits" in text
    report_stall(round_, 1)
    report_stall(round_, 0, make_record(0, "all_reduce", sequence=3, world=2))
    assert len(round_.warnings) == 1
    assert round_.leader.stage is RoundStage.RUNNING


def test_ranks_that_have_not_waited_long_are_not_worth_a_warning():
    round_ = start_round()
    report_stall(round_, 1, LATE)
    report_stall(round_, 0, make_record(0, "all_reduce", sequence=2, world=2, seconds=0.2))
    assert round_.warnings == []
    report_stall(round_, 0, WAITING)
    assert len(round_.warnings) == 1


def test_a_rank_of_a_node_that_has_succeeded_has_returned():
    round_ = start_round()
    succeeded = AttemptReport(0, 0, NodeOutcome.SUCCEEDED, collectives=(replace(LATE, has_returned=True),))
    round_.execute(1, round_.machines[1].report_attempt(succeeded))
    report_stall(round_, 0, WAITING)
    assert [action.reason[:20] for action in round_.actions_of(0, StopRanks)] == ["rank 1 has returned,"]


def test_the_job_ends_if_ranks_wait_for_one_on_another_node_that_has_returned():
    round_ = start_round()
    report_stall(round_, 0, WAITING)
    returned = replace(LATE, has_returned=True)
    report_stall(round_, 1, returned)
    assert round_.warnings == []
    assert [action.reason[:20] for action in round_.actions_of(0, StopRanks)] == ["rank 1 has returned,"]
    decision = report_all(round_, (WAITING,), (returned,))
    assert (decision.next_step, decision.root_cause_rank) == (NextStep.FAILED, 1)
    assert decode_failure(decision.failures[0]).kind is FailureKind.MISMATCH


@pytest.mark.parametrize("are_known", [True, False], ids=["known at the end", "no longer known at the end"])
def test_the_job_ends_if_ranks_of_two_nodes_have_called_different_collectives(are_known):
    round_ = start_round()
    records = (make_record(0, "all_reduce", world=2),), (make_record(1, "broadcast", world=2),)
    for node in (0, 1):
        report_stall(round_, node, *records[node])
    decision = report_all(round_, *(records if are_known else ((), ())))
    assert (decision.next_step, decision.root_cause_rank, decision.failures) == (NextStep.FAILED, -1, ())
    assert decision.reason == "rank 0 called all_reduce #1 with float32[16], rank 1 broadcast #1 with float32[16]"


def test_a_node_that_has_no_ranks_reports_no_stall():
    assert make_node_machine(0, size=2).report_stall((WAITING,)) == []


def test_only_the_latest_collectives_are_sent():
    calls = [make_call("all_reduce", sequence=number, state=CollectiveState.COMPLETED) for number in range(1, 65)]
    calls[3] = make_call("all_reduce", sequence=4)
    (record,) = make_records({5: RankCollectives(collectives=tuple(calls))}, returned=[5], pids={5: 7})
    assert (record.rank, record.has_returned, record.pid) == (5, True, 7)
    answer = RankCollectives.from_json(record.collectives)
    assert [call.sequence for call in answer.collectives] == [4, *range(57, 65)]
    assert not answer.has_all
    wide = dict.fromkeys(range(100), RankCollectives(collectives=(make_call("all_reduce", world=2000),)))
    assert 8 <= len(make_records(wide, [], {})) < 30


@pytest.mark.parametrize("text", ["", "[]", '{"place": "", "has_all": true, "groups": [], "collectives": [{"ranks": 0}]}'])
def test_an_answer_that_cannot_be_read_says_nothing(text):
    """The node may have another version of mpwatch."""
    message = AttemptReport(0, 0, NodeOutcome.FAILED, collectives=(RankRecord(0, False, text), make_record(1, "barrier")))
    assert find_job_verdicts([read_records(message.collectives)]) == []


def test_a_slow_logging_handler_does_not_delay_the_stop_of_the_ranks(caplog):
    """The node thread only posts the stop. The caller's thread logs the reason."""
    with closing(CommandQueue()) as commands:
        local_ranks = LocalRanks(commands, TIMEOUT)
        with caplog.at_level("DEBUG"):
            local_ranks.stop(StopRanks("why"))
        assert not caplog.records
        assert commands.take() == [CancelAttempt()]
        assert local_ranks.take_updates() == [StopRanks("why")]


# --- requests to stop


def request_stop(round_, node, cause="SIGUSR1"):
    round_.execute(node, round_.machines[node].request_stop(cause))


def hold(round_, node, step):
    round_.execute(node, round_.machines[node].report_steps_held(step))


@pytest.mark.parametrize(("steps", "highest"), [((3, 7, 5), 7), ((None, 2, None), 2), ((None, None, None), None)])
def test_all_nodes_stop_after_the_highest_step(steps, highest):
    round_ = SimulatedRound(3)
    round_.start_ranks()
    request_stop(round_, 1)
    request_stop(round_, 2, "SIGTERM")
    assert [round_.actions_of(node, HoldRanks) for node in range(3)] == [[HoldRanks("SIGUSR1")]] * 3
    for node, step in enumerate(steps):
        assert round_.actions_of(0, AgreeOnStep) == []
        hold(round_, node, step)
    assert [round_.actions_of(node, AgreeOnStep) for node in range(3)] == [[AgreeOnStep(highest, "SIGUSR1")]] * 3


def test_ranks_that_are_being_prepared_are_held_when_they_are_started():
    round_ = SimulatedRound(2)
    round_.start_ranks(0)
    request_stop(round_, 0)
    assert round_.actions_of(1, HoldRanks) == []
    round_.start_ranks(1)
    assert [type(action) for node, action in round_.actions if node == 1] == [PrepareRanks, StartRanks, HoldRanks]


def test_a_node_whose_ranks_have_returned_still_says_how_far_they_came():
    round_ = SimulatedRound(2)
    round_.start_ranks()
    round_.execute(1, round_.machines[1].report_attempt(DONE))
    request_stop(round_, 0)
    assert round_.actions_of(1, HoldRanks) == [HoldRanks("SIGUSR1")]
    hold(round_, 0, 3)
    hold(round_, 1, 9)
    assert round_.actions_of(0, AgreeOnStep) == [AgreeOnStep(9, "SIGUSR1")]
    assert round_.actions_of(1, AgreeOnStep) == []


def test_a_request_before_the_ranks_are_started_holds_them_then():
    round_ = SimulatedRound(2, lost=[1])
    request_stop(round_, 0)
    round_.machines[1] = make_node_machine(1, size=2)
    round_.execute(1, round_.machines[1].send_node_info())
    round_.start_ranks()
    assert [round_.actions_of(node, HoldRanks) for node in range(2)] == [[HoldRanks("SIGUSR1")]] * 2


def test_a_job_is_not_restarted_after_a_request():
    round_ = SimulatedRound(2, policy=RestartPolicy(3))
    round_.start_ranks()
    request_stop(round_, 0)
    report_failure(round_, 1)
    round_.execute(0, round_.machines[0].report_attempt(AttemptReport(0, 0, NodeOutcome.STOPPED)))
    (decision,) = round_.decisions
    assert decision.next_step is NextStep.FAILED
    assert decision.no_restart_reason == "a stop was requested (SIGUSR1)"
    assert not decision.is_restart_counted


def test_a_request_while_all_nodes_wait_for_a_restart_ends_the_job():
    round_ = SimulatedRound(2, policy=RestartPolicy(3, retry_if=lambda failure: True))
    round_.start_ranks()
    report_failure(round_, 1)
    round_.execute(0, round_.machines[0].report_attempt(AttemptReport(0, 0, NodeOutcome.STOPPED)))
    assert round_.decisions[-1].next_step is NextStep.RESTART
    request_stop(round_, 0)
    decision = round_.decisions[-1]
    assert decision.next_step is NextStep.FAILED
    assert decision.reason == decision.no_restart_reason == "a stop was requested (SIGUSR1)"
    assert sum(isinstance(action, StartRanks) for _, action in round_.actions) == 2


def report_failure(round_, node):
    round_.execute(node, round_.machines[node].report_failing())
    round_.execute(node, round_.machines[node].report_attempt(AttemptReport(0, 0, NodeOutcome.FAILED)))


def test_no_more_nodes_join_after_a_request():
    round_ = SimulatedRound(2, nnodes=(1, 3))
    round_.start_ranks()
    request_stop(round_, 0)
    round_.execute_leader_actions(round_.leader.update_waiting_nodes(1, 1.0))
    assert not any(isinstance(message, StopAttempt) for message in round_.broadcasts)
    assert sum(isinstance(message, HoldSteps) for message in round_.broadcasts) == 1


def test_the_job_fails_if_a_node_is_lost_after_a_request():
    round_ = SimulatedRound(2, nnodes=(1, 2))
    round_.start_ranks()
    request_stop(round_, 0)
    round_.execute_leader_actions(round_.leader.check_heartbeats({0: 1, 1: 1}, 1.0))
    round_.execute_leader_actions(round_.leader.check_heartbeats({0: 2, 1: 1}, 2.0 + TIMEOUT), 2.0 + TIMEOUT)
    round_.execute(0, round_.machines[0].report_attempt(AttemptReport(0, 0, NodeOutcome.STOPPED)))
    assert [decision.next_step for decision in round_.decisions] == [NextStep.FAILED]


def test_the_job_fails_if_the_leader_is_lost_after_a_request():
    round_ = SimulatedRound(2, nnodes=(1, 2))
    round_.start_ranks()
    request_stop(round_, 1)
    machine = round_.machines[1]
    machine.handle_leader_loss("it is gone")
    (report,) = machine.report_attempt(AttemptReport(0, 0, NodeOutcome.STOPPED))
    assert isinstance(report, ReportJob)
    assert report.decision.no_restart_reason == "a stop was requested (SIGUSR1)"


@pytest.mark.parametrize(("min_nodes", "restarts_left"), [(1, 2), (2, 1)])
def test_the_loss_of_the_leader_counts_as_a_restart_if_too_few_nodes_remain(min_nodes, restarts_left):
    machine = make_node_machine(1, size=2, min_nodes=min_nodes, max_restarts=2)
    report, _ = machine.handle_leader_loss("it is gone")
    assert report.decision.restarts_left == restarts_left
    assert report.decision.is_restart_counted == (min_nodes == 2)

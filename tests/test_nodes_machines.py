"""The chair, the members and the judge of a job of several nodes: one history after the other, without a network."""

from dataclasses import replace

import pytest

from mpwatch.multinode.job_decision import AttemptSummary, judge
from mpwatch.multinode.leader import GATHER_SHARE, Broadcast, Leader, PublishAssignments, ReservePort
from mpwatch.multinode.leader import RoundStage as Round
from mpwatch.multinode.node_machine import NodeMachine, PrepareRanks, Rejoin, ReportJob, SendToLeader, StartRanks, StopRanks
from mpwatch.multinode.protocol.messages import (
    NO_ATTEMPT,
    AttemptDecision,
    AttemptReport,
    JobClosed,
    JobConfig,
    NextStep,
    NodeInfo,
    NodeLeaving,
    NodeOutcome,
    RestartHistory,
    StartAttempt,
    StopAttempt,
    to_body,
)
from mpwatch.multinode.protocol.signed_json import SignedJson
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.results.model import FailureKind

TIMEOUT, GRACE = 15.0, 10.0
ENTRY = 1 << 20  # bytes, of the longest that the chair may say
DONE = AttemptReport(0, 0, NodeOutcome.SUCCEEDED)
NEW = RestartHistory()
ONCE = RestartPolicy(0)


def card(node, *, history=NEW, function="train", serves_store=False):
    terms = JobConfig((("the function", function),))
    return NodeInfo(node, f"host{node}", "", 1, "default", serves_store, GRACE, f"nonce{node}", terms, history)


def member_of(node, *, size, max_restarts=0, **of_card):
    return NodeMachine(
        card(node, **of_card), size=size, min_nodes=1, max_restarts=max_restarts, node_timeout=TIMEOUT, now=0.0
    )


class Table:
    """A chair and its members, that hear one another at once."""

    def __init__(self, size, *, nodes=None, policy=ONCE, functions=None, absent=()):
        self.chair = Leader(
            size=size, nodes=nodes or (size, size), policy=policy, node_timeout=TIMEOUT, exit_barrier_timeout=300.0, now=0.0
        )
        self.members = {
            node: member_of(node, size=size, max_restarts=policy.max_restarts, function=(functions or {}).get(node, "train"))
            for node in range(size)
            if node not in absent
        }
        self.said, self.news, self.places = [], [], {}
        for node, member in self.members.items():
            self.do(node, member.begin())

    def do(self, node, actions, now=0.0):
        for action in actions:
            if isinstance(action, SendToLeader):
                self.act(self.chair.hear(action.message, now), now)
            else:
                self.news.append((node, action))

    def act(self, acts, now=0.0):
        for act in acts:
            if isinstance(act, PublishAssignments):
                self.places |= {(place.attempt, place.group_rank): place for place in act.places}
            elif isinstance(act, ReservePort):
                self.act(self.chair.reserved(29500), now)
            elif isinstance(act, Broadcast):
                self.said.append(act.word)
                self.tell(act.word, now)

    def tell(self, word, now):
        for node, member in self.members.items():
            self.do(node, member.hear(word), now)
            if (attempt := member.wants_place) is not None:
                self.do(node, member.placed(self.places[attempt, node]), now)

    def begin(self, *nodes):
        """Their environments have been made."""
        for node in nodes or self.members:
            self.do(node, self.members[node].prepared(self.members[node].attempt))

    def of(self, node, kind):
        return [action for who, action in self.news if who == node and isinstance(action, kind)]

    @property
    def verdicts(self):
        return [word for word in self.said if isinstance(word, AttemptDecision)]


def test_environments_of_an_attempt_that_was_called_off_start_nothing():
    table = Table(2, policy=RestartPolicy(1))
    table.begin(0)
    table.do(0, table.members[0].failing())
    table.do(0, table.members[0].ended(AttemptReport(0, 0, NodeOutcome.FAILED)))
    late = table.members[1]
    assert late.attempt == 1
    table.do(1, late.prepared(0))
    assert not table.of(1, StartRanks)
    table.do(1, late.prepared(1))
    assert table.of(1, StartRanks) == [StartRanks(1)]
    assert [prepare.start.attempt for prepare in table.of(1, PrepareRanks)] == [0, 1]


def test_who_cannot_go_on_is_not_waited_for():
    table = Table(2)
    table.begin(0)
    table.do(1, table.members[1].abort(AttemptReport(0, 0, NodeOutcome.ABORTED, reason="ValueError: of env")))
    assert table.chair.stage is Round.STOPPING
    table.do(0, table.members[0].ended(replace(DONE, outcome=NodeOutcome.STOPPED)))
    (verdict,) = table.verdicts
    assert (verdict.decision, verdict.reason) == (NextStep.FAILED, "node 1 (host1): ValueError: of env")
    table.do(0, table.members[0].concluded())
    assert table.said[-1] == JobClosed()


def test_nodes_that_disagree_all_leave_at_once():
    """Each raises an error of its own, and says good-bye on its way out."""
    table = Table(2, functions={1: "another"})
    assert [verdict.decision for verdict in table.verdicts] == [NextStep.FAILED]
    for node, member in table.members.items():
        table.do(node, member.abort(DONE))
    assert table.said[-1] == JobClosed()


def test_the_node_that_serves_the_store_stays_until_all_know_that_it_leaves():
    leaving = member_of(1, size=2, serves_store=True)
    assert leaving.leave("it received SIGINT") == [SendToLeader(NodeLeaving(1, "it received SIGINT"))]
    assert not leaving.is_over
    leaving.hear(JobClosed())
    assert leaving.is_over


def test_a_node_that_gives_signs_of_life_and_says_nothing_is_lost():
    table = Table(3, nodes=(2, 3), absent=[2])
    for now in range(int(GATHER_SHARE * TIMEOUT)):
        table.act(table.chair.see_beats(dict.fromkeys(range(3), now), now), now)
        assert not table.said
    table.act(table.chair.expire(GATHER_SHARE * TIMEOUT + 1.0))
    (verdict,) = table.verdicts
    assert verdict.decision is NextStep.RE_RENDEZVOUS
    assert "does not say who it is" in verdict.reason


@pytest.mark.parametrize("attempts", [0, 3])
def test_what_ends_the_job_before_an_attempt_begins_is_told_of_no_other_attempt(attempts):
    member = member_of(1, size=2, history=RestartHistory(attempts))
    (concluded,) = member.lose_store("gone")
    assert isinstance(concluded, ReportJob)
    assert concluded.verdict.attempt == NO_ATTEMPT
    assert concluded.verdict.history.attempts == attempts


def test_restarts_that_cost_nothing_leave_all():
    table = Table(2, nodes=(1, 2), policy=RestartPolicy(3, delay=5.0))
    table.begin()
    table.act(table.chair.hear(NodeLeaving(1, "it received SIGTERM"), 1.0), 1.0)
    table.do(0, table.members[0].ended(replace(DONE, outcome=NodeOutcome.STOPPED)))
    (verdict,) = table.verdicts
    assert (verdict.decision, verdict.restarts_left, verdict.delay) == (NextStep.RE_RENDEZVOUS, 3, 0.0)


@pytest.mark.parametrize("comes_first", [True, False])
def test_to_make_room_for_newcomers_costs_nothing_whoever_complains_that_others_have_stopped(comes_first):
    """Nodes hear at different times that they are to stop. But a complaint that came before has another reason."""
    table = Table(2, nodes=(2, 3), policy=RestartPolicy(1))
    table.begin()
    complaining = table.members[1]
    if not comes_first:
        table.do(1, complaining.failing())
    table.act(table.chair.see_waiting(1, 1.0), 1.0)
    table.do(0, table.members[0].ended(replace(DONE, outcome=NodeOutcome.STOPPED)))
    complaint = {"rank": 1, "is_secondary": True}
    table.do(1, complaining.ended(AttemptReport(0, 0, NodeOutcome.FAILED, (complaint,))))
    (verdict,) = table.verdicts
    assert (verdict.decision, verdict.failures) == (NextStep.RE_RENDEZVOUS, (complaint,))
    assert (verdict.cause, verdict.restarts_left) == ((-1, 1) if comes_first else (1, 0))
    assert ("other nodes have come" in verdict.reason) == comes_first


def test_what_the_chair_says_of_many_long_failures_fits_into_the_store():
    n = 64
    text = "x" * 60_000
    ended = {
        node: AttemptReport(node, 0, NodeOutcome.FAILED, ({"rank": node, "is_secondary": node != 7, "text": text},))
        for node in range(n)
    }
    case = AttemptSummary(
        attempt=0,
        has_begun=True,
        history=RestartHistory(),
        cards={node: card(node) for node in range(n)},
        first_ranks={node: node for node in range(n)},
        size=n,
        nodes=(n, n),
        waiting=0,
        order=list(range(n)),
        ended=ended,
        gone={},
    )
    verdict = judge(case, ONCE)
    SignedJson(b"secret", "job").close("word/1", to_body(verdict), limit=ENTRY)
    assert verdict.cause == verdict.failures[0]["rank"] == 7
    assert verdict.unsaid == n - len(verdict.failures)


def test_a_chair_that_was_silent_for_too_long_says_nothing_more():
    table = Table(3, nodes=(2, 3))
    table.begin()
    table.act(table.chair.resign("it was silent for 20 s"))
    assert table.chair.is_over
    assert not table.chair.see_beats({}, 100.0)
    assert not table.chair.hear(AttemptReport(1, 0, NodeOutcome.STOPPED), 100.0)
    assert not table.chair.expire(1000.0)
    assert [type(word) for word in table.said] == [StartAttempt, StopAttempt]
    assert all(table.of(node, StopRanks) for node in table.members)


def test_a_node_that_was_silent_for_too_long_starts_nothing_until_it_has_come_back():
    """The chair may be lost meanwhile, and nobody tell it."""
    table = Table(3, nodes=(2, 3))
    table.begin(0, 1)
    late = table.members[2]
    table.do(2, late.resign("it was silent for 16.0 s"))
    table.do(2, late.prepared(0))
    table.tell(StartAttempt(1, 3, 3, "host0", 29500, "host0", 1), 0.0)
    assert not table.of(2, StartRanks)
    for node in (0, 1):
        table.do(node, table.members[node].ended(replace(DONE, outcome=NodeOutcome.STOPPED)))
    (verdict,) = table.verdicts
    assert (verdict.decision, verdict.reason) == (NextStep.RE_RENDEZVOUS, "node 2 (host2) is gone: it was silent for 16.0 s")
    assert late.is_over
    assert [rejoin.history for rejoin in table.of(2, Rejoin)] == [verdict.history]


def test_what_had_failed_before_the_callers_own_code_did_is_the_cause():
    """`retry_if` raises, of one rank's failure; the other node's rank was stopped for it."""
    table = Table(2, policy=RestartPolicy(3))
    table.begin()
    broken = table.members[1]
    table.do(1, broken.failing())
    failure = {"rank": 1, "is_secondary": False}
    table.do(1, broken.abort(AttemptReport(0, 0, NodeOutcome.ABORTED, (failure,), reason="KeyError: of retry_if")))
    table.do(0, table.members[0].ended(replace(DONE, outcome=NodeOutcome.STOPPED)))
    (verdict,) = table.verdicts
    why = "node 1 (host1): KeyError: of retry_if"
    assert (verdict.decision, verdict.cause, verdict.why_not, verdict.failures) == (NextStep.FAILED, 1, why, (failure,))


COMPLAINT = {"rank": 0, "is_secondary": True}
MISSED = {"rank": 1, "is_secondary": False}


def after_a_complaint(policy=ONCE, *, lacks_a_peer=True, why_not="", **case):
    """The verdict when node 0 complains, and node 1 has a rank that may be the one that it missed."""
    ended = {
        0: AttemptReport(0, 0, NodeOutcome.FAILED, (COMPLAINT,), lacks_a_peer=lacks_a_peer, why_not=why_not),
        1: AttemptReport(1, 0, NodeOutcome.STOPPED, absent=(MISSED,)),
    }
    what = {
        "attempt": 0,
        "has_begun": True,
        "history": NEW,
        "size": 2,
        "nodes": (2, 2),
        "waiting": 0,
        "order": [0],
        "gone": {},
    }
    cards = {node: card(node) for node in ended}
    return judge(AttemptSummary(**{**what, "cards": cards, "first_ranks": {0: 0, 1: 1}, "ended": ended, **case}), policy)


def test_a_rank_that_another_node_has_waited_for_in_vain_is_the_cause():
    verdict = after_a_complaint()
    assert (verdict.decision, verdict.cause, verdict.failures) == (NextStep.FAILED, 1, (MISSED, COMPLAINT))


def test_missed_ranks_that_were_too_many_to_tell_of_are_counted():
    ended = {
        0: AttemptReport(0, 0, NodeOutcome.FAILED, (COMPLAINT,), lacks_a_peer=True),
        1: AttemptReport(1, 0, NodeOutcome.STOPPED, absent=(MISSED,), absent_unsaid=7),
    }
    assert after_a_complaint(ended=ended).unsaid == 7
    assert after_a_complaint(ended={**ended, 0: AttemptReport(0, 0, NodeOutcome.FAILED, (COMPLAINT,))}).unsaid == 0


def test_a_rank_that_was_at_work_elsewhere_when_connections_broke_is_not():
    assert after_a_complaint(lacks_a_peer=False).failures == (COMPLAINT,)


def test_nor_is_it_if_somebody_has_failed_for_himself_or_is_gone():
    failure = {"rank": 1, "is_secondary": False}
    ended = {
        0: AttemptReport(0, 0, NodeOutcome.FAILED, (COMPLAINT,), lacks_a_peer=True),
        1: AttemptReport(1, 0, NodeOutcome.FAILED, (failure,)),
        2: AttemptReport(2, 0, NodeOutcome.STOPPED, absent=({**MISSED, "rank": 2},)),
    }
    assert after_a_complaint(ended=ended, order=[0, 1], size=3).cause == 1
    assert after_a_complaint(gone={2: "silent"}, size=3, cards={node: card(node) for node in range(3)}).failures == (
        COMPLAINT,
    )


def test_who_was_silent_while_it_waited_is_not_the_cause_either():
    """Neither where another node has the rank that was missed, nor where one is gone; but where nobody else is, it is."""
    silent = {"rank": 0, "is_secondary": False}
    waiting = AttemptReport(0, 0, NodeOutcome.FAILED, (silent,), lacks_a_peer=True)
    away, still = AttemptReport(1, 0, NodeOutcome.STOPPED, absent=(MISSED,)), AttemptReport(1, 0, NodeOutcome.STOPPED)
    own = AttemptReport(1, 0, NodeOutcome.FAILED, ({"rank": 1, "is_secondary": False},))
    assert after_a_complaint(ended={0: waiting, 1: away}).cause == 1
    assert after_a_complaint(ended={0: waiting, 1: own}, order=[0, 1]).cause == 1
    assert after_a_complaint(ended={0: waiting, 1: still}).cause == 0
    assert after_a_complaint(ended={0: waiting}, gone={1: "silent"}).cause == 1


def test_whether_a_missed_rank_is_worth_another_try_is_asked_of_it_and_not_of_its_neighbour():
    """Which has complained as well. But a function of the user's is asked about complaints, which are failures in any case."""
    hangs, others = RestartPolicy(1, retry_if=[FailureKind.HANG]), RestartPolicy(1, retry_if=[FailureKind.EXCEPTION])
    neighbour = AttemptReport(
        1, 0, NodeOutcome.FAILED, ({**COMPLAINT, "rank": 2},), absent=(MISSED,), why_not="it is no HANG"
    )
    ended = {0: AttemptReport(0, 0, NodeOutcome.FAILED, (COMPLAINT,), lacks_a_peer=True), 1: neighbour}
    assert after_a_complaint(hangs, ended=ended, order=[0, 1]).decision is NextStep.RESTART
    assert after_a_complaint(hangs, why_not="it is no HANG").decision is NextStep.RESTART
    assert after_a_complaint(others).why_not
    assert after_a_complaint(RestartPolicy(1)).decision is NextStep.RESTART
    by_function = RestartPolicy(1, retry_if=lambda _: False)
    assert after_a_complaint(by_function, why_not="it is not wanted").why_not == "it is not wanted"


def test_who_may_have_lost_a_peer_is_not_the_cause_where_another_node_has_one_that_failed():
    """Whichever the chair hears of first. If there is none, it has failed for itself."""
    reset, killed = {"rank": 0, "is_secondary": False}, {"rank": 1, "is_secondary": False}
    victim = AttemptReport(0, 0, NodeOutcome.FAILED, (reset,), may_be_victim=True)
    assert (
        after_a_complaint(ended={0: victim, 1: AttemptReport(1, 0, NodeOutcome.FAILED, (killed,))}, order=[0, 1]).cause == 1
    )
    assert after_a_complaint(ended={0: victim, 1: AttemptReport(1, 0, NodeOutcome.STOPPED)}).cause == 0
    assert after_a_complaint(ended={0: victim}, gone={1: "silent"}).cause == 1

"""Simulated jobs with any faults at any time. Hypothesis searches for a history that breaks a guarantee."""

from functools import wraps

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpwatch.multinode.leader import Broadcast, CloseRendezvous
from mpwatch.multinode.node_machine import NodeStage, PrepareRanks
from mpwatch.multinode.protocol.messages import NO_ATTEMPT, AttemptDecision, AttemptReport, NextStep, NodeOutcome
from mpwatch.watcher.machine.transitions import Interrupted, Lease, RankPhase
from multinode.simulation import TIMEOUT, Node, SimulatedJob

JOIN_TIMEOUT = 120.0
LEAVE_SECONDS = 12.0  # seconds that a leader which leaves waits for the others, at most
AT_ONCE = 1.0  # seconds, for a few messages
STOP_SECONDS = 0.5  # seconds after it has woken up, for a node to stop ranks
NODES, WORK = 4, 40.0


def when_awake(method):
    """Delay the call while the node is suspended."""

    @wraps(method)
    def later(self, *args):
        asleep = self.asleep_until - self.job.now
        if asleep > 0:
            self.job.after(asleep, lambda: method(self, *args))
            return None
        return method(self, *args)

    return later


class FaultyNode(Node):
    """A node that may be suspended, leave, or fail to make the environments of its ranks."""

    def __init__(self, job, name):
        super().__init__(job, name)
        self.asleep_until, self.env_seconds = -STOP_SECONDS, 0.0
        self.is_leaving = self.has_failing_env = self.is_refused = False

    poll, handle_deadline = when_awake(Node.poll), when_awake(Node.handle_deadline)

    def join(self, round_, group_rank):
        super().join(round_, group_rank)
        if self.is_leaving:
            self.end()

    feed = when_awake(Node.feed)

    def start(self):
        self.job.note_overlap(self)
        super().start()

    @when_awake
    def send_heartbeat(self):
        super().send_heartbeat()
        if self.ranks is not None and self.is_alive:
            now = self.job.now
            super().feed(Lease(now + 0.65 * TIMEOUT, now + 0.85 * TIMEOUT))

    def execute_node_actions(self, actions):
        for action in actions:
            if isinstance(action, PrepareRanks):
                attempt, round_ = action.start.attempt, self.round
                self.job.after(self.env_seconds, lambda a=attempt, r=round_: self.make_environments(a, r))
            else:
                super().execute_node_actions([action])

    @when_awake
    def make_environments(self, attempt, round_):
        if not self.is_alive or self.round is not round_ or self.node_machine.attempt != attempt:
            return
        if self.node_machine.stage is not NodeStage.PREPARING:
            return
        if self.has_failing_env:
            self.execute_node_actions(self.node_machine.abort(AttemptReport(0, 0, NodeOutcome.ABORTED, reason="env")))
            self.end_when_leader_is_finished()
        else:
            self.execute_node_actions(self.node_machine.start_ranks(attempt))

    def execute_leader_actions(self, actions):
        messages = [action.message for action in actions if isinstance(action, Broadcast)]
        self.job.decisions += [message for message in messages if isinstance(message, AttemptDecision)]
        super().execute_leader_actions(actions)
        if any(isinstance(action, CloseRendezvous) for action in actions):
            self.job.close()

    # faults

    def suspend(self, seconds):
        """Suspend the node and its ranks."""
        job = self.job
        if self.asleep_until > job.now:
            return
        began, self.asleep_until = job.now, job.now + seconds
        if seconds > TIMEOUT:
            job.after(TIMEOUT, lambda: job.expire_asleep(self))
        job.after(seconds, lambda: self.wake(job.now - began))

    def wake(self, seconds_asleep):
        if not self.is_alive or seconds_asleep <= 1.0:
            return
        if self.round is None:
            self.job.rejoin(self)
            return
        self.node_machine.extend_deadlines(seconds_asleep)
        if self.leader is not None:
            self.leader.extend_deadlines(seconds_asleep)
        if seconds_asleep <= TIMEOUT * 0.75:
            return
        if self.leader is None:
            self.execute_node_actions(self.node_machine.withdraw("it was silent"))
        elif not self.leader.has_decided:
            self.execute_leader_actions(self.leader.step_down("it was silent"))
            self.execute_node_actions(self.node_machine.handle_leader_loss("it was silent"))

    @when_awake
    def leave(self):
        if self.is_leaving or not self.is_alive:
            return
        self.is_leaving = True
        if self.round is None or self.is_over():
            self.end()
            return
        self.execute_node_actions(self.node_machine.report_signal("it received SIGTERM"))
        self.feed(Interrupted(15))
        self.end_when_leader_is_finished(self.job.now + LEAVE_SECONDS)

    def end_when_leader_is_finished(self, by=None):
        by = self.job.now + LEAVE_SECONDS if by is None else by
        if self.leader is None or self.leader.is_finished or self.job.now >= by:
            self.end()
        elif self.is_alive:
            self.job.after(0.1, lambda: self.end_when_leader_is_finished(by))

    def end(self):
        self.is_alive = False
        self.ranks = None
        self.job.depart(self)

    @property
    def has_ranks(self):
        phases = () if self.ranks is None else self.ranks.phase_table.phases.values()
        if not self.is_alive or self.asleep_until + STOP_SECONDS > self.job.now:
            return False
        return any(phase not in (RankPhase.EXITED, RankPhase.ABANDONED) for phase in phases)


class FaultyJob(SimulatedJob):
    """A job whose store runs on none of its nodes."""

    node_type = FaultyNode

    def __init__(self, *args, **options):
        self.is_closed, self.overlaps, self.decisions = False, [], []
        super().__init__(*args, **options)

    def rejoin(self, node):
        if self.is_closed:
            self.refuse(node)
            return
        super().rejoin(node)
        since = self.now
        node.waiting_since = since
        self.after(JOIN_TIMEOUT, lambda: self.give_up_joining(node, since))

    def give_up_joining(self, node, since):
        if node.name in self.waiting and node.waiting_since == since:
            self.refuse(node)

    def refuse(self, node):
        node.is_refused = True
        node.end()

    def close(self):
        self.is_closed = True
        for name in list(self.waiting):
            self.refuse(self.nodes_by_name[name])

    def depart(self, node):
        self.participants.discard(node.name)
        self.waiting.discard(node.name)
        self.after(1.0, self._form)

    def expire_asleep(self, node):
        if node.asleep_until > self.now:
            self.depart(node)

    def note_overlap(self, node):
        others = [other for other in self.alive() if other.has_ranks and other.round is not node.round]
        if others and node.round is not None:
            self.overlaps.append((self.now, node.name, [(other.name, other.asleep_until) for other in others]))


TIMES = st.floats(0.0, 90.0, allow_nan=False).map(lambda seconds: round(seconds, 1))
NODE = st.integers(0, NODES - 1)
FAULTS = st.one_of(
    st.tuples(st.just("fail rank"), TIMES, NODE),
    st.tuples(st.just("kill"), TIMES, NODE),
    st.tuples(st.just("leave"), TIMES, NODE),
    st.tuples(st.just("join"), TIMES, st.integers(10, 12)),
    st.tuples(st.just("suspend"), TIMES, NODE, st.sampled_from([2.0, 9.0, 11.0, 12.0, 14.0, 16.0, 25.0, 40.0])),
    st.tuples(st.just("slow env"), TIMES, NODE, st.sampled_from([1.0, 10.0, 20.0])),
    st.tuples(st.just("failing env"), TIMES, NODE),
)


def inject_fault(job, fault, node):
    kind, _, _, *more = fault
    if kind == "fail rank":
        node.fail_rank(0)
    elif kind == "kill":
        job.kill(node.name)
    elif kind == "leave":
        node.leave()
    elif kind == "suspend":
        node.suspend(more[0])
    elif kind == "slow env":
        node.env_seconds = more[0]
    else:
        node.has_failing_env = True


def run_history(least, max_restarts, faults, seed):
    job = FaultyJob(NODES, nprocs=2, nodes=(least, NODES), max_restarts=max_restarts, work=WORK, seed=seed)
    for fault in faults:
        kind, at, number, *_ = fault
        if kind == "join":
            name = f"m{number}"
            job.after(at, lambda name=name: name in job.nodes_by_name or job.add_node(name))
        else:
            name = f"n{number:05}"
            job.after(at, lambda fault=fault, name=name: inject_fault(job, fault, job.nodes_by_name[name]))
    job.run(until=3600.0)
    return job


@settings(max_examples=300)
@given(st.integers(1, NODES), st.integers(0, 2), st.lists(FAULTS, max_size=7), st.integers(0, 3))
@example(1, 0, [*(("leave", 0.0, node) for node in (0, 1, 3)), ("join", 2.0, 10), ("suspend", 2.0, 2, 16.0)], 0)
def test_no_history_breaks_a_guarantee(least, max_restarts, faults, seed):
    """A node that was silent for too long while it was alone reports itself as lost. Another node may have gone on meanwhile."""
    job = run_history(least, max_restarts, faults, seed)
    assert job.is_over(), "a node waits without limit"
    nodes = [node for node in job.alive() if not node.is_refused and node.decision.attempt != NO_ATTEMPT]
    decisions = [node.decision for node in nodes if node.name not in {lost.hostname for lost in node.decision.lost_nodes}]
    assert (
        len({(decision.next_step, decision.history, decision.root_cause_rank, decision.attempt) for decision in decisions})
        <= 1
    )
    assert all(decision.history.restarts_used <= max_restarts for decision in decisions)
    restarts = [
        decision
        for decision in job.decisions
        if decision.failures and decision.next_step in (NextStep.RESTART, NextStep.RE_RENDEZVOUS)
    ]
    assert len(restarts) <= max_restarts
    started = [decision.attempt for decision in job.decisions if decision.history.attempts > decision.attempt]
    assert len(started) == len(set(started)), "two decisions about one attempt"
    assert not job.overlaps


FAILURES = st.lists(st.tuples(st.just("fail rank"), TIMES, NODE), max_size=3)


@settings(max_examples=100)
@given(TIMES, st.integers(1, NODES), st.integers(0, 2), FAILURES, st.integers(0, 3))
def test_no_node_waits_for_others_if_all_leave(at, least, max_restarts, failures, seed):
    job = run_history(least, max_restarts, [*failures, *(("leave", at, node) for node in range(NODES))], seed)
    assert job.is_over()
    assert job.now < at + AT_ONCE


SHORT = TIMEOUT / 3


@settings(max_examples=100)
@given(st.lists(st.tuples(st.just("suspend"), TIMES, NODE, st.floats(0.1, SHORT)), max_size=5), st.integers(0, 3))
def test_nodes_that_are_silent_for_a_short_time_cost_no_attempt(faults, seed):
    job = run_history(NODES, 0, faults, seed)
    assert {(node.decision.next_step, node.decision.history.attempts) for node in job.all()} == {(NextStep.DONE, 1)}

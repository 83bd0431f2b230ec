"""Jobs of several nodes to which anything happens at any time: Hypothesis looks for a history that breaks a promise."""

from functools import wraps

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import TIMEOUT, Node, World

from mpwatch.multinode.leader import Broadcast, CloseJob
from mpwatch.multinode.node_machine import NodeStage, PrepareRanks
from mpwatch.multinode.protocol.messages import NO_ATTEMPT, AttemptDecision, AttemptReport, NextStep, NodeOutcome
from mpwatch.watcher.machine.transitions import Interrupted, Lease, RankPhase

JOIN_TIMEOUT = 120.0
LEAVE = 12.0  # seconds that a chair which leaves waits for the others, at most
STOPPED_WITHIN = 0.5  # seconds after it has woken up, for a node to stop ranks
NODES, WORK = 4, 40.0


def awake(method):
    """Done when the node is."""

    @wraps(method)
    def later(self, *args):
        asleep = self.asleep_until - self.world.now
        if asleep > 0:
            self.world.after(asleep, lambda: method(self, *args))
            return None
        return method(self, *args)

    return later


class Frail(Node):
    """It may be suspended, leave, or fail to make its environments; its ranks may resist their end."""

    def __init__(self, world, name):
        super().__init__(world, name)
        self.asleep_until, self.env_seconds = -STOPPED_WITHIN, 0.0
        self.is_leaving = self.has_broken_env = self.is_refused = False

    look, expire = awake(Node.look), awake(Node.expire)

    def join(self, round_, group_rank):
        super().join(round_, group_rank)
        if self.is_leaving:
            self.end()

    feed = awake(Node.feed)

    def start(self):
        self.world.note_overlap(self)
        super().start()

    @awake
    def beat(self):
        super().beat()
        if self.ranks is not None and self.is_alive:
            now = self.world.now
            super().feed(Lease(now + 0.65 * TIMEOUT, now + 0.85 * TIMEOUT))

    def do(self, actions):
        for action in actions:
            if isinstance(action, PrepareRanks):
                attempt, round_ = action.start.attempt, self.round
                self.world.after(self.env_seconds, lambda a=attempt, r=round_: self.make_environments(a, r))
            else:
                super().do([action])

    @awake
    def make_environments(self, attempt, round_):
        if not self.is_alive or self.round is not round_ or self.member.attempt != attempt:
            return
        if self.member.stage is not NodeStage.PREPARING:
            return
        if self.has_broken_env:
            self.do(self.member.abort(AttemptReport(0, 0, NodeOutcome.ABORTED, reason="env")))
            self.end_when_free()
        else:
            self.do(self.member.prepared(attempt))

    def act(self, acts):
        self.world.said += [act.word for act in acts if isinstance(act, Broadcast) and isinstance(act.word, AttemptDecision)]
        super().act(acts)
        if any(isinstance(act, CloseJob) for act in acts):
            self.world.close()

    # what may happen

    def suspend(self, seconds):
        """With its ranks."""
        world = self.world
        if self.asleep_until > world.now:
            return
        began, self.asleep_until = world.now, world.now + seconds
        if seconds > TIMEOUT:
            world.after(TIMEOUT, lambda: world.expire_asleep(self))
        world.after(seconds, lambda: self.wake(world.now - began))

    def wake(self, gap):
        if not self.is_alive or gap <= 1.0:
            return
        if self.round is None:
            self.world.rejoin(self)
            return
        self.member.forgive(gap)
        if self.chair is not None:
            self.chair.forgive(gap)
        if gap <= TIMEOUT * 0.75:
            return
        if self.chair is None:
            self.do(self.member.resign("it was silent"))
        elif not self.chair.is_closing:
            self.act(self.chair.resign("it was silent"))
            self.do(self.member.lose_chair("it was silent"))

    @awake
    def leave(self):
        if self.is_leaving or not self.is_alive:
            return
        self.is_leaving = True
        if self.round is None or self.is_over():
            self.end()
            return
        self.do(self.member.leave("it received SIGTERM"))
        self.feed(Interrupted(15))
        self.end_when_free(self.world.now + LEAVE)

    def end_when_free(self, by=None):
        by = self.world.now + LEAVE if by is None else by
        if self.chair is None or self.chair.is_over or self.world.now >= by:
            self.end()
        elif self.is_alive:
            self.world.after(0.1, lambda: self.end_when_free(by))

    def end(self):
        self.is_alive = False
        self.ranks = None
        self.world.depart(self)

    @property
    def has_ranks(self):
        phases = () if self.ranks is None else self.ranks.phase_table.phases.values()
        if not self.is_alive or self.asleep_until + STOPPED_WITHIN > self.world.now:
            return False
        return any(phase not in (RankPhase.EXITED, RankPhase.ABANDONED) for phase in phases)


class Job(World):
    """In which a round's store is elsewhere."""

    kind = Frail

    def __init__(self, *args, **options):
        self.is_closed, self.overlaps, self.said = False, [], []
        super().__init__(*args, **options)

    def rejoin(self, node):
        if self.is_closed:
            self.refuse(node)
            return
        super().rejoin(node)
        since = self.now
        node.waits_since = since
        self.after(JOIN_TIMEOUT, lambda: self.give_up_waiting(node, since))

    def give_up_waiting(self, node, since):
        if node.name in self.lobby and node.waits_since == since:
            self.refuse(node)

    def refuse(self, node):
        node.is_refused = True
        node.end()

    def close(self):
        self.is_closed = True
        for name in list(self.lobby):
            self.refuse(self.nodes_by_name[name])

    def depart(self, node):
        self.participants.discard(node.name)
        self.lobby.discard(node.name)
        self.after(1.0, self._form)

    def expire_asleep(self, node):
        if node.asleep_until > self.now:
            self.depart(node)

    def note_overlap(self, node):
        others = [other for other in self.alive() if other.has_ranks and other.round is not node.round]
        if others and node.round is not None:
            self.overlaps.append((self.now, node.name, [(other.name, other.asleep_until) for other in others]))


MOMENTS = st.floats(0.0, 90.0, allow_nan=False).map(lambda seconds: round(seconds, 1))
NODE = st.integers(0, NODES - 1)
HAPPENS = st.one_of(
    st.tuples(st.just("break"), MOMENTS, NODE),
    st.tuples(st.just("kill"), MOMENTS, NODE),
    st.tuples(st.just("leave"), MOMENTS, NODE),
    st.tuples(st.just("come"), MOMENTS, st.integers(10, 12)),
    st.tuples(st.just("suspend"), MOMENTS, NODE, st.sampled_from([2.0, 9.0, 11.0, 12.0, 14.0, 16.0, 25.0, 40.0])),
    st.tuples(st.just("slow env"), MOMENTS, NODE, st.sampled_from([1.0, 10.0, 20.0])),
    st.tuples(st.just("broken env"), MOMENTS, NODE),
)


def let_happen(job, what, node):
    kind, _, _, *more = what
    if kind == "break":
        node.break_rank(0)
    elif kind == "kill":
        job.kill(node.name)
    elif kind == "leave":
        node.leave()
    elif kind == "suspend":
        node.suspend(more[0])
    elif kind == "slow env":
        node.env_seconds = more[0]
    else:
        node.has_broken_env = True


def history(least, max_restarts, happens, seed):
    job = Job(NODES, nprocs=2, nodes=(least, NODES), max_restarts=max_restarts, work=WORK, seed=seed)
    for what in happens:
        kind, at, number, *_ = what
        if kind == "come":
            name = f"m{number}"
            job.after(at, lambda name=name: name in job.nodes_by_name or job.come(name))
        else:
            name = f"n{number:05}"
            job.after(at, lambda what=what, name=name: let_happen(job, what, job.nodes_by_name[name]))
    job.run(until=3600.0)
    return job


@settings(max_examples=300, deadline=None)
@given(st.integers(1, NODES), st.integers(0, 2), st.lists(HAPPENS, max_size=7), st.integers(0, 3))
def test_no_history_breaks_a_promise(least, max_restarts, happens, seed):
    job = history(least, max_restarts, happens, seed)
    assert job.is_over(), "somebody waits for ever"
    told = [node.verdict for node in job.alive() if not node.is_refused and node.verdict.attempt != NO_ATTEMPT]
    assert len({(verdict.decision, verdict.history, verdict.cause, verdict.attempt) for verdict in told}) <= 1
    assert all(verdict.history.used <= max_restarts for verdict in told)
    tried_again = [
        said for said in job.said if said.failures and said.decision in (NextStep.RESTART, NextStep.RE_RENDEZVOUS)
    ]
    assert len(tried_again) <= max_restarts
    begun = [said.attempt for said in job.said if said.history.attempts > said.attempt]
    assert len(begun) == len(set(begun)), "two verdicts on an attempt"
    assert not job.overlaps


MOMENT = TIMEOUT / 3


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.just("suspend"), MOMENTS, NODE, st.floats(0.1, MOMENT)), max_size=5), st.integers(0, 3))
def test_nodes_that_are_silent_for_a_moment_harm_nobody(happens, seed):
    job = history(NODES, 0, happens, seed)
    assert {(node.verdict.decision, node.verdict.history.attempts) for node in job.all()} == {(NextStep.DONE, 1)}

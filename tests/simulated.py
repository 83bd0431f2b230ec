"""A job of many nodes without a network: real members, chairs and machines of ranks, and a store, a rendezvous and ranks
that are played. Time is virtual, and every message is counted.
"""

import heapq
import itertools
import random
from collections import Counter

from mpwatch.multinode.leader import Broadcast, Leader, PublishAssignments, ReservePort
from mpwatch.multinode.node_machine import NodeMachine, PrepareRanks, Rejoin, ReportJob, SendToLeader, StartRanks, StopRanks
from mpwatch.multinode.protocol.messages import AttemptReport, JobConfig, NodeInfo, NodeOutcome, RestartHistory
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.machine.transitions import (
    CancelAttempt,
    Exited,
    Failed,
    Ready,
    RequestExit,
    Restart,
    Returned,
    RunStage,
    SendSignal,
    StartCall,
    StartRank,
    StopReason,
)

POLL, BEAT, TIMEOUT = 0.1, 2.5, 15.0
RANKS = (StopReason.FAILED, StopReason.SUCCEEDED, StopReason.TIMED_OUT, StopReason.CANCELLED_BY_JOB)


class Round:
    """The store of one round."""

    def __init__(self, names):
        self.names = names  # by group rank
        self.inbox, self.words, self.places = [], [], {}
        self.heartbeats = Counter()


class Node:
    """One node: what it runs in a round, and its ranks."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.is_alive = True
        self.round = self.member = self.chair = self.ranks = None
        self.history = RestartHistory()
        self.verdict = None
        self.attempts = 0

    def join(self, round_, group_rank):
        world, now = self.world, self.world.now
        self.round, self.group_rank, self.told, self.heard = round_, group_rank, 0, 0
        card = NodeInfo(
            group_rank, self.name, self.name, world.nprocs, "default", False, 10.0, self.name, JobConfig(()), self.history
        )
        size = len(round_.names)
        limits = {"node_timeout": TIMEOUT, "now": now}
        self.member = NodeMachine(
            card, size=size, min_nodes=world.nodes[0], max_restarts=world.policy.max_restarts, **limits
        )
        self.chair = None
        if group_rank == 0:
            self.chair = Leader(
                size=size,
                nodes=world.nodes,
                policy=world.policy,
                exit_barrier_timeout=300.0,
                chance=world.chance.random,
                **limits,
            )
        self.do(self.member.begin())
        world.after(0.0, self.beat)

    def beat(self):
        if self.is_alive and not self.is_over() and not (self.chair and self.chair.is_over):
            round_, now = self.round, self.world.now
            round_.heartbeats[self.group_rank] += 1
            self.do(self.member.see_chair(round_.heartbeats[0], now))
            if self.chair is not None:
                self.act(self.chair.see_waiting(len(self.world.lobby), now))
                self.act(self.chair.see_beats(dict(round_.heartbeats), now))
                self.act(self.chair.expire(now))
            self.world.after(BEAT, self.beat)

    def look(self):
        """At the board, as a poll does that finds something new."""
        if not self.is_alive or self.round is None:
            return
        round_, world = self.round, self.world
        while self.chair is not None and self.heard < len(round_.inbox):
            message = round_.inbox[self.heard]
            self.heard += 1
            world.count("inbox read")
            self.act(self.chair.hear(message, world.now))
        while self.told < len(round_.words) and not self.member.is_over:
            word = round_.words[self.told]
            self.told += 1
            world.count("word read")
            self.do(self.member.hear(word))
        if (attempt := self.member.wants_place) is not None:
            world.count("place read")
            self.do(self.member.placed(round_.places[attempt, self.group_rank]))

    def is_over(self):
        return self.round is None or (self.member.is_over and (self.chair is None or self.chair.is_over))

    def do(self, actions):
        for action in actions:
            if isinstance(action, SendToLeader):
                self.world.count("inbox write")
                self.round.inbox.append(action.message)
                self.world.poll(self.round, [0])
            elif isinstance(action, PrepareRanks):
                self.do(self.member.prepared(action.start.attempt))
            elif isinstance(action, StartRanks):
                self.start()
            elif isinstance(action, StopRanks):
                self.feed(CancelAttempt())
            elif isinstance(action, Rejoin):
                self.history = action.history
                self.world.rejoin(self)
            elif isinstance(action, ReportJob):
                self.verdict = action.verdict
                self.do(self.member.concluded())

    def act(self, acts):
        for act in acts:
            if isinstance(act, Broadcast):
                self.world.count("word write")
                self.round.words.append(act.word)
                self.world.poll(self.round, range(len(self.round.names)))
            elif isinstance(act, PublishAssignments):
                self.world.count("place write", len(act.places))
                self.round.places |= {(place.attempt, place.group_rank): place for place in act.places}
            elif isinstance(act, ReservePort):
                self.act(self.chair.reserved(29500))

    def start(self):
        world = self.world
        self.attempts += 1
        if self.ranks is None:
            self.ranks = StateMachine((), now=world.now, grace_period=10.0, judged=RANKS)
            self.feed(StartCall(world.now))
        place = self.round.places[self.member.attempt, self.group_rank]
        ranks = tuple(range(place.rank, place.rank + world.nprocs))
        self.feed(Restart(ranks[0], generation=self.ranks.generation, ranks=ranks))
        life = self.ranks.generation
        for rank in ranks:
            world.after(0.5, lambda rank=rank: self.feed(Ready(rank, generation=life)))
            world.after(0.5 + world.work, lambda rank=rank: self.feed(Returned(rank, generation=life)))

    def feed(self, event):
        if not self.is_alive or self.ranks is None:
            return
        machine, now = self.ranks, self.world.now
        if getattr(event, "generation", machine.generation) < machine.generation or machine.stage is RunStage.FINISHED:
            return
        rank = getattr(event, "rank", None)
        if isinstance(event, Ready | Returned | Failed | Exited) and not self.can(rank, event):
            return
        was = machine.verdict
        self.obey(machine.handle(event, now))
        self.settle(was)

    def can(self, rank, event):
        phase = self.ranks.phase_table.phases.get(rank)
        if phase is None or phase.name in ("EXITED", "ABANDONED"):
            return False
        if isinstance(event, Returned | Failed):
            return phase.name == "RUNNING"
        return phase.name == "STARTING" if isinstance(event, Ready) else True

    def settle(self, was):
        machine = self.ranks
        if machine.verdict is not was and machine.verdict is StopReason.FAILED:
            self.do(self.member.failing())
        if machine.stage is RunStage.AWAITING_DECISION and self.unreported:
            self.unreported = False
            self.do(self.member.stopped())
            self.do(self.member.ended(self.report()))

    unreported = False

    def obey(self, actions):
        machine, world = self.ranks, self.world
        life = machine.generation
        for action in actions:
            if isinstance(action, StartRank):
                self.unreported = True
                self.cause = None
            elif isinstance(action, SendSignal | RequestExit):
                world.after(0.05, lambda rank=action.rank: self.feed(Exited(rank, generation=life)))
        if machine.deadline is not None:
            world.after(max(0.0, machine.deadline - world.now), self.expire)

    def expire(self):
        if self.is_alive and self.ranks is not None and self.ranks.deadline is not None:
            was = self.ranks.verdict
            self.obey(self.ranks.expire(self.world.now))
            self.settle(was)

    def report(self):
        verdict = self.ranks.verdict
        outcome = {StopReason.SUCCEEDED: NodeOutcome.SUCCEEDED, StopReason.CANCELLED_BY_JOB: NodeOutcome.STOPPED}.get(
            verdict, NodeOutcome.FAILED
        )
        failures = ({"rank": self.cause, "is_secondary": False},) if outcome is NodeOutcome.FAILED else ()
        return AttemptReport(0, 0, outcome, failures)

    def break_rank(self, local_rank):
        if self.is_alive and self.ranks is not None and self.ranks.is_undecided():
            rank = list(self.ranks.phase_table.phases)[local_rank]
            if self.ranks.phase_table.phases[rank].name == "RUNNING":
                self.cause = rank
                self.world.failures += 1
                self.feed(Exited(rank, generation=self.ranks.generation))


class World:
    """A job."""

    kind = Node

    def __init__(self, n, *, nprocs=8, nodes=None, max_restarts=10**6, work=60.0, seed=0):
        self.now, self._ticket, self._heap = 0.0, itertools.count(), []
        self.chance = random.Random(seed)
        self.nprocs, self.nodes, self.work = nprocs, nodes or (n, n), work
        self.policy = RestartPolicy(max_restarts)
        self.messages, self.failures = Counter(), 0
        self.nodes_by_name = {f"n{i:05}": self.kind(self, f"n{i:05}") for i in range(n)}
        self.lobby, self.participants, self._polled = set(), set(), set()
        for node in self.all():
            self.rejoin(node)

    def all(self):
        return list(self.nodes_by_name.values())

    def alive(self):
        return [node for node in self.all() if node.is_alive]

    def count(self, what, n=1):
        self.messages[what] += n

    def after(self, seconds, call):
        heapq.heappush(self._heap, (self.now + seconds, next(self._ticket), call))

    def poll(self, round_, group_ranks):
        """Those nodes find something new when they look the next time."""
        for group_rank in group_ranks:
            if (id(round_), group_rank) not in self._polled:
                self._polled.add((id(round_), group_rank))
                self.after(self.chance.uniform(0.0, POLL), lambda g=group_rank: self._look(round_, g))

    def _look(self, round_, group_rank):
        self._polled.discard((id(round_), group_rank))
        node = self.nodes_by_name[round_.names[group_rank]]
        if node.round is round_:
            node.look()

    def rejoin(self, node):
        """The node waits for the next round, which forms a second after the last one of the round before has left it."""
        self.participants.discard(node.name)
        self.lobby.add(node.name)
        node.round = None
        self.after(1.0, self._form)

    def _form(self):
        if self.participants or len(self.lobby) < self.nodes[0]:
            return
        names = sorted(self.lobby)[: self.nodes[1]]
        self.lobby -= set(names)
        self.participants = set(names)
        round_ = Round(names)
        for group_rank, name in enumerate(names):
            self.nodes_by_name[name].join(round_, group_rank)

    def kill(self, name):
        node = self.nodes_by_name[name]
        if node.is_alive:
            self.failures += 1
            node.is_alive = False
            self.after(TIMEOUT, lambda: self._expire(name))

    def _expire(self, name):
        """Torch's rendezvous finds out, too."""
        self.participants.discard(name)
        self.lobby.discard(name)
        self._form()

    def come(self, name):
        self.nodes_by_name[name] = self.kind(self, name)
        self.rejoin(self.nodes_by_name[name])

    def run(self, until=3600.0):
        while self._heap and self.now < until and not self.is_over():
            self.now, _, call = heapq.heappop(self._heap)
            call()

    def is_over(self):
        return all(node.verdict is not None for node in self.alive())

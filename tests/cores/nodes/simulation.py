"""Simulate a job of many nodes without a network, with any faults.

The state machines of nodes and leaders are real. The store, the rendezvous and the ranks are simulated: the store runs on none
of the nodes, and the ranks of a node start, fail, return and stop together. Time is virtual.
"""

import heapq
import itertools
import random
from collections import Counter
from enum import Enum, auto
from functools import wraps

from mpwatch import RestartPolicy
from mpwatch.multinode import leader, node_machine
from mpwatch.multinode.protocol import messages
from mpwatch.multinode.protocol.messages import NodeOutcome

POLL_SECONDS, HEARTBEAT_INTERVAL, TIMEOUT = 0.1, 2.5, 15.0
JOIN_TIMEOUT = 120.0
LEAVE_SECONDS = 12.0  # seconds that a leader which leaves waits for the others, at most
STOP_SECONDS = 0.5  # seconds after it has woken up, for a node to stop ranks
START_SECONDS, EXIT_SECONDS = 0.5, 0.05  # of ranks
LEASE_SECONDS = 0.65 * TIMEOUT  # after its last heartbeat, a node stops its ranks


class Ranks(Enum):
    NONE = auto()
    STARTING = auto()
    RUNNING = auto()
    STOPPING = auto()


class Round:
    """The store of one round."""

    def __init__(self, names):
        self.names = names  # by group rank
        self.inbox, self.broadcasts, self.assignments = [], [], {}
        self.heartbeats = Counter()


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


class Node:
    """One node: its state machines in a round, and its ranks. It may be suspended, leave, or fail to make environments."""

    def __init__(self, job, name):
        self.job, self.name = job, name
        self.is_alive = True
        self.round = self.node_machine = self.leader = self.decision = None
        self.ranks, self.start_number, self.lease_ends_at = Ranks.NONE, 0, 0.0
        self.history, self.expected_nodes = messages.RestartHistory(), None
        self.stop_step = None  # that the nodes have agreed on
        self.is_stop_requested = self.is_leaving = self.has_failing_env = self.is_refused = False
        self.asleep_until, self.env_seconds = -STOP_SECONDS, 0.0

    def join(self, round_, group_rank):
        job, now = self.job, self.job.now
        self.round, self.group_rank, self.broadcasts_read, self.inbox_read = round_, group_rank, 0, 0
        limits = {"size": len(round_.names), "node_timeout": TIMEOUT, "now": now}
        info = messages.NodeInfo(
            group_rank, self.name, self.name, job.nprocs, "default", False, 10.0, messages.JobConfig(()), self.history
        )
        self.node_machine = node_machine.NodeMachine(
            info, min_nodes=job.nnodes[0], max_restarts=job.policy.max_restarts, **limits
        )
        self.leader = None
        if group_rank == 0:
            of_job = {"nnodes": job.nnodes, "policy": job.policy, "rng": job.rng.random}
            self.leader = leader.Leader(**of_job, exit_barrier_timeout=300.0, **limits)
        self.execute_node_actions(self.node_machine.send_node_info())
        job.after(0.0, self.send_heartbeat)
        if self.is_leaving:
            self.end()

    @when_awake
    def send_heartbeat(self):
        if not self.is_alive:
            return
        now, round_ = self.job.now, self.round
        if not self.is_over() and not (self.leader and self.leader.has_stepped_down):
            round_.heartbeats[self.group_rank] += 1
            self.execute_node_actions(self.node_machine.check_leader_heartbeat(round_.heartbeats[0], now))
            if self.leader is not None:
                self.execute_leader_actions(self.leader.update_waiting_nodes(len(self.job.waiting), now))
                self.execute_leader_actions(self.leader.check_heartbeats(dict(round_.heartbeats), now))
                self.execute_leader_actions(self.leader.handle_deadline(now))
            self.job.after(HEARTBEAT_INTERVAL, self.send_heartbeat)
        self.lease_ends_at = now + LEASE_SECONDS
        self.job.after(LEASE_SECONDS, self.check_lease)

    @when_awake
    def check_lease(self):
        if self.job.now >= self.lease_ends_at:
            self.stop(NodeOutcome.STOPPED)

    @when_awake
    def poll(self):
        """Read new messages, as RoundRunner does."""
        if not self.is_alive or self.round is None:
            return
        round_ = self.round
        while self.leader is not None and self.inbox_read < len(round_.inbox):
            self.inbox_read += 1
            self.job.messages += 1
            message = round_.inbox[self.inbox_read - 1]
            self.execute_leader_actions(self.leader.handle_message(message, self.job.now))
        while self.broadcasts_read < len(round_.broadcasts) and not self.node_machine.is_finished:
            self.broadcasts_read += 1
            self.job.messages += 1
            self.execute_node_actions(self.node_machine.handle_broadcast(round_.broadcasts[self.broadcasts_read - 1]))
        if (attempt := self.node_machine.awaited_assignment) is not None:
            self.execute_node_actions(self.node_machine.handle_assignment(round_.assignments[attempt, self.group_rank]))

    def is_over(self):
        return self.round is None or (self.node_machine.is_finished and (self.leader is None or self.leader.is_finished))

    def execute_node_actions(self, actions):
        job = self.job
        for action in actions:
            if isinstance(action, node_machine.SendToLeader):
                job.messages += 1
                self.round.inbox.append(action.message)
                job.schedule_polls(self.round, [0])
            elif isinstance(action, node_machine.PrepareRanks):
                attempt, round_ = action.start.attempt, self.round
                job.after(self.env_seconds, lambda a=attempt, r=round_: self.make_environments(a, r))
            elif isinstance(action, node_machine.StartRanks):
                self.start()
            elif isinstance(action, node_machine.StopRanks):
                self.stop(NodeOutcome.STOPPED)
            elif isinstance(action, node_machine.HoldRanks):
                job.after(0.002, self.report_steps)
            elif isinstance(action, node_machine.AgreeOnStep):
                self.stop_step = action.after_step
                self.let_ranks_return(0.6)
            elif isinstance(action, node_machine.Rejoin) and self.is_stop_requested:
                self.refuse()
            elif isinstance(action, node_machine.Rejoin):
                self.history, self.expected_nodes = action.history, action.expected_nodes
                job.rejoin(self)
            elif isinstance(action, node_machine.ReportJob):
                self.decision = action.decision
                self.execute_node_actions(self.node_machine.acknowledge_shutdown())

    def execute_leader_actions(self, actions):
        for action in actions:
            if isinstance(action, leader.Broadcast):
                self.job.messages += 1
                self.job.decisions += [action.message] * isinstance(action.message, messages.AttemptDecision)
                self.round.broadcasts.append(action.message)
                self.job.schedule_polls(self.round, range(len(self.round.names)))
            elif isinstance(action, leader.PublishAssignments):
                self.round.assignments |= {(each.attempt, each.group_rank): each for each in action.assignments}
            elif isinstance(action, leader.ReservePort):
                self.execute_leader_actions(self.leader.start_attempt(29500))
            elif isinstance(action, leader.CloseRendezvous):
                self.job.close()

    @when_awake
    def make_environments(self, attempt, round_):
        machine = self.node_machine
        if not self.is_alive or self.round is not round_ or machine.attempt != attempt:
            return
        if machine.stage is node_machine.NodeStage.PREPARING and self.has_failing_env:
            self.execute_node_actions(machine.abort(messages.AttemptReport(0, 0, NodeOutcome.ABORTED, reason="env")))
            self.end_when_leader_is_finished()
        elif machine.stage is node_machine.NodeStage.PREPARING:
            self.execute_node_actions(machine.start_ranks(attempt))

    # ranks

    def start(self):
        self.job.note_overlap(self)
        self.ranks, self.start_number = Ranks.STARTING, self.start_number + 1
        self.job.after(START_SECONDS, lambda number=self.start_number: self.become_ready(number))
        self.let_ranks_return(self.job.work)

    @when_awake
    def become_ready(self, number):
        if number == self.start_number and self.ranks is Ranks.STARTING:
            self.ranks = Ranks.RUNNING

    def let_ranks_return(self, seconds):
        self.job.after(START_SECONDS + seconds, lambda number=self.start_number: self.return_(number))

    @when_awake
    def return_(self, number):
        if number == self.start_number and self.ranks is Ranks.RUNNING:
            self.stop(NodeOutcome.SUCCEEDED)

    def stop(self, outcome):
        """Stop the ranks. The node reports `outcome`, or nothing if that is None."""
        if self.is_alive and self.ranks in (Ranks.STARTING, Ranks.RUNNING):
            self.ranks = Ranks.STOPPING
            if outcome is NodeOutcome.FAILED:
                self.execute_node_actions(self.node_machine.report_failing())
            self.job.after(EXIT_SECONDS, lambda: self.reap(outcome))

    @when_awake
    def reap(self, outcome):
        self.ranks = Ranks.NONE
        if self.is_alive and outcome is not None:
            first = self.round.assignments[self.node_machine.attempt, self.group_rank].first_rank
            failures = ({"rank": first, "is_secondary": False},) if outcome is NodeOutcome.FAILED else ()
            self.execute_node_actions(self.node_machine.report_ranks_stopped())
            self.execute_node_actions(self.node_machine.report_attempt(messages.AttemptReport(0, 0, outcome, failures)))

    def report_steps(self):
        if self.is_alive and self.round is not None:
            self.execute_node_actions(self.node_machine.report_steps_held(self.job.rng.randrange(1000)))

    @property
    def has_ranks(self):
        is_awake = self.asleep_until + STOP_SECONDS <= self.job.now
        return self.is_alive and is_awake and self.ranks is not Ranks.NONE

    # faults, and requests to stop

    @when_awake
    def fail_rank(self):
        if self.ranks is Ranks.RUNNING:
            self.stop(NodeOutcome.FAILED)

    def kill(self):
        if self.is_alive:
            self.is_alive = False
            self.job.after(TIMEOUT, lambda: self.job.depart(self))  # torch drops it after its own timeout

    def suspend(self, seconds):
        """Suspend the node and its ranks."""
        job = self.job
        if self.asleep_until > job.now:
            return
        self.asleep_until = job.now + seconds
        if seconds > TIMEOUT:
            job.after(TIMEOUT, lambda: self.asleep_until > job.now and job.depart(self))
        job.after(seconds, lambda: self.wake(seconds))

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

    def request_stop(self):
        """Request a stop of the job, or give up if this node is in a rendezvous."""
        self.is_stop_requested = True
        if self.is_alive and self.round is not None:
            self.execute_node_actions(self.node_machine.request_stop("SIGUSR1"))
        elif self.is_alive:
            self.refuse()

    @when_awake
    def leave(self):
        if self.is_leaving or not self.is_alive:
            return
        self.is_leaving = True
        if self.round is None or self.is_over():
            self.end()
            return
        self.execute_node_actions(self.node_machine.report_signal("it received SIGTERM"))
        self.stop(outcome=None)
        self.end_when_leader_is_finished()

    def end_when_leader_is_finished(self, by=None):
        by = self.job.now + LEAVE_SECONDS if by is None else by
        if self.leader is None or self.leader.is_finished or self.job.now >= by:
            self.end()
        elif self.is_alive:
            self.job.after(0.1, lambda: self.end_when_leader_is_finished(by))

    def refuse(self):
        self.is_refused = True
        self.end()

    def end(self):
        self.is_alive = False
        self.job.depart(self)


class SimulatedJob:
    """All nodes of a job, the rendezvous, and the clock."""

    def __init__(self, n, *, nprocs=2, nnodes=None, max_restarts=10**6, work=60.0, seed=0):
        self.now, self._ticket, self._heap = 0.0, itertools.count(), []
        self.rng = random.Random(seed)
        self.nprocs, self.nnodes, self.work = nprocs, nnodes or (n, n), work
        self.policy = RestartPolicy(max_restarts)
        self.messages, self.is_closed, self.overlaps, self.decisions = 0, False, [], []
        self.waiting, self.participants, self._polled = set(), set(), set()
        self.nodes = {}
        for number in range(n):
            self.add_node(number)

    def add_node(self, number):
        if number not in self.nodes:
            self.nodes[number] = Node(self, f"n{number:05}")
            self.rejoin(self.nodes[number])

    def alive(self):
        return [node for node in self.nodes.values() if node.is_alive]

    def after(self, seconds, call):
        heapq.heappush(self._heap, (self.now + seconds, next(self._ticket), call))

    def schedule_polls(self, round_, group_ranks):
        """Have these nodes poll the store within POLL_SECONDS."""
        for group_rank in group_ranks:
            if (id(round_), group_rank) not in self._polled:
                self._polled.add((id(round_), group_rank))
                self.after(self.rng.uniform(0.0, POLL_SECONDS), lambda g=group_rank: self._poll(round_, g))

    def _poll(self, round_, group_rank):
        self._polled.discard((id(round_), group_rank))
        node = round_.names[group_rank]
        if node.round is round_:
            node.poll()

    def rejoin(self, node):
        """Let the node wait for the next round. It forms one second after the last node has left the round before."""
        if self.is_closed:
            node.refuse()
            return
        node.round, node.waiting_since = None, self.now
        self.participants.discard(node)
        self.waiting.add(node)
        self.after(1.0, self._form)
        self.after(JOIN_TIMEOUT, lambda since=self.now: self._give_up_joining(node, since))

    def _give_up_joining(self, node, since):
        if node in self.waiting and node.waiting_since == since:
            node.refuse()

    def _form(self):
        if self.participants or len(self.waiting) < self.nnodes[0]:
            return
        nodes = sorted(self.waiting, key=lambda node: node.name)[: self.nnodes[1]]
        self.waiting -= set(nodes)
        self.participants = set(nodes)
        round_ = Round(nodes)
        for group_rank, node in enumerate(nodes):
            node.join(round_, group_rank)

    def close(self):
        self.is_closed = True
        for node in list(self.waiting):
            node.refuse()

    def depart(self, node):
        self.participants.discard(node)
        self.waiting.discard(node)
        self.after(1.0, self._form)

    def note_overlap(self, node):
        """Note ranks of another round that still run when a node starts its ranks."""
        self.overlaps += [
            (self.now, node.name, other.name)
            for other in self.alive()
            if other.has_ranks and other.round is not node.round is not None
        ]

    def run(self, until=3600.0):
        while self._heap and self.now < until and not self.is_over():
            self.now, _, call = heapq.heappop(self._heap)
            call()
        return self

    def is_over(self):
        return all(node.decision is not None for node in self.alive())

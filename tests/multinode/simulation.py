"""Simulate a job of many nodes without a network.

The state machines of nodes, leaders and ranks are real. The store, the rendezvous and the ranks are simulated. Time is
virtual, and every message is counted.
"""

import heapq
import itertools
import random
from collections import Counter

from mpwatch.multinode.leader import Broadcast, Leader, PublishAssignments, ReservePort
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
    StopRequested,
)

POLL_SECONDS, HEARTBEAT_INTERVAL, TIMEOUT = 0.1, 2.5, 15.0
DECIDE_AFTER = (StopReason.FAILED, StopReason.SUCCEEDED, StopReason.TIMED_OUT, StopReason.CANCELLED_BY_JOB)


class Round:
    """The store of one round."""

    def __init__(self, names):
        self.names = names  # by group rank
        self.inbox, self.broadcasts, self.assignments = [], [], {}
        self.heartbeats = Counter()


class Node:
    """One node: its state machines in a round, and its ranks."""

    def __init__(self, job, name):
        self.job, self.name = job, name
        self.is_alive = True
        self.round = self.node_machine = self.leader = self.ranks = None
        self.history = RestartHistory()
        self.decision = None
        self.attempts = 0
        self.is_stop_requested = self.has_left = False
        self.stop_step = None  # that the nodes have agreed on

    def join(self, round_, group_rank):
        job, now = self.job, self.job.now
        self.round, self.group_rank, self.broadcasts_read, self.inbox_read = round_, group_rank, 0, 0
        node_info = NodeInfo(
            group_rank, self.name, self.name, job.nprocs, "default", False, 10.0, JobConfig(()), self.history
        )
        size = len(round_.names)
        limits = {"node_timeout": TIMEOUT, "now": now}
        self.node_machine = NodeMachine(
            node_info, size=size, min_nodes=job.nodes[0], max_restarts=job.policy.max_restarts, **limits
        )
        self.leader = None
        if group_rank == 0:
            self.leader = Leader(
                size=size,
                nnodes=job.nodes,
                policy=job.policy,
                exit_barrier_timeout=300.0,
                rng=job.rng.random,
                **limits,
            )
        self.execute_node_actions(self.node_machine.send_node_info())
        job.after(0.0, self.send_heartbeat)

    def send_heartbeat(self):
        if self.is_alive and not self.is_over() and not (self.leader and self.leader.has_stepped_down):
            round_, now = self.round, self.job.now
            round_.heartbeats[self.group_rank] += 1
            self.execute_node_actions(self.node_machine.check_leader_heartbeat(round_.heartbeats[0], now))
            if self.leader is not None:
                self.execute_leader_actions(self.leader.update_waiting_nodes(len(self.job.waiting), now))
                self.execute_leader_actions(self.leader.check_heartbeats(dict(round_.heartbeats), now))
                self.execute_leader_actions(self.leader.handle_deadline(now))
            self.job.after(HEARTBEAT_INTERVAL, self.send_heartbeat)

    def poll(self):
        """Read new messages, as RoundRunner does."""
        if not self.is_alive or self.round is None:
            return
        round_, job = self.round, self.job
        while self.leader is not None and self.inbox_read < len(round_.inbox):
            message = round_.inbox[self.inbox_read]
            self.inbox_read += 1
            job.count("inbox read")
            self.execute_leader_actions(self.leader.handle_message(message, job.now))
        while self.broadcasts_read < len(round_.broadcasts) and not self.node_machine.is_finished:
            message = round_.broadcasts[self.broadcasts_read]
            self.broadcasts_read += 1
            job.count("broadcast read")
            self.execute_node_actions(self.node_machine.handle_broadcast(message))
        if (attempt := self.node_machine.awaited_assignment) is not None:
            job.count("assignment read")
            self.execute_node_actions(self.node_machine.handle_assignment(round_.assignments[attempt, self.group_rank]))

    def is_over(self):
        return self.round is None or (self.node_machine.is_finished and (self.leader is None or self.leader.is_finished))

    def execute_node_actions(self, actions):
        for action in actions:
            if isinstance(action, SendToLeader):
                self.job.count("inbox write")
                self.round.inbox.append(action.message)
                self.job.schedule_polls(self.round, [0])
            elif isinstance(action, PrepareRanks):
                self.execute_node_actions(self.node_machine.start_ranks(action.start.attempt))
            elif isinstance(action, StartRanks):
                self.start()
            elif isinstance(action, StopRanks):
                self.feed(CancelAttempt())
            elif isinstance(action, HoldRanks):
                self.feed(StopRequested(action.cause, is_from_job=True))
                self.job.after(0.002, self.report_steps)
            elif isinstance(action, AgreeOnStep):
                self.stop_step = action.after_step
                self.return_soon()
            elif isinstance(action, Rejoin) and self.is_stop_requested:
                self.leave()
            elif isinstance(action, Rejoin):
                self.history = action.history
                self.job.rejoin(self)
            elif isinstance(action, ReportJob):
                self.decision = action.decision
                self.execute_node_actions(self.node_machine.acknowledge_shutdown())

    def execute_leader_actions(self, actions):
        for action in actions:
            if isinstance(action, Broadcast):
                self.job.count("broadcast write")
                self.round.broadcasts.append(action.message)
                self.job.schedule_polls(self.round, range(len(self.round.names)))
            elif isinstance(action, PublishAssignments):
                self.job.count("assignment write", len(action.assignments))
                self.round.assignments |= {
                    (assignment.attempt, assignment.group_rank): assignment for assignment in action.assignments
                }
            elif isinstance(action, ReservePort):
                self.execute_leader_actions(self.leader.start_attempt(29500))

    def start(self):
        job = self.job
        self.attempts += 1
        if self.ranks is None:
            self.ranks = StateMachine((), now=job.now, grace_period=10.0, decide_after=DECIDE_AFTER)
            self.feed(StartCall(job.now))
        assignment = self.round.assignments[self.node_machine.attempt, self.group_rank]
        ranks = tuple(range(assignment.first_rank, assignment.first_rank + job.nprocs))
        self.feed(Restart(ranks[0], generation=self.ranks.generation, ranks=ranks))
        generation = self.ranks.generation
        for rank in ranks:
            job.after(0.5, lambda rank=rank: self.feed(Ready(rank, generation=generation)))
            job.after(0.5 + job.work, lambda rank=rank: self.feed(Returned(rank, generation=generation)))

    def request_stop(self):
        """Request a stop of the job, or leave if this node is in a rendezvous."""
        self.is_stop_requested = True
        if self.is_alive and self.round is not None:
            self.execute_node_actions(self.node_machine.request_stop("SIGUSR1"))
        elif self.is_alive:
            self.leave()

    def leave(self):
        self.has_left = True
        self.is_alive = False
        self.round = None
        self.job.participants.discard(self.name)
        self.job.waiting.discard(self.name)
        self.job.after(0.0, self.job._form)

    def report_steps(self):
        if self.is_alive and self.round is not None:
            self.execute_node_actions(self.node_machine.report_steps_held(self.job.rng.randrange(1000)))

    def return_soon(self):
        """Let the ranks return, since they have been told at which step they stop."""
        generation = self.ranks.generation
        for rank in list(self.ranks.phase_table.phases):
            self.job.after(0.6, lambda rank=rank: self.feed(Ready(rank, generation=generation)))
            self.job.after(0.7, lambda rank=rank: self.feed(Returned(rank, generation=generation)))

    def feed(self, event):
        if not self.is_alive or self.ranks is None:
            return
        machine, now = self.ranks, self.job.now
        if getattr(event, "generation", machine.generation) < machine.generation or machine.stage is RunStage.FINISHED:
            return
        rank = getattr(event, "rank", None)
        if isinstance(event, Ready | Returned | Failed | Exited) and not self.is_possible(rank, event):
            return
        earlier_reason = machine.stop_reason
        self.execute_rank_actions(machine.handle(event, now))
        self.report_changes(earlier_reason)

    def is_possible(self, rank, event):
        phase = self.ranks.phase_table.phases.get(rank)
        if phase is None or phase.name in ("EXITED", "ABANDONED"):
            return False
        if isinstance(event, Returned | Failed):
            return phase.name == "RUNNING"
        return phase.name == "STARTING" if isinstance(event, Ready) else True

    def report_changes(self, earlier_reason):
        machine = self.ranks
        if machine.stop_reason is not earlier_reason and machine.stop_reason is StopReason.FAILED:
            self.execute_node_actions(self.node_machine.report_failing())
        if machine.stage is RunStage.AWAITING_DECISION and self.is_unreported:
            self.is_unreported = False
            self.execute_node_actions(self.node_machine.report_ranks_stopped())
            self.execute_node_actions(self.node_machine.report_attempt(self.make_report()))

    is_unreported = False

    def execute_rank_actions(self, actions):
        machine, job = self.ranks, self.job
        generation = machine.generation
        for action in actions:
            if isinstance(action, StartRank):
                self.is_unreported = True
                self.failed_rank = None
            elif isinstance(action, SendSignal | RequestExit):
                job.after(0.05, lambda rank=action.rank: self.feed(Exited(rank, generation=generation)))
        if machine.deadline is not None:
            job.after(max(0.0, machine.deadline - job.now), self.handle_deadline)

    def handle_deadline(self):
        if self.is_alive and self.ranks is not None and self.ranks.deadline is not None:
            earlier_reason = self.ranks.stop_reason
            self.execute_rank_actions(self.ranks.handle_deadline(self.job.now))
            self.report_changes(earlier_reason)

    def make_report(self):
        stop_reason = self.ranks.stop_reason
        outcome = {StopReason.SUCCEEDED: NodeOutcome.SUCCEEDED, StopReason.CANCELLED_BY_JOB: NodeOutcome.STOPPED}.get(
            stop_reason, NodeOutcome.FAILED
        )
        failures = ({"rank": self.failed_rank, "is_secondary": False},) if outcome is NodeOutcome.FAILED else ()
        return AttemptReport(0, 0, outcome, failures)

    def fail_rank(self, local_rank):
        if self.is_alive and self.ranks is not None and self.ranks.is_call_running():
            rank = list(self.ranks.phase_table.phases)[local_rank]
            if self.ranks.phase_table.phases[rank].name == "RUNNING":
                self.failed_rank = rank
                self.job.failures += 1
                self.feed(Exited(rank, generation=self.ranks.generation))


class SimulatedJob:
    """All nodes of a job, the rendezvous, and the clock."""

    node_type = Node

    def __init__(self, n, *, nprocs=8, nodes=None, max_restarts=10**6, work=60.0, seed=0):
        self.now, self._ticket, self._heap = 0.0, itertools.count(), []
        self.rng = random.Random(seed)
        self.nprocs, self.nodes, self.work = nprocs, nodes or (n, n), work
        self.policy = RestartPolicy(max_restarts)
        self.messages, self.failures = Counter(), 0
        self.nodes_by_name = {f"n{i:05}": self.node_type(self, f"n{i:05}") for i in range(n)}
        self.waiting, self.participants, self._polled = set(), set(), set()
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

    def schedule_polls(self, round_, group_ranks):
        """Have these nodes poll the store within POLL_SECONDS."""
        for group_rank in group_ranks:
            if (id(round_), group_rank) not in self._polled:
                self._polled.add((id(round_), group_rank))
                self.after(self.rng.uniform(0.0, POLL_SECONDS), lambda g=group_rank: self._poll(round_, g))

    def _poll(self, round_, group_rank):
        self._polled.discard((id(round_), group_rank))
        node = self.nodes_by_name[round_.names[group_rank]]
        if node.round is round_:
            node.poll()

    def rejoin(self, node):
        """Let the node wait for the next round. It forms one second after the last node has left the round before."""
        self.participants.discard(node.name)
        self.waiting.add(node.name)
        node.round = None
        self.after(1.0, self._form)

    def _form(self):
        if self.participants or len(self.waiting) < self.nodes[0]:
            return
        names = sorted(self.waiting)[: self.nodes[1]]
        self.waiting -= set(names)
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
        """Remove the node from the rendezvous, as torch does after its own timeout."""
        self.participants.discard(name)
        self.waiting.discard(name)
        self._form()

    def add_node(self, name):
        self.nodes_by_name[name] = self.node_type(self, name)
        self.rejoin(self.nodes_by_name[name])

    def run(self, until=3600.0):
        while self._heap and self.now < until and not self.is_over():
            self.now, _, call = heapq.heappop(self._heap)
            call()

    def is_over(self):
        return all(node.decision is not None for node in self.alive())

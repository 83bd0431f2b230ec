"""Simulate a job of many nodes without a network, with any faults, in virtual time.

The Coordinator and the machines of the nodes are real. The network and the ranks are simulated: messages come in order and
late, and the ranks of a node start, fail, return and stop together. The coordinator runs on none of the nodes.
"""

import heapq
import itertools
import random
from enum import Enum, auto

from mpwatch import Rendezvous, RestartPolicy
from mpwatch.nodes import coordinator, messages, node_machine
from mpwatch.nodes.messages import AttemptOutcome

LATENCY, TIMEOUT = 0.05, 15.0
JOIN_TIMEOUT = 120.0
READ_SECONDS = 0.001
STOP_SECONDS = 0.5  # seconds after it has woken up, for a node to stop ranks
START_SECONDS, EXIT_SECONDS = 0.5, 0.05  # of ranks
LEASE_SECONDS = 0.65 * TIMEOUT  # without a word of the coordinator, a node stops its ranks


class Ranks(Enum):
    NONE = auto()
    RUNNING = auto()
    STOPPING = auto()


class Node:
    """One node: its machine and its ranks. It may be suspended, cut off, leave, or fail to make environments."""

    def __init__(self, job, name):
        self.job, self.name = job, name
        self.is_alive, self.connection, self.start = True, None, None
        self.machine, self.decision = node_machine.NodeMachine(), None
        self.ranks, self.start_number, self.world = Ranks.NONE, 0, None
        self.held_step = self.stop_step = None  # the last one of its ranks, and the one that the nodes have agreed on
        self.has_failing_env = False
        self.is_out = False  # it was refused, or has lost the coordinator
        self.asleep_until, self.env_seconds, self.report_seconds = -STOP_SECONDS, 0.0, 0.0

    def after(self, seconds, call):
        """While the node is suspended, the call waits, also for what has come meanwhile to be read."""
        self.job.after(seconds, call, node=self, lag=READ_SECONDS)

    def connect(self):
        self.connection = self.job.connect(self)

    def receive(self, connection, message):
        if connection != self.connection:
            return
        if isinstance(message, messages.Refused):
            self.is_out = True
            self.end()
        elif not isinstance(message, messages.Joined):
            self.execute(self.machine.handle(message))

    def execute(self, actions):
        for action in actions:
            if isinstance(action, messages.MessageToCoordinator):
                self.job.send_to_coordinator(self.connection, action)
            elif isinstance(action, messages.StartAttempt):
                self.start = action
                self.after(self.env_seconds, lambda start=action: self.make_environments(start))
            elif isinstance(action, node_machine.StartRanks):
                self.start_ranks()
            elif isinstance(action, messages.StopAttempt):
                self.stop(AttemptOutcome.STOPPED)
            elif isinstance(action, messages.HoldSteps):
                self.after(0.002, self.report_steps)
            elif isinstance(action, messages.StopAtStep):
                self.stop_step = action.after_step
                self.let_ranks_return(0.6)
            elif isinstance(action, node_machine.Rejoin):
                self.connect()
            elif action.ends_job:
                self.decision = action
                self.machine.acknowledge_shutdown()
                self.job.lose(self.connection, "it knows the result")

    def make_environments(self, start):
        if self.has_failing_env:
            self.execute(self.machine.abort(messages.AttemptReport(0, AttemptOutcome.ABORTED, reason="env")))
            self.end()
        else:
            self.execute(self.machine.start_ranks(start.attempt, []))

    # ranks

    def start_ranks(self):
        self.job.note_overlap(self)
        self.ranks, self.start_number, self.world = Ranks.RUNNING, self.start_number + 1, self.start.attempt
        self.let_ranks_return(self.job.work)

    def let_ranks_return(self, seconds):
        self.after(START_SECONDS + seconds, lambda number=self.start_number: self.return_(number))

    def return_(self, number):
        if number == self.start_number:
            self.stop(AttemptOutcome.SUCCEEDED)

    def stop(self, outcome):
        if self.ranks is Ranks.RUNNING:
            self.ranks = Ranks.STOPPING
            if outcome is AttemptOutcome.FAILED:
                self.execute(self.machine.report_failing())
            self.after(EXIT_SECONDS, lambda: self.reap(outcome))

    def reap(self, outcome):
        self.ranks = Ranks.NONE
        self.execute([messages.RanksStopped(self.machine.attempt)])
        self.after(self.report_seconds, lambda: self.report(outcome))

    def report(self, outcome):
        failures = ({"rank": self.start.first_rank, "is_secondary": False},) if outcome is AttemptOutcome.FAILED else ()
        self.execute(self.machine.report_attempt(messages.AttemptReport(0, outcome, failures=failures)))

    def report_steps(self):
        self.held_step = self.job.rng.randrange(1000)
        self.execute([messages.StepsHeld(self.machine.attempt, self.held_step)])

    @property
    def has_ranks(self):
        is_awake = self.asleep_until + STOP_SECONDS <= self.job.now
        return self.is_alive and is_awake and self.ranks is not Ranks.NONE

    # faults, and requests to stop

    def fail_rank(self):
        self.stop(AttemptOutcome.FAILED)

    def suspend(self, seconds):
        """Suspend the node and its ranks. The coordinator gives it up after TIMEOUT."""
        job, connection = self.job, self.connection
        if self.asleep_until > job.now:
            return
        self.asleep_until = job.now + seconds
        if seconds > LEASE_SECONDS:
            self.after(seconds, lambda: self.stop(AttemptOutcome.STOPPED))  # the lease has expired
        if seconds > TIMEOUT:
            job.after(TIMEOUT, lambda: job.lose(connection, "it is silent"))

    def cut(self, seconds):
        """Cut the node off. TCP brings later what is sent meanwhile, unless the ends give each other up."""
        job, connection = self.job, self.connection
        if job.cuts.get(connection, 0.0) > job.now:
            return
        job.cuts[connection] = job.now + seconds
        if seconds > LEASE_SECONDS:
            self.after(LEASE_SECONDS, lambda: connection == self.connection and self.stop(AttemptOutcome.STOPPED))
        if seconds > TIMEOUT:
            self.after(TIMEOUT, lambda: self.lose_coordinator(connection))
            job.after(TIMEOUT + 1.0, lambda: job.lose(connection, "it is silent"))

    def lose_coordinator(self, connection):
        if connection == self.connection:
            self.connection, self.is_out = None, True
            self.execute(self.machine.lose_coordinator("cut off"))

    def request_stop(self):
        if not self.machine.is_joining:
            self.execute(self.machine.request_stop("SIGUSR1"))

    def leave(self):
        self.execute(self.machine.report_signal("it received SIGTERM"))
        self.end()

    def end(self):
        self.is_alive = False
        self.job.lose(self.connection, "its connection has ended")

    kill = end


class SimulatedJob:
    """All nodes of a job, the network, the coordinator, and the clock."""

    def __init__(self, n, *, nnodes=None, max_restarts=10**6, work=60.0, seed=0):
        self.now, self._ticket, self._heap = 0.0, itertools.count(), []
        self.rng, self.work = random.Random(seed), work
        self.messages, self.overlaps, self.decisions = 0, [], []
        self._check_at = None  # when the next deadline of the coordinator is checked
        rendezvous = Rendezvous("n00000", "job", nnodes or n, node_timeout=TIMEOUT, last_call_timeout=1.0)
        self.coordinator = coordinator.Coordinator(rendezvous, RestartPolicy(max_restarts), rng=self.rng.random)
        self._connections, self._arrivals, self.cuts = [], {}, {}
        self.nodes = {}
        for number in range(n):
            self.add_node(number)

    def add_node(self, number):
        if number not in self.nodes:
            self.nodes[number] = Node(self, f"n{number:05}")
            self.nodes[number].connect()

    def alive(self):
        return [node for node in self.nodes.values() if node.is_alive]

    def after(self, seconds, call, *, node=None, lag=0.0):
        """If it is a call of a node, it comes `lag` after the end of a suspension, and not if the node has ended."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._ticket), call, node, lag))

    # the network

    def connect(self, node):
        number = len(self._connections)
        self._connections.append(node)
        info = messages.NodeInfo("job", node.name, node.name, 1, 2, "default", None, False, 10.0, JOIN_TIMEOUT, None, {})
        self._deliver(number, lambda: self.act(self.coordinator.join(number, info, self.now)))
        return number

    def send_to_coordinator(self, connection, message):
        if connection is not None:
            self.messages += 1
            self._deliver(connection, lambda: self.act(self.coordinator.handle(connection, message, self.now)))

    def lose(self, connection, reason):
        if connection is not None:
            self._deliver(connection, lambda: self.act(self.coordinator.lose(connection, reason, self.now)))

    def _deliver(self, connection, call, *, node=None):
        """To the node or to the coordinator, in order of what was sent in this direction. A cut delays it."""
        sent_at = max(self.now, self.cuts.get(connection, 0.0))
        at = max(sent_at + self.rng.uniform(0.0, LATENCY), self._arrivals.get((connection, node), 0.0))
        self._arrivals[connection, node] = at
        self.after(at - self.now, call, node=node)

    def act(self, actions):
        for action in actions:
            if isinstance(action, coordinator.LogWarning | messages.AttemptDecision):
                continue
            self.messages += 1
            node, message = self._connections[action.node], action.message
            if isinstance(message, messages.AttemptDecision):
                self.decisions += [message] * (message not in self.decisions[-1:])
            receive = lambda node=node, number=action.node, message=message: node.receive(number, message)  # noqa: E731
            self._deliver(action.node, receive, node=node)
        due_at = self.coordinator.deadline
        if due_at < float("inf") and due_at != self._check_at:
            self._check_at = due_at
            self.after(max(0.0, due_at - self.now), self._check_deadline)

    def _check_deadline(self):
        """The sum of times in `after` may be a little too small."""
        self._check_at = None
        due_at = self.coordinator.deadline
        self.act(self.coordinator.handle_deadline(due_at) if due_at - self.now < READ_SECONDS else [])

    def note_overlap(self, node):
        """Note ranks of another attempt that still run when a node starts its ranks."""
        others = [other for other in self.alive() if other.has_ranks and other.world != node.start.attempt]
        self.overlaps += [(self.now, node.name, other.name) for other in others]

    def run(self, until=3600.0):
        while self._heap and self.now < until and not self.is_over():
            self.now, _, call, node, lag = heapq.heappop(self._heap)
            if node is not None and node.asleep_until > self.now:
                self.after(node.asleep_until - self.now + lag, call, node=node, lag=lag)
            elif node is None or node.is_alive:
                call()
        return self

    def is_over(self):
        return all(node.decision is not None for node in self.alive())

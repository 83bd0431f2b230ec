"""The state machine of the leader. The node with group rank 0 is the leader, and decides for the whole job.

The leader uses a new state machine for each round. The state machine has no side effects, except that it gets random numbers
from `rng`. The node thread passes the messages of all nodes to the state machine in the order of the leader's inbox
(round_runner.py). The methods return actions, which the node thread executes.

    WAITING_FOR_NODES --> STARTING --> RUNNING --> STOPPING --> decision --> SHUTTING_DOWN --> FINISHED
                             ^                                   |  |                             ^
                             '------------- RESTART -------------'  '------- RE_RENDEZVOUS -------'

    stage                it ends when ...                                               and then comes
    WAITING_FOR_NODES    every node has sent its NodeInfo                               STARTING
                         the nodes disagree, a node is lost, or more nodes wait         the decision
    STARTING             a port is reserved                                             RUNNING
                         a node is lost, or more nodes wait                             the decision
    RUNNING              all nodes have reported success                                the decision
                         a rank fails, a node is lost, or more nodes wait               STOPPING
                         the collectives of several nodes can never end                 STOPPING
    STOPPING             all nodes that are not lost have reported                      the decision
    the decision         (job_decision.py)  RESTART                                     STARTING
                                            RE_RENDEZVOUS                               FINISHED
                                            DONE, FAILED                                SHUTTING_DOWN
    SHUTTING_DOWN        all nodes that are not lost have sent ShutdownAck,             FINISHED
                         or the time is over

When a stop is requested on a node, the node sends StopRequest to the leader. The leader broadcasts HoldSteps, which makes
all ranks wait. Each node answers with StepsHeld, which contains the highest step that a rank of the node has passed. When
all nodes have answered, the leader broadcasts StopAtStep with the highest step of all nodes. Each rank stops after the step
that StopAtStep contains. After a request to stop, the job is not restarted, and no further nodes may join.

These steps follow when a node is lost:

1. `check_heartbeats` finds a node whose heartbeat counter has not changed for `node_timeout`. A node that sends NodeLeaving
   is lost, too. If a node sends its NodeInfo or stops its ranks too late, `handle_deadline` counts the node as lost.
2. The leader broadcasts StopAttempt. Every node that is not lost stops its ranks and sends an AttemptReport.
3. When all nodes that are not lost have reported, job_decision.py decides what the nodes do next. If the job can
   continue after the loss of a node, the decision is RE_RENDEZVOUS. The leader broadcasts the AttemptDecision.
4. After the decision RE_RENDEZVOUS, each node leaves the round and joins the next round (node_machine.py). If the leader
   itself is lost, every other node decides on its own (`NodeMachine.handle_leader_loss`).

Guarantees: the leader makes at most one decision for each attempt. Before the leader decides about a started attempt, it
waits for the report of every node that is not lost. The number of messages grows linearly with the number of nodes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from random import random

from mpwatch.multinode.job_decision import AttemptSummary, decide_next_step, describe_node, describe_stop
from mpwatch.multinode.job_verdict import NodeCollectives, find_job_verdicts, format_job_stall, read_records
from mpwatch.multinode.protocol.job_config import describe_disagreement
from mpwatch.multinode.protocol.messages import (
    AttemptDecision,
    AttemptFailing,
    AttemptReport,
    HoldSteps,
    JobFinished,
    MessageToAll,
    MessageToLeader,
    NextStep,
    NodeInfo,
    NodeLeaving,
    NodeOutcome,
    RankAssignment,
    RanksStalled,
    RanksStopped,
    RestartHistory,
    ShutdownAck,
    StartAttempt,
    StepsHeld,
    StopAtStep,
    StopAttempt,
    StopRequest,
)
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.watcher.diagnosis.collective_verdict import CollectiveVerdict, Finding, select_new_stalls

NODE_INFO_SHARE = 2.0  # the leader waits for every NodeInfo for this multiple of node_timeout
STOP_SECONDS = 5.0  # a node has this time after its grace period to stop its ranks


class RoundStage(Enum):
    """The stage of a round in the leader's state machine."""

    WAITING_FOR_NODES = auto()
    STARTING = auto()
    RUNNING = auto()
    STOPPING = auto()
    SHUTTING_DOWN = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Broadcast:
    """An action of the node thread: send the message to all nodes."""

    message: MessageToAll


@dataclass(frozen=True, slots=True)
class PublishAssignments:
    """An action of the node thread: write each node's RankAssignment into the store, before the next broadcast."""

    assignments: tuple[RankAssignment, ...]


@dataclass(frozen=True, slots=True)
class ReservePort:
    """Reserve a port of the leader's node for the next attempt. The port must differ from the port of the last attempt."""


@dataclass(frozen=True, slots=True)
class CloseRendezvous:
    """Mark the job as over in the rendezvous, so that no node can join the job any more."""


@dataclass(frozen=True, slots=True)
class LogWarning:
    """Log a warning on the leader's node."""

    text: str


LeaderAction = Broadcast | PublishAssignments | ReservePort | CloseRendezvous | LogWarning


class Leader:
    """The state machine of the leader, for one round.

    Args:
        size: the number of nodes in the round.
        nnodes: the lowest and the highest number of nodes that the job allows.
        policy: says after which failures the job is restarted, and how many restarts it has.
        node_timeout: seconds without a heartbeat after which a node is lost.
        exit_barrier_timeout: seconds that the nodes have to acknowledge the success of the job.
        stall_after: seconds after which the leader warns of ranks that wait in a collective. If it is None, `judge_stalls`
            compares no collectives.
        now: the time of a monotonic clock. All later times are of the same clock.
        rng: returns a random number between 0 and 1, for the jitter of delays. A test can replace it.
    """

    def __init__(
        self,
        *,
        size: int,
        nnodes: tuple[int, int],
        policy: RestartPolicy,
        node_timeout: float,
        exit_barrier_timeout: float,
        stall_after: float | None = None,
        now: float,
        rng: Callable[[], float] = random,
    ) -> None:
        self.stage = RoundStage.WAITING_FOR_NODES
        self.has_stepped_down = False
        self._size, (self._min_nodes, self._max_nodes) = size, nnodes
        self._policy, self._rng = policy, rng
        self._node_timeout, self._exit_barrier_timeout = node_timeout, exit_barrier_timeout
        self._stall_after = stall_after
        self._node_infos: dict[int, NodeInfo] = {}
        self._heartbeats: dict[int, tuple[int, float]] = {}  # for each node the count, and when the count has last changed
        self._lost_nodes: dict[int, str] = {}  # for each lost node the reason
        self._acknowledged: set[int] = set()  # the nodes that sent ShutdownAck
        self._started_at = now
        self._history = RestartHistory()
        self._waiting_nodes = 0  # nodes that wait to join, but only as many as the job has room for
        self._first_ranks: dict[int, int] = {}
        self._stop_cause = ""  # what has requested a stop of the job. It is empty if no stop was requested
        self._begin_attempt()
        self._deadline = now + NODE_INFO_SHARE * node_timeout

    def _begin_attempt(self) -> None:
        self._attempt = self._history.attempts
        self._failure_order: list[int] = []  # the nodes whose ranks failed
        self._stopped_nodes: set[int] = set()  # the nodes whose ranks have all exited
        self._reports: dict[int, AttemptReport] = {}
        self._collectives: dict[int, NodeCollectives] = {}  # of each node whose ranks have stalled or ended
        self._has_new_collectives = False
        self._held_steps: dict[int, int | None] = {}  # for each node the highest step that its ranks have passed, if any
        self._unstarted_nodes: set[int] = set()  # the nodes that had not started their ranks when a stop was requested
        self._warned: set[Finding] = set()
        self._final_verdict: CollectiveVerdict | None = None  # the verdict that has ended the attempt
        self._stopped_for_waiting_nodes = False
        self._deadline = math.inf
        self._delay = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether the leader has done all its work in this round."""
        return self.stage is RoundStage.FINISHED

    @property
    def has_decided(self) -> bool:
        """Whether the leader has made all its decisions in this round."""
        return self.stage in (RoundStage.SHUTTING_DOWN, RoundStage.FINISHED)

    @property
    def active_nodes(self) -> set[int]:
        """The nodes of the round, without the lost nodes."""
        return set(range(self._size)) - self._lost_nodes.keys()

    def handle_message(self, message: MessageToLeader, now: float) -> list[LeaderAction]:
        """Handle one message that a node has sent to the leader."""
        node = message.group_rank
        if node not in self.active_nodes or self.stage is RoundStage.FINISHED:
            return []
        self._heartbeats[node] = (self._heartbeats.get(node, (-1, now))[0], now)
        if isinstance(message, NodeInfo):
            self._node_infos[node] = message
            self._history = max(self._history, message.history, key=lambda history: history.attempts)
            return self._start_if_complete(now) if self.stage is RoundStage.WAITING_FOR_NODES else []
        if isinstance(message, ShutdownAck):
            self._acknowledged.add(node)
            has_left_early = self.stage is not RoundStage.SHUTTING_DOWN and node not in self._reports
            return self._handle_lost_node(node, "it has left", now) if has_left_early else self._finish_if_acknowledged()
        if isinstance(message, NodeLeaving):
            return self._handle_lost_node(node, message.reason, now)
        if isinstance(message, StopRequest):
            return self._request_stop(message.cause)
        if message.attempt != self._attempt:
            return []
        if isinstance(message, AttemptFailing):
            self._failure_order.append(node)
            return self._stop_attempt(f"the attempt failed on {self._describe(node)}", now)
        if isinstance(message, RanksStopped):
            self._stopped_nodes.add(node)
            return []
        if isinstance(message, RanksStalled):
            self._set_collectives(node, message)
            return []
        if isinstance(message, StepsHeld):
            return self._handle_held_steps(message, now)
        return self._handle_report(message, now)

    def _request_stop(self, cause: str) -> list[LeaderAction]:
        """At the first request to stop, make the ranks of all nodes wait.

        If the request comes before the attempt has started, `start_attempt` broadcasts HoldSteps after StartAttempt.
        """
        is_first, self._stop_cause = not self._stop_cause, self._stop_cause or cause
        return [Broadcast(HoldSteps(self._attempt, cause))] if is_first and self.stage is RoundStage.RUNNING else []

    def _handle_held_steps(self, message: StepsHeld, now: float) -> list[LeaderAction]:
        """If the ranks of all nodes wait, make all ranks stop at the same step.

        During a restart, end the job if all nodes have answered that their ranks are not started yet.
        """
        if message.has_started:
            self._held_steps[message.group_rank] = message.step
            return self._agree_on_step()
        self._unstarted_nodes.add(message.group_rank)
        is_before_restart = self._attempt > 0 and self.active_nodes <= self._unstarted_nodes
        return self._stop_attempt(describe_stop(self._stop_cause), now) if is_before_restart else []

    def _agree_on_step(self) -> list[LeaderAction]:
        """If the ranks of all nodes wait, make the ranks stop after the highest step that any rank has passed."""
        if self.stage is not RoundStage.RUNNING or not self.active_nodes <= self._held_steps.keys():
            return []
        highest = max((step for step in self._held_steps.values() if step is not None), default=None)
        return [Broadcast(StopAtStep(self._attempt, self._stop_cause, highest))]

    def check_heartbeats(self, counts: Mapping[int, int], now: float) -> list[LeaderAction]:
        """Find the nodes whose heartbeat count has not changed for more than `node_timeout`, and count them as lost.

        A node that is missing in `counts` has sent no heartbeat.
        """
        actions: list[LeaderAction] = []
        for node in sorted(self.active_nodes):
            count = counts.get(node, -1)
            last_count, since = self._heartbeats.get(node, (-1, self._started_at))
            if count != last_count:
                self._heartbeats[node] = (count, now)
            elif now - since > self._node_timeout and self.stage is not RoundStage.FINISHED:
                actions += self._handle_lost_node(
                    node, f"its program sent no sign of life for {self._node_timeout:g} s (node_timeout)", now
                )
        return actions

    def update_waiting_nodes(self, count: int, now: float) -> list[LeaderAction]:
        """Record the number of nodes that wait to join the job.

        If the job has room for more nodes, stop the attempt, so that the waiting nodes can join.
        """
        if self._stop_cause:
            return []
        self._waiting_nodes = max(0, min(count, self._max_nodes - self._size))
        if self._waiting_nodes and self.stage is RoundStage.RUNNING:
            self._stopped_for_waiting_nodes = True
        return self._stop_attempt("more nodes want to join", now) if self._waiting_nodes else []

    def extend_deadlines(self, seconds: float) -> None:
        """Extend all deadlines by `seconds`.

        Call this method after a pause in which the leader has read no heartbeats. `seconds` is the length of the pause.
        """
        self._heartbeats = {node: (count, since + seconds) for node, (count, since) in self._heartbeats.items()}
        self._started_at += seconds
        self._deadline += seconds

    def step_down(self, reason: str) -> list[LeaderAction]:
        """End the leader's work in this round, because the other nodes may already count the leader as lost.

        Call this method if the leader has sent no heartbeat for a long time. If a node is still in this round, StopAttempt
        makes the node stop its ranks.
        """
        self.stage, self.has_stepped_down = RoundStage.FINISHED, True
        return [Broadcast(StopAttempt(self._attempt, reason))]

    def start_attempt(self, port: int) -> list[LeaderAction]:
        """Start the next attempt with the port that was reserved."""
        if self.stage is not RoundStage.STARTING:
            return []
        self.stage = RoundStage.RUNNING
        start = StartAttempt(
            attempt=self._attempt,
            world_size=sum(info.nprocs for info in self._node_infos.values()),
            group_world_size=self._size,
            master_addr=self._node_infos[0].address,
            master_port=port,
            leader_hostname=self._node_infos[0].hostname,
            leader_nprocs=self._node_infos[0].nprocs,
            delay=self._delay,
        )
        hold = [Broadcast(HoldSteps(self._attempt, self._stop_cause))] if self._stop_cause else []
        return [PublishAssignments(self._assign_ranks()), Broadcast(start), *hold]

    def handle_deadline(self, now: float) -> list[LeaderAction]:
        """If the deadline of the stage has passed, count the late nodes as lost.

        If the deadline of the stage SHUTTING_DOWN has passed, end the round, and count no node as lost.
        """
        if now < self._deadline:
            return []
        self._deadline = math.inf
        if self.stage is RoundStage.SHUTTING_DOWN:
            return self._finish()
        if self.stage is RoundStage.WAITING_FOR_NODES:
            late, reason = (
                self.active_nodes - self._node_infos.keys(),
                "it has joined, but has not sent its data (NodeInfo) in time; see the log of that node",
            )
        else:
            late, reason = self.active_nodes - self._stopped_nodes - self._reports.keys(), "it does not stop its ranks"
        return [action for node in sorted(late) for action in self._handle_lost_node(node, reason, now)]

    def _start_if_complete(self, now: float) -> list[LeaderAction]:
        if self._node_infos.keys() != set(range(self._size)):
            return []
        self._begin_attempt()
        if disagreement := describe_disagreement(list(self._node_infos.values())):
            return self._decide(now, disagreement)
        if self._waiting_nodes:
            return self._decide(now)
        self.stage = RoundStage.STARTING
        return [ReservePort()]

    def _assign_ranks(self) -> tuple[RankAssignment, ...]:
        """Give each rank a number among all ranks of the job, and a number among the ranks with the same role."""
        role_sizes: dict[str, int] = {}
        for info in self._node_infos.values():
            role_sizes[info.role] = role_sizes.get(info.role, 0) + info.nprocs
        assignments, rank, role_ranks = [], 0, dict.fromkeys(role_sizes, 0)
        for node in range(self._size):
            info = self._node_infos[node]
            self._first_ranks[node] = rank
            assignments.append(RankAssignment(node, self._attempt, rank, role_ranks[info.role], role_sizes[info.role]))
            rank += info.nprocs
            role_ranks[info.role] += info.nprocs
        return tuple(assignments)

    def judge_stalls(self, now: float) -> list[LeaderAction]:
        """If nodes have sent new collectives, compare the collectives of all nodes.

        If a collective can never succeed, stop the attempt. If a slow collective can still succeed, log a warning.

        Call this method once after all new messages are handled, because a comparison of thousands of ranks takes a second.
        """
        if not self._has_new_collectives or self.stage is not RoundStage.RUNNING:
            return []
        self._has_new_collectives = False
        if self._stall_after is None:
            return []
        nodes = list(self._collectives.values())
        stalls = [verdict for verdict in find_job_verdicts(nodes) if verdict.seconds >= self._stall_after]
        if final := next((stall for stall in stalls if stall.cannot_end_well), None):
            self._final_verdict = final
            return self._stop_attempt(final.sentence, now)
        return [LogWarning(format_job_stall(nodes, stall)) for stall in select_new_stalls(stalls, self._warned)]

    def _set_collectives(self, node: int, message: RanksStalled | AttemptReport) -> None:
        self._collectives[node] = read_records(message.collectives)
        self._has_new_collectives = True

    def _handle_report(self, report: AttemptReport, now: float) -> list[LeaderAction]:
        node = report.group_rank
        if report.outcome is NodeOutcome.STOPPED and self.stage is RoundStage.RUNNING:
            # No StopAttempt was sent, so the lease of the node's ranks has expired (LocalRanks.renew_lease).
            return self._handle_lost_node(node, "it could not reach the store for a while, and has stopped its ranks", now)
        self._reports[node] = report
        self._set_collectives(node, report)
        actions: list[LeaderAction] = []
        if report.outcome not in (NodeOutcome.SUCCEEDED, NodeOutcome.STOPPED):
            if node not in self._failure_order:
                self._failure_order.append(node)
            actions = self._stop_attempt(f"the attempt failed on {self._describe(node)}", now)
        return actions + self._decide_if_complete(now)

    def _handle_lost_node(self, node: int, reason: str, now: float) -> list[LeaderAction]:
        if node not in self.active_nodes:
            return []
        self._lost_nodes[node] = reason
        if self.stage is RoundStage.SHUTTING_DOWN:
            return self._finish_if_acknowledged()
        if self.stage is RoundStage.WAITING_FOR_NODES:
            return self._decide(now)
        return self._stop_attempt(f"{self._describe(node)} was lost: {reason}", now) + self._decide_if_complete(now)

    def _stop_attempt(self, reason: str, now: float) -> list[LeaderAction]:
        if self.stage is RoundStage.STARTING:  # no node has started its ranks
            return self._decide(now)
        if self.stage is not RoundStage.RUNNING:
            return []
        self.stage = RoundStage.STOPPING
        self._deadline = now + max(info.grace_period for info in self._node_infos.values()) + STOP_SECONDS
        return [Broadcast(StopAttempt(self._attempt, reason))]

    def _decide_if_complete(self, now: float) -> list[LeaderAction]:
        """Decide about the attempt if all nodes that are not lost have sent an AttemptReport."""
        is_attempt_started = self.stage in (RoundStage.RUNNING, RoundStage.STOPPING)
        return self._decide(now) if is_attempt_started and self.active_nodes <= self._reports.keys() else []

    def _decide(self, now: float, disagreement: str = "") -> list[LeaderAction]:
        """Decide what the nodes do next, broadcast the decision, and enter the next stage."""
        if disagreement:
            decision = AttemptDecision(self._attempt, NextStep.FAILED, self._history, reason=disagreement)
        else:
            decision = decide_next_step(self._summarize_attempt(), self._policy, self._rng)
        self._history, self._deadline = decision.history, math.inf
        if decision.next_step is NextStep.RE_RENDEZVOUS:
            self.stage = RoundStage.FINISHED
            return [Broadcast(decision)]
        if decision.next_step is NextStep.RESTART:
            self._begin_attempt()
            self._delay = decision.delay
            self.stage = RoundStage.STARTING
            return [Broadcast(decision), ReservePort()]
        self.stage = RoundStage.SHUTTING_DOWN
        has_succeeded = decision.next_step is NextStep.DONE
        self._deadline = now + (self._exit_barrier_timeout if has_succeeded else self._node_timeout)
        return [CloseRendezvous(), Broadcast(decision), *self._finish_if_acknowledged()]

    def _summarize_attempt(self) -> AttemptSummary:
        return AttemptSummary(
            attempt=self._attempt,
            has_started=self.stage in (RoundStage.RUNNING, RoundStage.STOPPING),
            history=self._history,
            node_infos=self._node_infos,
            first_ranks=self._first_ranks,
            size=self._size,
            min_nodes=self._min_nodes,
            waiting_nodes=self._waiting_nodes,
            stopped_for_waiting_nodes=self._stopped_for_waiting_nodes,
            failure_order=self._failure_order,
            reports=self._reports,
            lost_nodes=self._lost_nodes,
            verdict=self._final_verdict,
            stop_cause=self._stop_cause,
        )

    def _finish_if_acknowledged(self) -> list[LeaderAction]:
        is_complete = self.stage is RoundStage.SHUTTING_DOWN and self.active_nodes <= self._acknowledged
        return self._finish() if is_complete else []

    def _finish(self) -> list[LeaderAction]:
        self.stage = RoundStage.FINISHED
        return [Broadcast(JobFinished())]

    def _describe(self, node: int) -> str:
        return describe_node(self._node_infos, node)

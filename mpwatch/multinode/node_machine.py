"""Every node, including the leader's node, runs this state machine for one round.

The state machine has no side effects. For each event, the node thread calls a method of the state machine, and executes the
actions that the method returns (round_runner.py).

    JOINING --> PREPARING --> RUNNING --> STOPPING --> AWAITING_DECISION --> SHUTTING_DOWN --> FINISHED
                   ^                                        |       |                             ^
                   '---------------- RESTART ---------------'       '------- RE_RENDEZVOUS -------'

    stage                it ends when ...                                               and then comes
    JOINING              the leader broadcasts StartAttempt                             PREPARING
                         the leader broadcasts an AttemptDecision                       as after AWAITING_DECISION
    PREPARING            the environments are made and the delay is over                RUNNING
                         the leader broadcasts StopAttempt                              AWAITING_DECISION
    RUNNING              a rank fails, or the leader broadcasts StopAttempt             STOPPING
                         all ranks have returned, and the report is sent                AWAITING_DECISION
    STOPPING             all ranks have exited, and the report is sent                  AWAITING_DECISION
    AWAITING_DECISION    the decision is RESTART, and StartAttempt follows              PREPARING
                         the decision is RE_RENDEZVOUS: the node joins the next round   FINISHED
                         the decision is DONE or FAILED                                 SHUTTING_DOWN
    SHUTTING_DOWN        the caller's thread knows the decision                         FINISHED
                         (the leader and the node that serves the store: JobFinished)

The leader is lost if its heartbeat counter has not changed for `node_timeout` (`check_leader_heartbeat`). If the leader is
lost, each node stops its ranks, and decides alone what to do next (`_decide_without_leader`). All nodes make the same
decision, because all nodes know the same facts. If the store is lost, the job fails on every node that cannot reach the
store.

A node can leave a round in these ways:

    method                when                                  the node sends             then the node
    handle_broadcast      the decision is RE_RENDEZVOUS                                    joins the next round
    acknowledge_shutdown  the decision is DONE or FAILED        ShutdownAck                ends
    report_signal         the watcher receives a signal         NodeLeaving                ends
    abort                 user code raises in the watcher       AttemptReport, ShutdownAck ends
    withdraw              this node was silent for too long     NodeLeaving                follows the decision
    Leader.step_down      the leader was silent for too long    StopAttempt                acts as if the leader is lost
    handle_leader_loss    the leader is lost                                               joins the next round, or ends
    handle_store_loss     the store is lost                                                ends

After the run on this node has ended, the node thread still sends the last messages of this node, such as NodeLeaving.
`NodeThread.finish_within` limits the time for the last messages. If this node serves the store, the other nodes can use the
store until the node thread of this node ends.

Guarantees:

- If the leader's heartbeats stop, this node leaves its current stage soon after `node_timeout`. If the store is lost, this
  node leaves its current stage at once. In every case, the stage STOPPING lasts until the ranks have exited. The watcher
  kills the ranks that have not exited after `grace_period`. The stages PREPARING, RUNNING and AWAITING_DECISION wait for
  user code, so each of them can last longer than `node_timeout` while the leader sends heartbeats.
- If this node cannot send heartbeats, the watcher thread stops this node's ranks within `node_timeout`
  (LocalRanks.renew_lease). The other nodes count this node as lost only after `node_timeout`.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from mpwatch.multinode.job_decision import describe_stop
from mpwatch.multinode.protocol.messages import (
    NO_ATTEMPT,
    AttemptDecision,
    AttemptFailing,
    AttemptReport,
    HoldSteps,
    JobFinished,
    LostNode,
    MessageToAll,
    MessageToLeader,
    NextStep,
    NodeInfo,
    NodeLeaving,
    NodeOutcome,
    RankAssignment,
    RankRecord,
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


class NodeStage(Enum):
    """The stage of a node in a round."""

    JOINING = auto()
    PREPARING = auto()
    RUNNING = auto()
    STOPPING = auto()
    AWAITING_DECISION = auto()
    SHUTTING_DOWN = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class SendToLeader:
    """An action of the node thread: send the message to the leader."""

    message: MessageToLeader


@dataclass(frozen=True, slots=True)
class PrepareRanks:
    """Compute the environment variables of the ranks in the caller's thread, where the user's function `env` must run."""

    start: StartAttempt
    assignment: RankAssignment


@dataclass(frozen=True, slots=True)
class StartRanks:
    """An action of the node thread: start the ranks that were prepared."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StopRanks:
    """An action of the node thread: stop the ranks of this node."""

    reason: str


@dataclass(frozen=True, slots=True)
class HoldRanks:
    """Make the ranks of this node wait at their next call of `should_stop`.

    When the ranks wait, report to the leader the highest step that a rank of this node has passed.
    """

    cause: str


@dataclass(frozen=True, slots=True)
class AgreeOnStep:
    """Make the ranks of this node stop at their first step after `after_step`.

    If `after_step` is None, the ranks stop at their next call of `should_stop`.
    """

    after_step: int | None
    cause: str


@dataclass(frozen=True, slots=True)
class ReportAttempt:
    """Send the decision about an attempt to the caller's thread. The job goes on."""

    decision: AttemptDecision


@dataclass(frozen=True, slots=True)
class ReportJob:
    """Send the decision about the whole job to the caller's thread. The job is over."""

    decision: AttemptDecision


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Join the next round of the rendezvous."""

    history: RestartHistory
    """The restart history, which the node sends to the leader of the next round."""
    expected_nodes: int
    """The number of nodes of this round that join the next round."""


NodeAction = (
    SendToLeader | PrepareRanks | StartRanks | StopRanks | HoldRanks | AgreeOnStep | ReportAttempt | ReportJob | Rejoin
)


class NodeMachine:
    """The state machine of one node, for one round.

    Args:
        node_info: the facts that the leader has to know about this node.
        size: the number of nodes in the round.
        min_nodes: the number of nodes that the job needs.
        max_restarts: the number of restarts that the job has.
        node_timeout: seconds without a heartbeat after which the leader is lost.
        now: the time of a monotonic clock. All later times are of the same clock.
    """

    def __init__(
        self, node_info: NodeInfo, *, size: int, min_nodes: int, max_restarts: int, node_timeout: float, now: float
    ) -> None:
        self.stage = NodeStage.JOINING
        self.history = node_info.history
        self.attempt = NO_ATTEMPT  # the latest attempt that the leader started
        self._node_info = node_info
        self._size, self._min_nodes, self._max_restarts = size, min_nodes, max_restarts
        self._node_timeout = node_timeout
        self._leader_heartbeat = -1
        self._leader_seen_at = now
        self._has_withdrawn = False
        self._stop_cause = ""  # what has requested a stop of the job. The leader sends it
        self._loss = ""  # why the leader or the store is lost. It is empty if neither is lost
        self._has_ranks = False  # whether this attempt has ranks that were not reported yet
        self._is_leaving = False
        self._start: StartAttempt | None = None
        self._assignment: RankAssignment | None = None
        self._late_decision: AttemptDecision | None = (
            None  # a decision that came while the ranks ran, because the other nodes have decided without this node
        )

    @property
    def is_finished(self) -> bool:
        """Whether the node has done all its work in this round."""
        return self.stage is NodeStage.FINISHED

    @property
    def serves_store(self) -> bool:
        """Whether this node serves the store. The other nodes need the store until they know that the job is over."""
        return self._node_info.serves_store

    @property
    def awaited_assignment(self) -> int | None:
        """The attempt whose RankAssignment this node waits for, or None if this node does not wait for a RankAssignment."""
        is_awaited = self.stage is NodeStage.PREPARING and self._assignment is None
        return self._start.attempt if is_awaited and self._start is not None else None

    def send_node_info(self) -> list[NodeAction]:
        """Send the NodeInfo of this node to the leader. Call this method first."""
        return [SendToLeader(self._node_info)]

    # The leader and the store.

    def handle_broadcast(self, message: MessageToAll) -> list[NodeAction]:
        """Handle a message that the leader sent to all nodes."""
        if self.stage is NodeStage.FINISHED:
            return []
        if isinstance(message, StartAttempt):
            return self._handle_start(message)
        if isinstance(message, StopAttempt):
            return self._handle_stop(message) if message.attempt == self.attempt else []
        if isinstance(message, HoldSteps):
            return self._handle_hold(message) if message.attempt == self.attempt else []
        if isinstance(message, StopAtStep):
            has_ranks = message.attempt == self.attempt and self.stage is NodeStage.RUNNING
            return [AgreeOnStep(message.after_step, message.cause)] if has_ranks else []
        if isinstance(message, JobFinished):
            if self.stage is NodeStage.SHUTTING_DOWN or self._is_leaving:
                self.stage = NodeStage.FINISHED
            return []
        if self.stage in (NodeStage.AWAITING_DECISION, NodeStage.JOINING):
            return self._follow_decision(message)
        return self._handle_late_decision(message)

    def handle_assignment(self, assignment: RankAssignment) -> list[NodeAction]:
        """Save this node's RankAssignment for the attempt that starts, and prepare the ranks."""
        if self.stage is not NodeStage.PREPARING or self._start is None or assignment.attempt != self._start.attempt:
            return []
        self._assignment = assignment
        return [PrepareRanks(self._start, assignment)]

    def check_leader_heartbeat(self, count: int, now: float) -> list[NodeAction]:
        """If the leader's heartbeat count has not changed for more than `node_timeout`, handle the loss of the leader."""
        if count != self._leader_heartbeat:
            self._leader_heartbeat, self._leader_seen_at = count, now
        elif now - self._leader_seen_at > self._node_timeout:
            return self.handle_leader_loss(f"its program sent no sign of life for {self._node_timeout:g} s (node_timeout)")
        return []

    def extend_deadlines(self, seconds: float) -> None:
        """Extend the time limit for the leader's heartbeat by `seconds`.

        Call this method if this node has not read the store for `seconds`, and so could not see the leader's heartbeats.
        """
        self._leader_seen_at += seconds

    def handle_leader_loss(self, reason: str) -> list[NodeAction]:
        """Stop the ranks, then decide without the leader what this node does next."""
        if self.stage in (NodeStage.FINISHED, NodeStage.SHUTTING_DOWN):
            self.stage = NodeStage.FINISHED  # the decision about the job is known
            return []
        if self._loss:
            return []
        self._loss = reason
        if self._has_ranks:
            was_running, self.stage = self.stage is NodeStage.RUNNING, NodeStage.STOPPING
            return [StopRanks(self._describe_leader_loss())] if was_running else []
        return self._decide_without_leader()

    def handle_store_loss(self, reason: str) -> list[NodeAction]:
        """Stop the ranks, and let the job fail, because no other node can replace the lost store."""
        if self.stage in (NodeStage.FINISHED, NodeStage.SHUTTING_DOWN):
            self.stage = NodeStage.FINISHED
            return []
        self._loss, self._size = reason, 0
        if self._has_ranks:
            self.stage = NodeStage.STOPPING
            return [StopRanks(reason)]
        return self._decide_without_leader()

    def withdraw(self, reason: str) -> list[NodeAction]:
        """Leave the round, because this node was silent for a long time.

        The leader may already count this node as lost. This node stops its ranks, starts no further ranks in this round, and
        then follows the leader's decision.
        """
        if self.stage in (NodeStage.SHUTTING_DOWN, NodeStage.FINISHED):
            return []
        self._has_withdrawn = True
        was_running = self.stage is NodeStage.RUNNING
        self.stage = NodeStage.STOPPING if self._has_ranks else NodeStage.AWAITING_DECISION
        leaving: list[NodeAction] = [SendToLeader(NodeLeaving(self._node_info.group_rank, reason))]
        return leaving + ([StopRanks(reason)] if was_running else [])

    # The ranks of this node, and its caller.

    def start_ranks(self, attempt: int) -> list[NodeAction]:
        """Start the ranks of this attempt.

        Call this method when the environment variables of the ranks are computed and the delay before the restart is over.
        """
        if self.stage is not NodeStage.PREPARING or self._assignment is None or attempt != self.attempt:
            return []  # the leader has stopped that attempt meanwhile
        self.stage = NodeStage.RUNNING
        self._has_ranks = True
        return [StartRanks(self.attempt), *([HoldRanks(self._stop_cause)] if self._stop_cause else [])]

    def report_failing(self) -> list[NodeAction]:
        """Report to the leader that the attempt fails on this node. Call this method before the ranks have exited."""
        if self.stage is not NodeStage.RUNNING:
            return []
        self.stage = NodeStage.STOPPING
        return [SendToLeader(AttemptFailing(self._node_info.group_rank, self.attempt))]

    def report_stall(self, collectives: tuple[RankRecord, ...]) -> list[NodeAction]:
        """Report that ranks of this node have called no collective for a long time.

        If `collectives` is empty, report that no rank of this node is stalled any more.
        """
        if self.stage is not NodeStage.RUNNING:
            return []
        return [SendToLeader(RanksStalled(self._node_info.group_rank, self.attempt, collectives))]

    def request_stop(self, cause: str) -> list[NodeAction]:
        """Report to the leader that a stop was requested on this node."""
        if self.stage in (NodeStage.SHUTTING_DOWN, NodeStage.FINISHED):
            return []
        return [SendToLeader(StopRequest(self._node_info.group_rank, cause))]

    def report_steps_held(self, step: int | None) -> list[NodeAction]:
        """Report the highest step that a rank of this node has passed, or None if no rank has passed a step."""
        if self.stage in (NodeStage.SHUTTING_DOWN, NodeStage.FINISHED):
            return []
        return [SendToLeader(StepsHeld(self._node_info.group_rank, self.attempt, step))]

    def report_ranks_stopped(self) -> list[NodeAction]:
        """Report to the leader that all ranks of this node have exited. The AttemptReport follows later."""
        if self.stage not in (NodeStage.RUNNING, NodeStage.STOPPING):
            return []
        return [SendToLeader(RanksStopped(self._node_info.group_rank, self.attempt))]

    def report_attempt(self, report: AttemptReport) -> list[NodeAction]:
        """Report to the leader how the attempt has ended on this node."""
        if self.stage not in (NodeStage.RUNNING, NodeStage.STOPPING):
            return []
        report = replace(report, group_rank=self._node_info.group_rank, attempt=self.attempt)
        self.stage = NodeStage.AWAITING_DECISION
        self._has_ranks = False
        if self._loss:
            return self._decide_without_leader()
        if self._late_decision is not None:
            return self._follow_decision(self._late_decision)
        return [SendToLeader(report)]

    def abort(self, report: AttemptReport) -> list[NodeAction]:
        """Report to the leader that the run on this node has ended because of an error in the watcher.

        After a call of `abort`, the other nodes do not wait for this node.
        """
        actions: list[NodeAction] = []
        if self.stage not in (NodeStage.SHUTTING_DOWN, NodeStage.FINISHED):
            self.stage = NodeStage.SHUTTING_DOWN
            report = replace(report, group_rank=self._node_info.group_rank, attempt=max(self.attempt, 0))
            actions = [SendToLeader(report)]
        return actions + self.acknowledge_shutdown()

    def report_signal(self, reason: str) -> list[NodeAction]:
        """Report to the leader that this node leaves the job, because a signal or another event has interrupted the run.

        The returned list does not contain the action StopRanks, because the watcher thread itself stops the ranks.
        """
        self._is_leaving = True
        if self.stage in (NodeStage.SHUTTING_DOWN, NodeStage.FINISHED):
            return self.acknowledge_shutdown()  # the caller's thread may end before it reads the decision
        return [SendToLeader(NodeLeaving(self._node_info.group_rank, reason))]

    def acknowledge_shutdown(self) -> list[NodeAction]:
        """Report to the leader that this node no longer needs the store.

        Call this method when the caller's thread knows the decision about the job.
        """
        if self.stage is not NodeStage.SHUTTING_DOWN:
            return []
        if not self._node_info.serves_store and self._node_info.group_rank != 0:
            self.stage = NodeStage.FINISHED
        return [SendToLeader(ShutdownAck(self._node_info.group_rank))]

    # How the node follows the leader.

    def _handle_start(self, start: StartAttempt) -> list[NodeAction]:
        if self.stage not in (NodeStage.JOINING, NodeStage.AWAITING_DECISION) or self._has_withdrawn:
            return []
        self.stage = NodeStage.PREPARING
        self.attempt, self._start, self._assignment = start.attempt, start, None
        return []

    def _handle_stop(self, stop: StopAttempt) -> list[NodeAction]:
        if self.stage is NodeStage.PREPARING:
            self.stage = NodeStage.AWAITING_DECISION
            return [SendToLeader(AttemptReport(self._node_info.group_rank, self.attempt, NodeOutcome.STOPPED))]
        if self.stage is NodeStage.RUNNING:
            self.stage = NodeStage.STOPPING
            return [StopRanks(stop.reason)]
        return []

    def _handle_hold(self, hold: HoldSteps) -> list[NodeAction]:
        """Make the ranks of this node wait, now or as soon as the ranks are started.

        If the ranks have already exited, the node only reports the highest step that they have passed.
        """
        self._stop_cause = hold.cause
        if self.stage is NodeStage.PREPARING:
            return [SendToLeader(StepsHeld(self._node_info.group_rank, self.attempt, has_started=False))]
        return [HoldRanks(hold.cause)] if self.stage in (NodeStage.RUNNING, NodeStage.AWAITING_DECISION) else []

    def _follow_decision(self, decision: AttemptDecision) -> list[NodeAction]:
        self.history = decision.history
        if decision.next_step is NextStep.RESTART:
            return [ReportAttempt(decision)]
        if decision.next_step is NextStep.RE_RENDEZVOUS:
            self.stage = NodeStage.FINISHED
            return [ReportAttempt(decision), Rejoin(decision.history, self._size - len(decision.lost_nodes))]
        self.stage = NodeStage.SHUTTING_DOWN
        return [ReportJob(decision)]

    def _handle_late_decision(self, decision: AttemptDecision) -> list[NodeAction]:
        """Stop the ranks, then follow a decision that the leader has made without this node.

        If the leader counts this node as lost, the leader does not wait for this node's AttemptReport.
        """
        if self.stage not in (NodeStage.PREPARING, NodeStage.RUNNING, NodeStage.STOPPING):
            return []
        stage, self.stage = self.stage, NodeStage.STOPPING
        self._late_decision = decision
        if stage is NodeStage.PREPARING:
            self.stage = NodeStage.AWAITING_DECISION
            return self._follow_decision(decision)
        return [StopRanks("this node was silent for too long")] if stage is NodeStage.RUNNING else []

    def _decide_without_leader(self) -> list[NodeAction]:
        """Decide what this node does next, because the leader or the store is lost.

        Use only facts that all nodes know, because all nodes must make the same decision if the leader is lost.
        """
        history = replace(self.history, attempts=max(self.history.attempts, self.attempt + 1))
        if not self._size:
            return self._fail_job(history, reason=self._loss)
        lost_nodes: tuple[LostNode, ...] = ()
        if self._start is not None:
            lost_nodes = (LostNode(0, self._start.leader_hostname, 0, self._start.leader_nprocs, self._loss),)
        root_cause_rank = 0 if lost_nodes else -1
        remaining = self._size - 1
        if self._stop_cause:
            return self._fail_job(
                history,
                root_cause_rank=root_cause_rank,
                lost_nodes=lost_nodes,
                reason=self._describe_leader_loss(),
                no_restart_reason=describe_stop(self._stop_cause),
            )
        if remaining < self._min_nodes:
            if history.restarts_used >= self._max_restarts:
                return self._fail_job(
                    history,
                    root_cause_rank=root_cause_rank,
                    lost_nodes=lost_nodes,
                    reason=self._describe_leader_loss(),
                    no_restart_reason=f"{remaining} of at least {self._min_nodes} nodes remain",
                )
            history = replace(history, restarts_used=history.restarts_used + 1)
        self.stage = NodeStage.FINISHED
        decision = AttemptDecision(
            self.attempt,
            NextStep.RE_RENDEZVOUS,
            history,
            root_cause_rank,
            lost_nodes=lost_nodes,
            reason=self._describe_leader_loss(),
            restarts_left=max(0, self._max_restarts - history.restarts_used),
            is_restart_counted=remaining < self._min_nodes,
        )
        return [ReportAttempt(decision), Rejoin(history, remaining)]

    def _fail_job(self, history: RestartHistory, **facts: Any) -> list[NodeAction]:
        self.stage = NodeStage.FINISHED
        return [ReportJob(AttemptDecision(self.attempt, NextStep.FAILED, history, **facts))]

    def _describe_leader_loss(self) -> str:
        hostname = "" if self._start is None else f" ({self._start.leader_hostname})"
        return f"node 0{hostname} was lost: {self._loss}"

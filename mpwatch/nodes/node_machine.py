"""What one node does in a job. Pure: the node thread calls a method for each event, and executes what it returns.

    stage                it ends when ...                                               and then comes
    JOINING              StartAttempt comes                                             PREPARING
    PREPARING            the environments are made and the delay is over                RUNNING
                         StopAttempt or HoldSteps comes                                 AWAITING_DECISION
    RUNNING              a rank fails, or StopAttempt comes                             STOPPING
                         all ranks have returned, and the report is sent                AWAITING_DECISION
    STOPPING             all ranks have exited, and the report is sent                  AWAITING_DECISION
    AWAITING_DECISION    the decision is RESTART                                        JOINING
                         the decision is DONE or FAILED                                 SHUTTING_DOWN
    SHUTTING_DOWN        the caller's thread knows the decision                         FINISHED

If the coordinator is lost, this node stops its ranks, and the job has failed here. If the coordinator has dismissed this
node, because it was silent, the node stops its ranks and joins again like a new node.

Guarantees: the stages PREPARING, RUNNING and AWAITING_DECISION wait for user code, STOPPING lasts until the ranks have
exited. If nothing comes from the coordinator, the watcher thread stops the ranks within `node_timeout`
(NodeThread._renew_lease); others count this node as lost only after `node_timeout`.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto

from mpwatch.nodes.job_decision import describe_stop
from mpwatch.nodes.messages import (
    NO_ATTEMPT,
    AttemptDecision,
    AttemptFailing,
    AttemptOutcome,
    AttemptReport,
    Dismissed,
    HoldSteps,
    MessageToCoordinator,
    MessageToNode,
    NextStep,
    NodeLeaving,
    StartAttempt,
    StopAtStep,
    StopAttempt,
    StopRequest,
)
from mpwatch.watcher.processes.rank_environment import RankSetup


class NodeStage(Enum):
    JOINING = auto()
    PREPARING = auto()
    RUNNING = auto()
    STOPPING = auto()
    AWAITING_DECISION = auto()
    SHUTTING_DOWN = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class StartRanks:
    setups: list[RankSetup]


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Connect to the coordinator anew."""


# A message to the coordinator is to be sent. StartAttempt: let the caller's thread make the environments of the ranks, since
# the user's function `env` must run there. StopAttempt, HoldSteps and StopAtStep are for the ranks, a decision for the
# caller's thread.
NodeAction = (
    MessageToCoordinator | StartAttempt | StartRanks | StopAttempt | HoldSteps | StopAtStep | AttemptDecision | Rejoin
)


class NodeMachine:
    """Lives as long as the run."""

    def __init__(self) -> None:
        self.stage = NodeStage.JOINING
        self.attempt = NO_ATTEMPT  # the latest one that was started
        self._loss = ""  # why the coordinator is lost
        self._dismissal = ""  # why the others count this node as lost
        self._stop_cause = ""  # what has requested a stop of the job
        self._is_leaving = False

    @property
    def is_joining(self) -> bool:
        return self.stage is NodeStage.JOINING

    @property
    def _has_ranks(self) -> bool:
        return self.stage in (NodeStage.RUNNING, NodeStage.STOPPING)

    # ---- the coordinator

    def handle(self, message: MessageToNode) -> list[NodeAction]:
        if self.stage is NodeStage.FINISHED:
            return []
        if isinstance(message, Dismissed):
            return self._handle_dismissal(message.reason)
        if isinstance(message, StartAttempt):
            if self.stage is not NodeStage.JOINING:
                return []
            self.stage, self.attempt = NodeStage.PREPARING, message.attempt
            return [message]
        if isinstance(message, AttemptDecision):
            return self._follow_decision(message) if self.stage is NodeStage.AWAITING_DECISION else []
        if isinstance(message, StopAttempt):
            return self._handle_stop(message)
        if isinstance(message, HoldSteps):
            return self._handle_hold(message)
        return [message] if isinstance(message, StopAtStep) and self.stage is NodeStage.RUNNING else []

    def lose_coordinator(self, reason: str) -> list[NodeAction]:
        """Stop the ranks, and let the job fail here: nobody can take the place of the coordinator."""
        if self.stage in (NodeStage.SHUTTING_DOWN, NodeStage.FINISHED) or self._is_leaving:
            self.stage = NodeStage.FINISHED  # the decision about the job is known, or not awaited
            return []
        if self._loss or self._dismissal:
            return []
        self._loss = reason
        return self._stop_ranks(reason) if self._has_ranks else self._fail_job(reason)

    def _handle_dismissal(self, reason: str) -> list[NodeAction]:
        if self.stage is NodeStage.SHUTTING_DOWN or self._is_leaving:
            self.stage = NodeStage.FINISHED
            return []
        if self.stage is NodeStage.JOINING:
            return [Rejoin()]
        self._dismissal = reason
        return self._stop_ranks(f"the other nodes go on without it: {reason}") if self._has_ranks else self._rejoin()

    def _stop_ranks(self, reason: str) -> list[NodeAction]:
        """Stop the ranks, if that has not begun. `report_attempt` follows."""
        was_running, self.stage = self.stage is NodeStage.RUNNING, NodeStage.STOPPING
        return [StopAttempt(reason)] if was_running else []

    def _rejoin(self) -> list[NodeAction]:
        reason, self._dismissal = self._dismissal, ""
        if self._stop_cause:
            return self._fail_job(describe_stop(self._stop_cause))
        self.stage = NodeStage.JOINING
        decision = AttemptDecision(self.attempt, NextStep.RESTART, reason=f"this node was lost: {reason}")
        return [decision, Rejoin()]

    def _fail_job(self, reason: str) -> list[NodeAction]:
        self.stage = NodeStage.FINISHED
        return [AttemptDecision(self.attempt, NextStep.FAILED, reason=reason)]

    # ---- the ranks of this node, and its caller

    def start_ranks(self, attempt: int, setups: list[RankSetup]) -> list[NodeAction]:
        """The environments of this attempt's ranks are made, and the delay before a restart is over."""
        if self.stage is not NodeStage.PREPARING or attempt != self.attempt:
            return []  # the attempt was stopped meanwhile
        self.stage = NodeStage.RUNNING
        return [StartRanks(setups)]

    def report_failing(self) -> list[NodeAction]:
        """The attempt fails on this node. Its ranks have not exited yet."""
        if self.stage is not NodeStage.RUNNING:
            return []
        self.stage = NodeStage.STOPPING
        return [AttemptFailing(self.attempt)]

    def request_stop(self, cause: str) -> list[NodeAction]:
        self._stop_cause = self._stop_cause or cause
        return [StopRequest(cause)]

    def report_attempt(self, report: AttemptReport) -> list[NodeAction]:
        if not self._has_ranks:
            return []
        self.stage = NodeStage.AWAITING_DECISION
        if self._loss:
            return self._fail_job(self._loss)
        if self._dismissal:
            return self._rejoin()
        return [replace(report, attempt=self.attempt)]

    def abort(self, report: AttemptReport) -> list[NodeAction]:
        """The run has ended on this node because of an error in the watcher. The others do not wait for this node."""
        if self._is_over():
            return self.acknowledge_shutdown()
        self.stage = NodeStage.FINISHED
        return [replace(report, attempt=max(self.attempt, 0))]

    def report_signal(self, reason: str) -> list[NodeAction]:
        """This node leaves the job, because of a signal for example. The watcher thread itself stops the ranks."""
        self._is_leaving = True
        return self.acknowledge_shutdown() if self._is_over() else [NodeLeaving(reason)]

    def acknowledge_shutdown(self) -> list[NodeAction]:
        """The caller's thread knows the decision about the job. The end of the connection says so to the coordinator."""
        if self.stage is NodeStage.SHUTTING_DOWN:
            self.stage = NodeStage.FINISHED
        return []

    def _is_over(self) -> bool:
        return self.stage in (NodeStage.SHUTTING_DOWN, NodeStage.FINISHED)

    def _handle_stop(self, stop: StopAttempt) -> list[NodeAction]:
        if self.stage is NodeStage.PREPARING:
            return self._cancel_start()
        return self._stop_ranks(stop.reason) if self.stage is NodeStage.RUNNING else []

    def _handle_hold(self, hold: HoldSteps) -> list[NodeAction]:
        """Hold the ranks, or do not start them. If they have exited, only the highest step is reported."""
        self._stop_cause = hold.cause
        if self.stage is NodeStage.PREPARING:
            return self._cancel_start()
        return [hold] if self.stage in (NodeStage.RUNNING, NodeStage.AWAITING_DECISION) else []

    def _cancel_start(self) -> list[NodeAction]:
        self.stage = NodeStage.AWAITING_DECISION
        return [AttemptReport(self.attempt, AttemptOutcome.STOPPED)]

    def _follow_decision(self, decision: AttemptDecision) -> list[NodeAction]:
        self.stage = NodeStage.SHUTTING_DOWN if decision.ends_job else NodeStage.JOINING
        return [decision]

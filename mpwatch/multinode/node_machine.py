"""What a node does in one round of the rendezvous: a pure machine, fed with what the chair says, what becomes of the node's
own ranks, and the time, returning actions. Every node is one, the chair's too.

    ENTERING -- start --> PREPARING -- environments made --> WORKING -- stop, or they fail --> STOPPING
       ^                      `-- stop --------------------.     `-- they have returned --.       |
       |                                                    v                             v       v
       `--- verdict: again ---------------------------- WAITING <------- what became of them is told
                                                           `--- verdict: regroup ---> OVER, and the nodes meet anew
                                                            `-- verdict: done, failed --> ENDING -- closed --> OVER

Guarantees: the chair's silence, the store's loss and a word that never comes end each stage within `node_timeout`, but for
WORKING, PREPARING and WAITING while the chair is alive: there somebody's own code is at work. Ranks are never left at work
by a node that may have been given up by the others: `Lease` says until when they may be.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from mpwatch.multinode.protocol.messages import (
    NO_ATTEMPT,
    AttemptDecision,
    AttemptFailing,
    AttemptReport,
    FromMember,
    JobClosed,
    LostNode,
    NextStep,
    NodeInfo,
    NodeLeaving,
    NodeOutcome,
    RankAssignment,
    RanksStopped,
    RestartHistory,
    ShutdownAck,
    StartAttempt,
    StopAttempt,
    Word,
)


class NodeStage(Enum):
    """Where a node is."""

    ENTERING = auto()
    PREPARING = auto()
    WORKING = auto()
    STOPPING = auto()
    WAITING = auto()
    ENDING = auto()
    OVER = auto()


@dataclass(frozen=True, slots=True)
class SendToLeader:
    """Tell the chair."""

    message: FromMember


@dataclass(frozen=True, slots=True)
class PrepareRanks:
    """Make the environments of the node's ranks, which runs the caller's code."""

    start: StartAttempt
    place: RankAssignment


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start the ranks that were prepared."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StopRanks:
    """Stop the ranks."""

    why: str


@dataclass(frozen=True, slots=True)
class ReportAttempt:
    """This came of the attempt; the caller wants to know, whatever follows."""

    verdict: AttemptDecision


@dataclass(frozen=True, slots=True)
class ReportJob:
    """This came of the job."""

    verdict: AttemptDecision


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Meet the others anew, with this to tell them."""

    history: RestartHistory
    nodes: int
    """So many of this round will come."""


Action = SendToLeader | PrepareRanks | StartRanks | StopRanks | ReportAttempt | ReportJob | Rejoin


class NodeMachine:
    """Of one round.

    Args:
        card: who this node is.
        size: how many nodes there are.
        min_nodes: with how many the job can be.
        max_restarts: how many failures it survives.
        node_timeout: seconds of silence after which the chair is lost.
        now: seconds on the clock that all later times are of.
    """

    def __init__(
        self, card: NodeInfo, *, size: int, min_nodes: int, max_restarts: int, node_timeout: float, now: float
    ) -> None:
        self.stage = NodeStage.ENTERING
        self.history = card.history
        self.attempt = NO_ATTEMPT  # the latest that was started, as the job counts them
        self._card = card
        self._size, self._min_nodes, self._max_restarts = size, min_nodes, max_restarts
        self._node_timeout = node_timeout
        self._chair_beat = -1
        self._chair_seen_at = now
        self._has_resigned = False
        self._lost = ""  # why there is no chair any more
        self._has_begun = False  # ranks of this attempt
        self._is_leaving = False
        self._start: StartAttempt | None = None
        self._place: RankAssignment | None = None
        self._overdue: AttemptDecision | None = None  # said while this node was still at work: it had been given up

    @property
    def is_over(self) -> bool:
        """Whether it has nothing more to do in this round."""
        return self.stage is NodeStage.OVER

    def begin(self) -> list[Action]:
        """Its first words."""
        return [SendToLeader(self._card)]

    def see_chair(self, beat: int, now: float) -> list[Action]:
        """How often the chair has given a sign of life by now."""
        if beat != self._chair_beat:
            self._chair_beat, self._chair_seen_at = beat, now
        elif now - self._chair_seen_at > self._node_timeout:
            return self.lose_chair(f"no sign of life for {self._node_timeout:g} s")
        return []

    def forgive(self, seconds: float) -> None:
        """This node itself did not look for so long."""
        self._chair_seen_at += seconds

    def resign(self, why: str) -> list[Action]:
        """This node was silent for so long that the others may have gone on without it. They are told to; its ranks are
        stopped, and no others started; and when it knows what the others do, or that there is no chair, it comes back.
        """
        if self.stage in (NodeStage.ENDING, NodeStage.OVER):
            return []
        self._has_resigned = True
        was, self.stage = self.stage, NodeStage.STOPPING if self._has_begun else NodeStage.WAITING
        told: list[Action] = [SendToLeader(NodeLeaving(self._card.group_rank, why))]
        return told + ([StopRanks(why)] if was is NodeStage.WORKING else [])

    def hear(self, word: Word) -> list[Action]:
        """What the chair has said."""
        if self.stage is NodeStage.OVER:
            return []
        if isinstance(word, StartAttempt):
            return self._started(word)
        if isinstance(word, StopAttempt):
            return self._stopped(word) if word.attempt == self.attempt else []
        if isinstance(word, JobClosed):
            return self._leave() if self.stage is NodeStage.ENDING or self._is_leaving else []
        return self._judged(word) if self.stage in (NodeStage.WAITING, NodeStage.ENTERING) else self._given_up(word)

    def placed(self, place: RankAssignment) -> list[Action]:
        """Its ranks in the attempt that starts."""
        if self.stage is not NodeStage.PREPARING or self._start is None or place.attempt != self._start.attempt:
            return []
        self._place = place
        return [PrepareRanks(self._start, place)]

    @property
    def wants_place(self) -> int | None:
        """Of which attempt it has yet to be told its place."""
        is_wanted = self.stage is NodeStage.PREPARING and self._place is None
        return self._start.attempt if is_wanted and self._start is not None else None

    @property
    def serves_store(self) -> bool:
        """Whether the others need this node until they know what came of the job."""
        return self._card.serves_store

    def prepared(self, attempt: int) -> list[Action]:
        """The environments of the ranks of that attempt have been made, and it is time to start them."""
        if self.stage is not NodeStage.PREPARING or self._place is None or attempt != self.attempt:
            return []  # called off meanwhile
        self.stage = NodeStage.WORKING
        self._has_begun = True
        return [StartRanks(self.attempt)]

    def failing(self) -> list[Action]:
        """The node's ranks fail, or their time is up: known before they are gone."""
        if self.stage is not NodeStage.WORKING:
            return []
        self.stage = NodeStage.STOPPING
        return [SendToLeader(AttemptFailing(self._card.group_rank, self.attempt))]

    def stopped(self) -> list[Action]:
        """All of the node's ranks are gone; what became of them has yet to be found out."""
        is_at_it = self.stage in (NodeStage.WORKING, NodeStage.STOPPING)
        return [SendToLeader(RanksStopped(self._card.group_rank, self.attempt))] if is_at_it else []

    def ended(self, report: AttemptReport) -> list[Action]:
        """It is known what became of the node's ranks."""
        if self.stage not in (NodeStage.WORKING, NodeStage.STOPPING):
            return []
        report = replace(report, group_rank=self._card.group_rank, attempt=self.attempt)
        self.stage = NodeStage.WAITING
        self._has_begun = False
        if self._lost:
            return self._after_chair()
        if self._overdue is not None:
            return self._judged(self._overdue)
        return [SendToLeader(report)]

    def abort(self, report: AttemptReport) -> list[Action]:
        """This node cannot go on, through no fault of a rank; nobody need wait for it."""
        told: list[Action] = []
        if self.stage not in (NodeStage.ENDING, NodeStage.OVER):
            self.stage = NodeStage.ENDING
            told = [SendToLeader(replace(report, group_rank=self._card.group_rank, attempt=max(self.attempt, 0)))]
        return told + self.concluded()

    def leave(self, reason: str) -> list[Action]:
        """The node is told from outside to end: its ranks are being stopped."""
        self._is_leaving = True
        return (
            []
            if self.stage in (NodeStage.ENDING, NodeStage.OVER)
            else [SendToLeader(NodeLeaving(self._card.group_rank, reason))]
        )

    def lose_chair(self, why: str) -> list[Action]:
        """The chair is lost. The others find out as we do, and do the same."""
        if self.stage in (NodeStage.OVER, NodeStage.ENDING):
            self.stage = NodeStage.OVER  # what came of the job is known
            return []
        if self._lost:
            return []
        self._lost = why
        if self._has_begun:
            was_working, self.stage = self.stage is NodeStage.WORKING, NodeStage.STOPPING
            return [StopRanks(self._why_lost())] if was_working else []
        return self._after_chair()

    def lose_store(self, why: str) -> list[Action]:
        """The store is out of reach, which no other node makes good."""
        if self.stage in (NodeStage.OVER, NodeStage.ENDING):
            self.stage = NodeStage.OVER
            return []
        self._lost, self._size = why, 0
        if self._has_begun:
            self.stage = NodeStage.STOPPING
            return [StopRanks(why)]
        return self._after_chair()

    def _started(self, word: StartAttempt) -> list[Action]:
        if self.stage not in (NodeStage.ENTERING, NodeStage.WAITING) or self._has_resigned:
            return []
        self.stage = NodeStage.PREPARING
        self.attempt, self._start, self._place = word.attempt, word, None
        return []

    def _stopped(self, word: StopAttempt) -> list[Action]:
        if self.stage is NodeStage.PREPARING:
            self.stage = NodeStage.WAITING
            return [SendToLeader(AttemptReport(self._card.group_rank, self.attempt, NodeOutcome.STOPPED))]
        if self.stage is NodeStage.WORKING:
            self.stage = NodeStage.STOPPING
            return [StopRanks(word.why)]
        return []

    def _given_up(self, verdict: AttemptDecision) -> list[Action]:
        """The others go on without this node, which was silent for too long."""
        if self.stage not in (NodeStage.PREPARING, NodeStage.WORKING, NodeStage.STOPPING):
            return []
        was, self.stage = self.stage, NodeStage.STOPPING
        self._overdue = verdict
        if was is NodeStage.PREPARING:
            self.stage = NodeStage.WAITING
            return self._judged(verdict)
        return [StopRanks("this node was silent for too long")] if was is NodeStage.WORKING else []

    def _judged(self, verdict: AttemptDecision) -> list[Action]:
        self.history = verdict.history
        if verdict.decision is NextStep.RESTART:
            return [ReportAttempt(verdict)]
        if verdict.decision is NextStep.RE_RENDEZVOUS:
            self.stage = NodeStage.OVER
            return [ReportAttempt(verdict), Rejoin(verdict.history, self._size - len(verdict.gone))]
        self.stage = NodeStage.ENDING
        return [ReportJob(verdict)]

    def concluded(self) -> list[Action]:
        """What came of the job is known here, and nothing is wanted of the store any more."""
        if self.stage is not NodeStage.ENDING:
            return []
        if not self._card.serves_store and self._card.group_rank != 0:
            self.stage = NodeStage.OVER
        return [SendToLeader(ShutdownAck(self._card.group_rank))]

    def _leave(self) -> list[Action]:
        self.stage = NodeStage.OVER
        return []

    def _why_lost(self) -> str:
        return f"the node of group rank 0 is lost: {self._lost}"

    def _after_chair(self) -> list[Action]:
        """Every node that is left decides by itself what the chair would have, from what all of them know."""
        attempts = max(self.history.attempts, self.attempt + 1)
        history = replace(self.history, attempts=attempts)
        if not self._size:
            return self._give_up(history, reason=self._lost)
        gone: tuple[LostNode, ...] = ()
        if self._start is not None:
            gone = (LostNode(0, self._start.host, 0, self._start.nprocs, self._lost),)
        remaining = self._size - 1
        if remaining < self._min_nodes:
            if history.used >= self._max_restarts:
                few = f"{remaining} of at least {self._min_nodes} nodes remain"
                return self._give_up(history, reason=self._why_lost(), why_not=few, gone=gone, cause=0 if gone else -1)
            history = replace(history, used=history.used + 1)
        self.stage = NodeStage.OVER
        cause = 0 if gone else -1
        left = max(0, self._max_restarts - history.used)
        verdict = AttemptDecision(
            self.attempt, NextStep.RE_RENDEZVOUS, history, cause, gone=gone, reason=self._why_lost(), restarts_left=left
        )
        return [ReportAttempt(verdict), Rejoin(history, remaining)]

    def _give_up(self, history: RestartHistory, **what: Any) -> list[Action]:
        self.stage = NodeStage.OVER
        return [ReportJob(AttemptDecision(self.attempt, NextStep.FAILED, history, **what))]

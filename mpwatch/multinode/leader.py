"""What the node of group rank 0 does for all of a round: a pure machine, fed with what the nodes tell it, in the one order
of its inbox, and with the time, returning what is to be said to everybody.

    GATHERING -- all cards are there --> STARTING -- a port is reserved --> WORKING -- failure, loss, newcomer --> STOPPING
       `-- they disagree, or one is lost -. ^                                 `-- all have succeeded -.                |
                                          | `------------ again -----------.                          v                |
                                          `-----------------------------> verdict <------------------------------------'
                                                                              |`-- regroup --> OVER       all have told
                                                                              `-- done, failed --> CLOSING --> OVER

Newcomers are taken in as soon as they are seen; what came of an attempt, and what follows, is judged in judging.py.

Guarantees: one verdict an attempt. Each node that is neither lost nor has left is waited for; one that is silent for
`node_timeout` is lost, and one that does not say who it is, or end its ranks, in time, too. Messages grow linearly with the
nodes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from random import random

from mpwatch.multinode.job_decision import AttemptSummary, host_of, judge
from mpwatch.multinode.protocol.job_config import disagreement
from mpwatch.multinode.protocol.messages import (
    AttemptDecision,
    AttemptFailing,
    AttemptReport,
    FromMember,
    JobClosed,
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
from mpwatch.options.restart_policy import RestartPolicy

GATHER_SHARE = 2.0  # of node_timeout, for all to say who they are
STOP_SECONDS = 5.0  # beyond its grace period, for a node to stop its ranks


class RoundStage(Enum):
    """Where the round is."""

    GATHERING = auto()
    STARTING = auto()
    WORKING = auto()
    STOPPING = auto()
    CLOSING = auto()
    OVER = auto()


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Tell everybody."""

    word: Word


@dataclass(frozen=True, slots=True)
class PublishAssignments:
    """Have these there for the nodes to find, before what is said next."""

    places: tuple[RankAssignment, ...]


@dataclass(frozen=True, slots=True)
class ReservePort:
    """A port of this host for the next attempt, other than the last one."""


@dataclass(frozen=True, slots=True)
class CloseJob:
    """The job is over: nobody may join it any more."""


Act = Broadcast | PublishAssignments | ReservePort | CloseJob


class Leader:
    """Of one round.

    Args:
        size: how many nodes there are in it.
        nodes: how many there have to be, and may be.
        policy: which failures are worth another try, and how often.
        node_timeout: seconds of silence after which a node is lost.
        exit_barrier_timeout: seconds that the nodes have to take note of a success.
        now: seconds on the clock that all later times are of.
        chance: gives a number from 0 to 1, for the jitter of delays.
    """

    def __init__(
        self,
        *,
        size: int,
        nodes: tuple[int, int],
        policy: RestartPolicy,
        node_timeout: float,
        exit_barrier_timeout: float,
        now: float,
        chance: Callable[[], float] = random,
    ) -> None:
        self.stage = RoundStage.GATHERING
        self._size, (self._min_nodes, self._max_nodes) = size, nodes
        self._policy, self._chance = policy, chance
        self._node_timeout, self._exit_barrier_timeout = node_timeout, exit_barrier_timeout
        self._cards: dict[int, NodeInfo] = {}
        self._beats: dict[int, tuple[int, float]] = {}  # by node: how many there were, and since when
        self._gone: dict[int, str] = {}  # by node: why it is not counted on any more
        self._said_bye: set[int] = set()
        self._began_at = now
        self._history = RestartHistory()
        self._waiting = 0  # newcomers
        self._first_ranks: dict[int, int] = {}
        self._begin_attempt()
        self._stop_by = now + GATHER_SHARE * node_timeout

    def _begin_attempt(self) -> None:
        self._attempt = self._history.attempts
        self._order: list[int] = []  # of the nodes whose ranks failed
        self._stopped: set[int] = set()  # the nodes whose ranks are gone
        self._ended: dict[int, AttemptReport] = {}
        self._makes_room = False  # newcomers are why it was stopped
        self._stop_by = math.inf
        self._delay = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nobody needs it any more."""
        return self.stage is RoundStage.OVER

    @property
    def is_closing(self) -> bool:
        """Whether what came of the job has been said."""
        return self.stage in (RoundStage.CLOSING, RoundStage.OVER)

    @property
    def present(self) -> set[int]:
        """The nodes that are counted on."""
        return set(range(self._size)) - self._gone.keys()

    def hear(self, message: FromMember, now: float) -> list[Act]:
        """What a node tells. Nothing is believed of one that is not of this round, or was given up."""
        node = message.group_rank
        if node not in self.present or self.stage is RoundStage.OVER:
            return []
        self._beats[node] = (self._beats.get(node, (-1, now))[0], now)
        if isinstance(message, NodeInfo):
            self._cards[node] = message
            self._history = max(self._history, message.history, key=lambda history: history.attempts)
            return self._when_gathered(now) if self.stage is RoundStage.GATHERING else []
        if isinstance(message, ShutdownAck):
            self._said_bye.add(node)
            is_missed = self.stage is not RoundStage.CLOSING and node not in self._ended
            return self._lose(node, "it has left", now) if is_missed else self._when_closed()
        if isinstance(message, NodeLeaving):
            return self._lose(node, message.reason, now)
        if message.attempt != self._attempt:
            return []
        if isinstance(message, AttemptFailing):
            self._order.append(node)
            return self._stop(f"a rank has failed on {self._host(node)}", now)
        if isinstance(message, RanksStopped):
            self._stopped.add(node)
            return []
        return self._note_end(message, now)

    def see_beats(self, beats: Mapping[int, int], now: float) -> list[Act]:
        """How often each node has given a sign of life by now; one that has never, is not in it."""
        acts: list[Act] = []
        for node in sorted(self.present):
            count = beats.get(node, -1)
            known, since = self._beats.get(node, (-1, self._began_at))
            if count != known:
                self._beats[node] = (count, now)
            elif now - since > self._node_timeout and self.stage is not RoundStage.OVER:
                acts += self._lose(node, f"no sign of life for {self._node_timeout:g} s", now)
        return acts

    def see_waiting(self, count: int, now: float) -> list[Act]:
        """How many newcomers there are."""
        self._waiting = max(0, min(count, self._max_nodes - self._size))
        if self._waiting and self.stage is RoundStage.WORKING:
            self._makes_room = True
        return self._stop("other nodes have come", now) if self._waiting else []

    def forgive(self, seconds: float) -> None:
        """This node itself did not look for so long: nobody was silent meanwhile."""
        self._beats = {node: (count, since + seconds) for node, (count, since) in self._beats.items()}
        self._began_at += seconds
        self._stop_by += seconds

    def resign(self, why: str) -> list[Act]:
        """This node was silent for so long that the others may have gone on without it: what comes of their job is not for
        it to say any more. Those who are still there stop their ranks, and then miss its signs of life.
        """
        self.stage = RoundStage.OVER
        return [Broadcast(StopAttempt(self._attempt, why))]

    def reserved(self, port: int) -> list[Act]:
        """The port for the next attempt."""
        if self.stage is not RoundStage.STARTING:
            return []
        self.stage = RoundStage.WORKING
        start = StartAttempt(
            attempt=self._attempt,
            world_size=sum(card.nprocs for card in self._cards.values()),
            group_world_size=self._size,
            master_addr=self._cards[0].address,
            master_port=port,
            host=self._cards[0].host,
            nprocs=self._cards[0].nprocs,
            delay=self._delay,
        )
        return [PublishAssignments(self._places()), Broadcast(start)]

    @property
    def deadline(self) -> float:
        """When `expire` must be called; infinite if it need not be."""
        return self._stop_by

    def expire(self, now: float) -> list[Act]:
        """What is to be done now that a deadline has come."""
        if now < self._stop_by:
            return []
        self._stop_by = math.inf
        if self.stage is RoundStage.CLOSING:
            return self._be_over()
        if self.stage is RoundStage.GATHERING:
            missing, why = self.present - self._cards.keys(), "it gives signs of life, and does not say who it is"
        else:
            missing, why = self.present - self._stopped - self._ended.keys(), "it does not stop its ranks"
        return [act for node in sorted(missing) for act in self._lose(node, why, now)]

    def _when_gathered(self, now: float) -> list[Act]:
        if self._cards.keys() != set(range(self._size)):
            return []
        self._begin_attempt()
        if why := disagreement(list(self._cards.values())):
            return self._conclude(now, why)
        if self._waiting:
            return self._conclude(now)
        self.stage = RoundStage.STARTING
        return [ReservePort()]

    def _places(self) -> tuple[RankAssignment, ...]:
        """Global ranks: those of lower nodes come first; ranks of a role: the same among the nodes of that role."""
        of_role: dict[str, int] = {}
        for card in self._cards.values():
            of_role[card.role] = of_role.get(card.role, 0) + card.nprocs
        places, rank, role_rank = [], 0, dict.fromkeys(of_role, 0)
        for node in range(self._size):
            card = self._cards[node]
            self._first_ranks[node] = rank
            places.append(RankAssignment(node, self._attempt, card.nonce, rank, role_rank[card.role], of_role[card.role]))
            rank += card.nprocs
            role_rank[card.role] += card.nprocs
        return tuple(places)

    def _note_end(self, report: AttemptReport, now: float) -> list[Act]:
        node = report.group_rank
        if report.outcome is NodeOutcome.STOPPED and self.stage is RoundStage.WORKING:  # of its own accord: see Lease
            return self._lose(node, "it could not reach the store for a while, and has stopped its ranks", now)
        self._ended[node] = report
        acts: list[Act] = []
        if report.outcome not in (NodeOutcome.SUCCEEDED, NodeOutcome.STOPPED):
            if node not in self._order:
                self._order.append(node)
            acts = self._stop(f"a rank has failed on {self._host(node)}", now)
        return acts + self._when_ended(now)

    def _lose(self, node: int, why: str, now: float) -> list[Act]:
        if node not in self.present:
            return []
        self._gone[node] = why
        if self.stage is RoundStage.CLOSING:
            return self._when_closed()
        if self.stage is RoundStage.GATHERING:
            return self._conclude(now)
        return self._stop(f"{self._host(node)} is gone: {why}", now) + self._when_ended(now)

    def _stop(self, why: str, now: float) -> list[Act]:
        if self.stage is RoundStage.STARTING:  # nobody has begun
            return self._conclude(now)
        if self.stage is not RoundStage.WORKING:
            return []
        self.stage = RoundStage.STOPPING
        self._stop_by = now + max(card.grace_period for card in self._cards.values()) + STOP_SECONDS
        return [Broadcast(StopAttempt(self._attempt, why))]

    def _when_ended(self, now: float) -> list[Act]:
        """Whether all who are left have told what became of their ranks."""
        if self.stage not in (RoundStage.WORKING, RoundStage.STOPPING) or not self.present <= self._ended.keys():
            return []
        return self._conclude(now)

    def _when_closed(self) -> list[Act]:
        done = self.stage is RoundStage.CLOSING and self.present <= self._said_bye
        return self._be_over() if done else []

    def _be_over(self) -> list[Act]:
        self.stage = RoundStage.OVER
        return [Broadcast(JobClosed())]

    def _conclude(self, now: float, why: str = "") -> list[Act]:
        """Say what came of the attempt, and see to what follows."""
        if why:
            verdict = AttemptDecision(self._attempt, NextStep.FAILED, self._history, reason=why)
        else:
            verdict = judge(self._case(), self._policy, self._chance)
        self._history, self._stop_by = verdict.history, math.inf
        if verdict.decision is NextStep.RE_RENDEZVOUS:
            self.stage = RoundStage.OVER
            return [Broadcast(verdict)]
        if verdict.decision is NextStep.RESTART:
            self._begin_attempt()
            self._delay = verdict.delay
            self.stage = RoundStage.STARTING
            return [Broadcast(verdict), ReservePort()]
        self.stage = RoundStage.CLOSING
        has_succeeded = verdict.decision is NextStep.DONE
        self._stop_by = now + (self._exit_barrier_timeout if has_succeeded else self._node_timeout)
        return [CloseJob(), Broadcast(verdict)]

    def _case(self) -> AttemptSummary:
        return AttemptSummary(
            attempt=self._attempt,
            has_begun=self.stage in (RoundStage.WORKING, RoundStage.STOPPING),
            history=self._history,
            cards=self._cards,
            first_ranks=self._first_ranks,
            size=self._size,
            nodes=(self._min_nodes, self._max_nodes),
            waiting=self._waiting,
            makes_room=self._makes_room,
            order=self._order,
            ended=self._ended,
            gone=self._gone,
        )

    def _host(self, node: int) -> str:
        return host_of(self._cards, node)

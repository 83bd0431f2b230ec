"""The decisions for the whole job: who takes part, when attempts start and stop, and what comes next. Pure.

    server --- join, handle, lose, time ---> Coordinator ---> actions: Send, LogWarning, AttemptDecision

    stage            it ends when ...                                               and then comes
    JOINING          enough nodes have joined                                       RUNNING
    RUNNING          all nodes have reported success                                the decision
                     a rank fails, a node is lost, or more nodes wait               STOPPING
                     the collectives of several nodes can never end                 STOPPING
    STOPPING         all nodes that are not lost have reported                      the decision
    the decision     (job_decision.py)  RESTART                                     JOINING
                                        DONE, FAILED                                SHUTTING_DOWN
    SHUTTING_DOWN    all nodes have left, since they know the decision,             FINISHED
                     or the time is over

A node is lost if its connection ends, if it is silent for `node_timeout`, if it leaves, or if it does not stop its ranks in
time. Then it is dismissed, and may join again like a new node. Nodes beyond the maximum wait until there is room.

When a stop is requested on a node, all ranks hold before their next step (HoldSteps). Each node answers with the highest
step that its ranks have passed, and all ranks stop after the highest of these (StopAtStep). Then nothing is restarted. If a
node has not started its ranks yet, the job ends.

Guarantees: at most one decision about an attempt. Before it, the reports of all nodes that are not lost. The number of
messages grows linearly with the number of nodes.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from random import random

from mpwatch.nodes.job_decision import JobAttempt, describe_stop
from mpwatch.nodes.job_verdict import merge_nodes, read_records
from mpwatch.nodes.json_codec import InvalidMessageError
from mpwatch.nodes.messages import (
    AttemptDecision,
    AttemptFailing,
    AttemptOutcome,
    AttemptReport,
    Dismissed,
    HoldSteps,
    Joined,
    MessageToCoordinator,
    MessageToNode,
    NextStep,
    NodeInfo,
    NodeLeaving,
    RanksStalled,
    RanksStopped,
    Refused,
    StartAttempt,
    StepsHeld,
    StopAtStep,
    StopAttempt,
    StopRequest,
)
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.watcher.diagnosis.collective_verdict import find_verdicts, format_stall_warning, select_new_stalls
from mpwatch.watcher.restarts.restart_budget import RestartBudget

STOP_SECONDS = 5.0  # a node has this time after its grace period to stop its ranks
REJOIN_LAST_CALL_SECONDS = 2.0  # how long a job that has lost nodes waits for more than the least number of nodes
TELL_SECONDS = 3.0  # after which a node is told that it still waits


class JobStage(Enum):
    JOINING = auto()
    RUNNING = auto()
    STOPPING = auto()
    SHUTTING_DOWN = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Send:
    """To the node with this number. After Refused and Dismissed, its connection is closed."""

    node: int
    message: MessageToNode


@dataclass(frozen=True, slots=True)
class LogWarning:
    text: str


# An AttemptDecision is for a program that has started the nodes: the job is over, or goes on although all nodes are lost.
CoordinatorAction = Send | LogWarning | AttemptDecision


@dataclass(slots=True, eq=False)
class _Member:
    number: int
    """Of its connection."""
    info: NodeInfo
    port: int
    joined_at: float
    leaves_at: float
    tell_at: float
    node: int | None = None
    """Its group rank in the present attempt, or None if it waits."""


class Coordinator:
    """Decides for one job. The server calls one method at a time, and executes what it returns.

    `required` is a hostname and the options that all nodes must have; None: those of the first node.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        policy: RestartPolicy,
        *,
        stall_after: float | None = None,
        required: tuple[str, Mapping[str, str]] | None = None,
        rng: Callable[[], float] = random,
    ) -> None:
        self.stage = JobStage.JOINING
        self._rendezvous, self._run_id = rendezvous, rendezvous.run_id
        self._min_nodes, self._max_nodes = rendezvous.min_nodes, rendezvous.max_nodes
        self._policy, self._budget = policy, RestartBudget(policy, rng)
        self._stall_after, self._required = stall_after, required
        self._members: dict[int, _Member] = {}  # by the number of the connection, in the order of their coming
        self._refusal = ""  # of a node whose options differ
        self._stop_cause = ""  # what has requested a stop of the job
        self._begin_at = self._deadline = math.inf  # when the job begins with the nodes that have joined; for nodes to stop
        self._attempt, self._round = JobAttempt(), list[_Member]()  # the nodes of the attempt, also those that are lost
        self._delay, self._is_restart_counted = 0.0, False  # of the next attempt
        self._has_new_collectives = False

    @property
    def deadline(self) -> float:
        waiting = self._list_waiting()
        return min([self._deadline, self._begin_at, *(min(member.leaves_at, member.tell_at) for member in waiting)])

    # ---- nodes come and go

    def join(self, number: int, info: NodeInfo, now: float) -> list[CoordinatorAction]:
        if info.run_id != self._run_id:
            reason = f"job {self._run_id!r} is here, not {info.run_id!r}; give each job a port of its own"
            return [Send(number, Refused(reason, may_retry=True))]
        if self.stage in (JobStage.SHUTTING_DOWN, JobStage.FINISHED):
            return [Send(number, Refused(f"job {self._run_id!r} is over", may_retry=True))]
        self._required = self._required or (info.hostname, info.options)
        hostname, options = self._required
        if reason := _describe_difference(info.options, options, info.hostname, f"{hostname}, which came first"):
            self._refusal = f" Node {info.hostname} was refused: {reason}"
            return [Send(number, Refused(f"job {self._run_id!r}: {reason}"))]
        seconds = info.join_timeout if info.seconds_left is None else min(info.join_timeout, info.seconds_left)
        self._members[number] = _Member(number, info, info.port, now, now + seconds, now + TELL_SECONDS)
        joined = Send(number, self._make_joined())
        if self.stage is not JobStage.JOINING:
            return [joined, *self._make_room(now)]
        if self._attempt.infos:
            self._begin_at = min(self._begin_at, now + REJOIN_LAST_CALL_SECONDS)
        return [joined, *self._begin_if_complete(now)]

    def lose(self, number: int, reason: str, now: float) -> list[CoordinatorAction]:
        """The connection of a node has ended, or the node is silent or leaves."""
        member = self._members.pop(number, None)
        if member is None:
            return []
        actions: list[CoordinatorAction] = [Send(number, Dismissed(reason))]
        if self.stage is JobStage.SHUTTING_DOWN:
            self._finish_if_all_have_left()
        if member.node is None or self.stage not in (JobStage.RUNNING, JobStage.STOPPING):
            return actions
        report = self._attempt.reports.get(member.node)
        if report is not None and report.outcome is AttemptOutcome.ABORTED:
            return actions  # it has said why it leaves
        self._attempt.lost[member.node] = reason
        text = f"{self._attempt.describe_node(member.node)} was lost: {reason}"
        return actions + self._stop_attempt(text, now) + self._decide_if_complete(now)

    def _list_waiting(self) -> list[_Member]:
        is_joining = self.stage is JobStage.JOINING
        return [member for member in self._members.values() if is_joining or member.node is None]

    def _count_newcomers(self) -> int:
        if self._stop_cause:
            return 0
        newcomers = sum(member.node is None for member in self._members.values())
        return max(0, min(newcomers, self._max_nodes - len(self._attempt.active)))

    def _make_room(self, now: float) -> list[CoordinatorAction]:
        if not self._count_newcomers() or self.stage is not JobStage.RUNNING:
            return []
        self._attempt.was_stopped_for_newcomers = True
        return self._stop_attempt("more nodes want to join", now)

    def _make_joined(self) -> Joined:
        return Joined(len(self._members), self._min_nodes)

    def _begin_if_complete(self, now: float) -> list[CoordinatorAction]:
        count = len(self._members)
        if count < self._min_nodes:
            self._begin_at = math.inf
            return []
        if self._begin_at == math.inf:
            self._begin_at = now + self._rendezvous.last_call_timeout
        if count < self._max_nodes and now < self._begin_at:
            return []
        members = sorted(self._members.values(), key=lambda member: (member.node is None, member.number))
        chosen = sorted(members[: self._max_nodes], key=_sort_key)
        return self._start_attempt(chosen)

    def _start_attempt(self, members: list[_Member]) -> list[CoordinatorAction]:
        number = self._attempt.number + 1 if self._attempt.infos else 0
        for member in self._members.values():
            member.node = None
        for node, member in enumerate(members):
            member.node = node
        infos = [member.info for member in members]
        self._round, self._attempt = members, JobAttempt(number=number, infos=infos)
        self.stage, self._begin_at, self._has_new_collectives = JobStage.RUNNING, math.inf, False
        role_sizes, role_ranks = Counter[str](), Counter[str]()
        for info in infos:
            role_sizes[info.role] += info.nprocs
        actions: list[CoordinatorAction] = []
        for node, (member, first_rank) in enumerate(zip(members, self._attempt.first_ranks, strict=False)):
            role = member.info.role
            start = StartAttempt(
                attempt=number,
                group_rank=node,
                first_rank=first_rank,
                first_role_rank=role_ranks[role],
                role_world_size=role_sizes[role],
                world_size=role_sizes.total(),
                group_world_size=len(members),
                master_addr=infos[0].address,
                master_port=members[0].port,
                delay=self._delay,
                is_counted=self._is_restart_counted,
            )
            actions.append(Send(member.number, start))
            role_ranks[role] += member.info.nprocs
        return actions + (self._broadcast(HoldSteps(self._stop_cause)) if self._stop_cause else [])

    def _broadcast(self, message: MessageToNode) -> list[CoordinatorAction]:
        return [Send(self._round[node].number, message) for node in sorted(self._attempt.active)]

    # ---- an attempt

    def handle(self, number: int, message: MessageToCoordinator, now: float) -> list[CoordinatorAction]:
        member, attempt = self._members.get(number), self._attempt
        node = None if member is None else member.node
        if isinstance(message, NodeLeaving):
            return self.lose(number, message.reason, now)
        if member is None or node is None or self.stage is JobStage.FINISHED:
            return []
        if isinstance(message, StopRequest):
            return self._request_stop(message.cause)
        if isinstance(message, AttemptReport):
            member.port = message.port or member.port
        if not isinstance(message, AttemptFailing | RanksStopped | RanksStalled | StepsHeld | AttemptReport):
            return []
        if message.attempt != attempt.number or self.stage not in (JobStage.RUNNING, JobStage.STOPPING):
            return []
        if isinstance(message, AttemptFailing):
            return self._fail(node, now)
        if isinstance(message, RanksStopped):
            attempt.stopped.add(node)
            return []
        if isinstance(message, StepsHeld):
            return self._handle_held_steps(node, message)
        if isinstance(message, AttemptReport):
            return self._handle_report(member, node, message, now)
        self._set_collectives(node, message)
        return []

    def _request_stop(self, cause: str) -> list[CoordinatorAction]:
        is_first, self._stop_cause = not self._stop_cause, self._stop_cause or cause
        is_running = self.stage is JobStage.RUNNING
        return self._broadcast(HoldSteps(cause)) if is_first and is_running else []

    def _handle_held_steps(self, node: int, message: StepsHeld) -> list[CoordinatorAction]:
        """When the ranks of all nodes hold, let all stop at one step."""
        attempt = self._attempt
        attempt.held_steps[node] = message.step
        if self.stage is not JobStage.RUNNING or not attempt.active <= attempt.held_steps.keys():
            return []
        highest = max((step for step in attempt.held_steps.values() if step is not None), default=None)
        return self._broadcast(StopAtStep(self._stop_cause, highest))

    def judge_stalls(self, now: float) -> list[CoordinatorAction]:
        """Compare new collectives of all nodes, and stop the attempt if one can never end. Called once after all new
        messages, since a comparison of thousands of ranks takes a second.
        """
        if not self._has_new_collectives or self.stage is not JobStage.RUNNING:
            return []
        self._has_new_collectives = False
        if self._stall_after is None:
            return []
        job = merge_nodes(self._attempt.collectives.values())
        verdicts = find_verdicts(job.answers, job.returned)
        stalls = [verdict for verdict in verdicts if verdict.seconds >= self._stall_after]
        if final := next((stall for stall in stalls if stall.cannot_end_well), None):
            self._attempt.verdict = final
            return self._stop_attempt(final.sentence, now)
        new = select_new_stalls(stalls, self._attempt.warned)
        return [LogWarning(format_stall_warning(stall, job.answers, stall.seconds)) for stall in new]

    def _set_collectives(self, node: int, message: RanksStalled | AttemptReport) -> None:
        self._attempt.collectives[node] = read_records(message.collectives)
        self._has_new_collectives = True

    def _handle_report(self, member: _Member, node: int, report: AttemptReport, now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        if report.outcome is AttemptOutcome.STOPPED and self.stage is JobStage.RUNNING:
            if not self._stop_cause:
                # No StopAttempt was sent, so the lease of the node's ranks has expired (NodeThread._renew_lease).
                reason = "it could not reach the coordinator for a while, and has stopped its ranks"
                return self.lose(member.number, reason, now)
            # Its ranks had not been started when the stop was requested.
            actions = self._stop_attempt(describe_stop(self._stop_cause), now)
        check_failures(report)
        self._attempt.reports[node] = report
        self._set_collectives(node, report)
        has_failed = report.outcome not in (AttemptOutcome.SUCCEEDED, AttemptOutcome.STOPPED)
        return actions + (self._fail(node, now) if has_failed else []) + self._decide_if_complete(now)

    def _fail(self, node: int, now: float) -> list[CoordinatorAction]:
        if node not in self._attempt.failure_order:
            self._attempt.failure_order.append(node)
        return self._stop_attempt(f"the attempt failed on {self._attempt.describe_node(node)}", now)

    def _stop_attempt(self, reason: str, now: float) -> list[CoordinatorAction]:
        if self.stage is not JobStage.RUNNING:
            return []
        self.stage = JobStage.STOPPING
        self._deadline = now + max(info.grace_period for info in self._attempt.infos) + STOP_SECONDS
        return self._broadcast(StopAttempt(reason))

    def handle_deadline(self, now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        if now >= self._deadline:
            self._deadline = math.inf
            if self.stage is JobStage.SHUTTING_DOWN:
                self.stage = JobStage.FINISHED
                return []
            attempt = self._attempt
            for node in sorted(attempt.active - attempt.stopped - attempt.reports.keys()):
                actions += self.lose(self._round[node].number, "it does not stop its ranks", now)
        if self.stage is JobStage.JOINING and now >= self._begin_at:
            actions += self._begin_if_complete(now)
        for member in self._list_waiting():
            if now >= member.leaves_at:
                del self._members[member.number]
                actions.append(Send(member.number, Refused(self._describe_wait(now - member.joined_at))))
            elif now >= member.tell_at:
                member.tell_at = math.inf
                actions.append(Send(member.number, self._make_joined()))
        return actions

    def _describe_wait(self, seconds: float) -> str:
        if self.stage is JobStage.JOINING:
            return (
                f"{len(self._members) + 1} of {self._min_nodes} nodes had joined after {seconds:.1f} s. Check that"
                f" mpwatch.run has been called on all nodes, with the same run_id and endpoint.{self._refusal}"
            )
        if len(self._round) >= self._max_nodes:
            return (
                f"the job has its maximum number of nodes ({self._max_nodes}), and none of them has left in {seconds:.1f} s."
                " To allow more nodes, give all nodes a larger nnodes=(min, max)"
            )
        return f"the job has not taken in this node within {seconds:.1f} s. Check what the other nodes report"

    # ---- the decision

    def _decide_if_complete(self, now: float) -> list[CoordinatorAction]:
        is_started = self.stage in (JobStage.RUNNING, JobStage.STOPPING)
        return self._decide(now) if is_started and self._attempt.active <= self._attempt.reports.keys() else []

    def _decide(self, now: float) -> list[CoordinatorAction]:
        decision = self._attempt.decide(
            self._policy,
            self._budget,
            min_nodes=self._min_nodes,
            newcomers=self._count_newcomers(),
            stop_cause=self._stop_cause,
        )
        self._deadline, self._delay, self._is_restart_counted = math.inf, decision.delay, decision.is_restart_counted
        actions = self._broadcast(decision)
        if decision.ends_job or not self._attempt.active:
            actions.append(decision)
        if decision.next_step is NextStep.RESTART:
            self.stage, self._begin_at = JobStage.JOINING, now
            for member in self._members.values():
                left = math.inf if member.info.seconds_left is None else member.joined_at + member.info.seconds_left
                member.joined_at, member.leaves_at = now, min(now + member.info.join_timeout, left)
                member.tell_at = now + TELL_SECONDS
            return actions + self._begin_if_complete(now)
        self.stage = JobStage.SHUTTING_DOWN
        options, has_succeeded = self._rendezvous, decision.next_step is NextStep.DONE
        self._deadline = now + (options.exit_barrier_timeout if has_succeeded else options.node_timeout)
        over = Refused(f"job {self._run_id!r} is over")
        for member in self._list_waiting():
            del self._members[member.number]
            actions.append(Send(member.number, over))
        self._finish_if_all_have_left()
        return actions

    def _finish_if_all_have_left(self) -> None:
        if all(member.number not in self._members for member in self._round):
            self.stage = JobStage.FINISHED


def _sort_key(member: _Member) -> tuple[float, bool]:
    """By the rank that was set; else the node of the coordinator comes first, and the others as they have come."""
    return math.inf if member.info.rank is None else member.info.rank, not member.info.is_host


def _describe_difference(ours: Mapping[str, str], theirs: Mapping[str, str], our_name: str, their_name: str) -> str:
    """Return an error text about the first option that differs between two nodes, or "" if none differs."""
    for name, value in ours.items():
        their_value = theirs.get(name, "nothing")
        if their_value != value:
            return (
                f"the nodes of the job disagree about {name}: {value} on {our_name}, {their_value} on {their_name}. Make the"
                " same call on all nodes, with the same versions of mpwatch and torch"
            )
    return ""


def check_failures(report: AttemptReport) -> None:
    """Raises InvalidMessageError if a failure lacks what the decision needs. The rest is checked where it is shown."""
    for failure in (*report.failures, *report.missing_ranks):
        if not isinstance(failure.get("rank"), int):
            raise InvalidMessageError("AttemptReport has a failure without the number of its rank")

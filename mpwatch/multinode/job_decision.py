"""What an attempt of several nodes has come to, and what follows: a pure function of what the chair knows.

Who failed first: class before time, and then the order of the inbox. If ranks have only waited for a peer that has not come,
it is one that was doing something else, on whichever node. A node that is gone is the cause only of what nobody failed at
for himself; and costs a restart only if too few remain without it. To make room for newcomers costs none.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import random

from mpwatch.multinode.protocol.failure_codec import as_many_as_fit
from mpwatch.multinode.protocol.messages import (
    AttemptDecision,
    AttemptReport,
    LostNode,
    NextStep,
    NodeInfo,
    NodeOutcome,
    RestartHistory,
)
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.results.model import FailureKind
from mpwatch.watcher.restarts.restart_budget import UNWANTED, FailedAttempt, RestartBudget, RestartCounters

MOST_FAILURES = 64  # are told of in full; more are counted
FAILURES_LIMIT = 512 * 1024  # bytes of all of them: what the chair says goes into one entry of the store
MOST_GONE = 1000  # nodes are told of


@dataclass(frozen=True, kw_only=True)
class AttemptSummary:
    """All that is known of an attempt that is over."""

    attempt: int
    has_begun: bool
    """Whether any ranks may have been started."""
    history: RestartHistory
    """Before it."""
    cards: Mapping[int, NodeInfo]
    """By node; not of all, if some were lost before they had come."""
    first_ranks: Mapping[int, int]
    """By node, if it has begun."""
    size: int
    nodes: tuple[int, int]
    waiting: int
    """Newcomers."""
    makes_room: bool = False
    """Whether it was for them that the ranks were stopped: who complains of a peer then, has seen it stop."""
    order: Sequence[int]
    """The nodes whose ranks failed, in the order in which they said so."""
    ended: Mapping[int, AttemptReport]
    gone: Mapping[int, str]
    """By node, in the order in which they went: why."""


def judge(case: AttemptSummary, policy: RestartPolicy, chance: Callable[[], float] = random) -> AttemptDecision:
    """What came of it."""
    verdict = _judged(_with_absent(case, policy), policy, chance)
    return replace(verdict, restarts_left=max(0, policy.max_restarts - verdict.history.used))


def _judged(case: AttemptSummary, policy: RestartPolicy, chance: Callable[[], float]) -> AttemptDecision:
    ends = case.ended.values()
    if len(ends) == case.size and all(end.outcome is NodeOutcome.SUCCEEDED for end in ends):
        return _verdict(case, NextStep.DONE)
    root = _root(case)
    for end in ends:
        why = f"{host_of(case.cards, end.group_rank)}: {end.reason}"
        if end.outcome is NodeOutcome.TIMED_OUT:
            return _verdict(case, NextStep.FAILED, reason=why, timed_out=True)
        if end.outcome is NodeOutcome.ABORTED:
            before = root or end  # whose ranks had failed, if any had
            return _verdict(case, NextStep.FAILED, cause=_cause(before), reason=why, why_not=why if before.failures else "")
    if root is not None and not ((case.gone or case.makes_room) and _innocence(root)):
        return _after_failure(case, root, policy, chance)
    return (
        _after_loss(case, policy, chance) if case.gone else _verdict(case, NextStep.RE_RENDEZVOUS, reason=_newcomers(case))
    )


def _with_absent(case: AttemptSummary, policy: RestartPolicy) -> AttemptSummary:
    """The same; if those who failed waited for ranks of other nodes, then these have failed, too, and for themselves."""
    root = _root(case)
    complaints = [end for end in case.ended.values() if end.lacks_a_peer]
    if root is None or not _innocence(root) or not complaints or case.gone:
        return case
    found = {node: _with_its_absent(end, complaints[0], policy) for node, end in sorted(case.ended.items()) if end.absent}
    return replace(case, order=list(dict.fromkeys([*case.order, *found])), ended={**case.ended, **found})


def _with_its_absent(end: AttemptReport, complaint: AttemptReport, policy: RestartPolicy) -> AttemptReport:
    why_not = "" if policy.retry_if is None or FailureKind.HANG in policy.causes else UNWANTED
    if policy.retry_if is not None and not policy.causes:  # code of the user's, which was asked about the complaint
        why_not = complaint.why_not
    return replace(
        end,
        outcome=NodeOutcome.FAILED,
        failures=(*end.absent, *end.failures),
        unsaid=end.unsaid + end.absent_unsaid,
        lacks_a_peer=False,
        why_not=why_not,
        reason=complaint.reason,
    )


def host_of(cards: Mapping[int, NodeInfo], node: int) -> str:
    """What to call a node."""
    card = cards.get(node)
    return f"node {node}" if card is None else f"node {node} ({card.host})"


def _root(case: AttemptSummary) -> AttemptReport | None:
    """Of those who failed: whoever did so for himself, and of several the first."""
    failed = [
        case.ended[node] for node in case.order if node in case.ended and case.ended[node].outcome is NodeOutcome.FAILED
    ]
    return min(failed, key=_innocence, default=None)  # the first of those that are equal


def _innocence(end: AttemptReport) -> int:
    """0: its ranks have failed for themselves. They may also have waited for a peer in vain, or have lost one; or they
    certainly complain of one.
    """
    if end.failures and end.failures[0].get("is_secondary") is True:
        return 2
    return 1 if end.lacks_a_peer or end.may_be_victim else 0


def _after_failure(
    case: AttemptSummary, root: AttemptReport, policy: RestartPolicy, chance: Callable[[], float]
) -> AttemptDecision:
    failed_attempt = FailedAttempt(
        cause=None,
        why_not=lambda: root.why_not,
        healthy_seconds=root.healthy_seconds,
        step=max((end.step for end in case.ended.values() if end.step >= 0), default=None),
    )
    return _tried_again(case, policy, chance, failed_attempt, cause=_cause(root), reason=root.reason)


def _cause(end: AttemptReport) -> int:
    """The rank that has failed first there."""
    rank = end.failures[0].get("rank") if end.failures else None
    return rank if isinstance(rank, int) else -1


def _after_loss(case: AttemptSummary, policy: RestartPolicy, chance: Callable[[], float]) -> AttemptDecision:
    """Nobody failed for himself; but some are gone."""
    node, why = next(iter(case.gone.items()))
    reason = f"{host_of(case.cards, node)} is gone: {why}"
    server = next((gone for gone in case.gone if gone in case.cards and case.cards[gone].serves_store), None)
    if server is not None:
        why_not = f"{host_of(case.cards, server)} served the store, without which the others cannot go on"
        reason = f"{reason}; {why_not}"
        return _verdict(case, NextStep.FAILED, cause=_first_rank(case, node), reason=reason, why_not=why_not)
    remaining = case.size - len(case.gone) + case.waiting
    if remaining >= case.nodes[0]:
        return _verdict(case, NextStep.RE_RENDEZVOUS, cause=_first_rank(case, node), reason=reason)
    few = f"{remaining} of at least {case.nodes[0]} nodes remain"
    verdict = _tried_again(
        case, policy, chance, FailedAttempt(cause=None, why_not=str), cause=_first_rank(case, node), reason=reason
    )
    return replace(verdict, why_not=verdict.why_not or few) if verdict.decision is NextStep.FAILED else verdict


def _tried_again(
    case: AttemptSummary,
    policy: RestartPolicy,
    chance: Callable[[], float],
    failed_attempt: FailedAttempt,
    *,
    cause: int,
    reason: str,
) -> AttemptDecision:
    """Or not, as the policy has it."""
    known = case.history
    counters = RestartCounters(used=known.used, furthest=known.furthest, stalled=known.stalled, is_new=not known.attempts)
    budget = RestartBudget(policy, chance, counters)
    decision = budget.decide(failed_attempt)
    history = replace(known, used=budget.counters.used, furthest=budget.counters.furthest, stalled=budget.counters.stalled)
    case = replace(case, history=history)
    if decision.delay is None:
        return _verdict(case, NextStep.FAILED, cause=cause, reason=reason, why_not=decision.why_not)
    again = NextStep.RE_RENDEZVOUS if case.gone or case.waiting else NextStep.RESTART
    delay = 0.0 if again is NextStep.RE_RENDEZVOUS else decision.delay  # to meet anew takes its own time
    return replace(_verdict(case, again, cause=cause, reason=reason), delay=delay)


def _verdict(
    case: AttemptSummary,
    decision: NextStep,
    *,
    cause: int = -1,
    reason: str = "",
    why_not: str = "",
    timed_out: bool = False,
) -> AttemptDecision:
    failures = [failure for node in _by_blame(case) for failure in case.ended[node].failures]
    told = as_many_as_fit(failures[:MOST_FAILURES], FAILURES_LIMIT) if decision is not NextStep.DONE else ()
    unsaid = sum(end.unsaid for end in case.ended.values()) + len(failures) - len(told)
    return AttemptDecision(
        attempt=case.attempt,
        decision=decision,
        history=replace(case.history, attempts=case.attempt + case.has_begun),
        cause=cause,
        failures=told,
        unsaid=unsaid,
        gone=tuple(
            LostNode(node, case.cards[node].host, _first_rank(case, node), case.cards[node].nprocs, why)
            for node, why in case.gone.items()
            if node in case.cards
        )[:MOST_GONE],
        reason=reason,
        why_not=why_not,
        timed_out=timed_out,
    )


def _by_blame(case: AttemptSummary) -> list[int]:
    """The nodes that have told, those that failed for themselves first, each class in the order of their failures."""
    place = {node: n for n, node in enumerate(case.order)}
    return sorted(case.ended, key=lambda node: (_innocence(case.ended[node]), place.get(node, math.inf), node))


def _first_rank(case: AttemptSummary, node: int) -> int:
    return case.first_ranks.get(node, -1)


def _newcomers(case: AttemptSummary) -> str:
    return f"other nodes have come: {case.waiting}" if case.waiting else "not all nodes had come"

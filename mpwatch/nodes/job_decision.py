"""Decide what the nodes do after an attempt: end, restart, or join the next round. The coordinator calls this.

    all nodes succeeded                                    DONE
    a node's `timeout` ran out, or its caller raised       FAILED
    a rank failed                                          RESTART if the restart policy allows it, else FAILED
    a node is lost, enough nodes remain                    RE_RENDEZVOUS; costs no restart
    a node is lost, too few nodes remain                   RE_RENDEZVOUS if a restart is left, else FAILED
    the node of the coordinator is lost                    FAILED
    more nodes want to join                                RE_RENDEZVOUS; costs no restart
    a stop was requested                                   FAILED instead of RESTART and RE_RENDEZVOUS

The functions are pure, except that random numbers come from `rng`, which a test can replace.

The coordinator compares the collectives of all ranks (job_verdict.py). If the comparison explains all failures of an
attempt, the comparison also names the root cause. If the comparison does not explain all failures, the coordinator ignores
failures that may be consequences of events on other nodes. The root cause is the first remaining failure, in the order in
which the failures reached the coordinator. If no failure remains, the coordinator blames missing ranks. A missing rank has
probably kept ranks of other nodes waiting. A rank that failed by itself is a more likely root cause than a lost node.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import random

from mpwatch.nodes.failure_codec import limit_total_size
from mpwatch.nodes.job_verdict import blame_ranks, find_reported_verdict, is_explained
from mpwatch.nodes.messages import (
    AttemptDecision,
    AttemptReport,
    LostNode,
    NextStep,
    NodeInfo,
    NodeOutcome,
    RestartHistory,
)
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.results.failure import FailureKind, format_ranks
from mpwatch.watcher.diagnosis.collective_verdict import CollectiveVerdict
from mpwatch.watcher.restarts.restart_budget import NOT_IN_RETRY_IF, FailedAttempt, RestartBudget, RestartCounters

MAX_FAILURES = 64  # failures that are sent in full. Further failures are only counted
MAX_FAILURES_BYTES = 512 * 1024  # of all failures together
MAX_LOST_NODES = 1000  # lost nodes that are listed in a decision


@dataclass(frozen=True, kw_only=True)
class AttemptSummary:
    attempt: int
    history: RestartHistory
    """The history before this attempt."""
    node_infos: Mapping[int, NodeInfo]
    """The NodeInfo of each node by its group rank. A node that was lost early has no NodeInfo."""
    first_ranks: Mapping[int, int]
    """The first global rank of each node. The dict is empty if the attempt has not started."""
    size: int
    """How many nodes the round has."""
    min_nodes: int
    """How many nodes the job needs."""
    waiting_nodes: int
    """How many nodes wait to join."""
    stopped_for_waiting_nodes: bool = False
    """Whether the attempt was stopped because nodes wait to join. Then a victim may have failed because of this stop."""
    failure_order: Sequence[int]
    """The nodes whose ranks failed, in the order of their messages."""
    reports: Mapping[int, AttemptReport]
    """The report of each node."""
    lost_nodes: Mapping[int, str]
    """The reason for each lost node, in the order in which the nodes were lost."""
    verdict: CollectiveVerdict | None = None
    """The mismatch between the ranks' collectives that has ended the attempt, or None."""
    stop_cause: str = ""
    """A text that says what has requested a stop of the job. It is empty if no stop was requested."""


def decide_next_step(summary: AttemptSummary, policy: RestartPolicy, rng: Callable[[], float] = random) -> AttemptDecision:
    decision = _decide(_find_cause_on_other_node(summary, policy), policy, rng)
    if summary.stop_cause and decision.next_step in (NextStep.RESTART, NextStep.RE_RENDEZVOUS):
        decision = replace(
            decision,
            next_step=NextStep.FAILED,
            delay=0.0,
            reason=decision.reason if decision.root_cause_rank >= 0 else describe_stop(summary.stop_cause),
            no_restart_reason=describe_stop(summary.stop_cause),
            is_restart_counted=False,
        )
    return replace(decision, restarts_left=max(0, policy.max_restarts - decision.history.restarts_used))


def describe_stop(cause: str) -> str:
    return f"a stop was requested ({cause})"


def describe_node(node_infos: Mapping[int, NodeInfo], node: int) -> str:
    info = node_infos.get(node)
    return f"node {node}" if info is None else f"node {node} ({info.hostname})"


def _decide(summary: AttemptSummary, policy: RestartPolicy, rng: Callable[[], float]) -> AttemptDecision:
    reports = summary.reports.values()
    if len(reports) == summary.size and all(report.outcome is NodeOutcome.SUCCEEDED for report in reports):
        return _make_decision(summary, NextStep.DONE)
    root = _find_root_report(summary)
    for report in reports:
        reason = f"{describe_node(summary.node_infos, report.group_rank)}: {report.reason}"
        if report.outcome is NodeOutcome.TIMED_OUT:
            if others := [rank for other in reports if other is not report for rank in other.unfinished]:
                reason = f"{reason}; on other nodes {format_ranks(others)} had not returned"
            verdict = find_reported_verdict(reports)
            if verdict is not None and verdict.sentence not in reason:
                reason = f"{reason}; {verdict.sentence}"
            return _make_decision(summary, NextStep.FAILED, reason=reason, timed_out=True)
        if report.outcome is NodeOutcome.ABORTED:
            failed = root or report  # a rank that failed before user code raised is the root cause
            return _make_decision(
                summary,
                NextStep.FAILED,
                root_cause_rank=_root_cause_rank(failed),
                reason=reason,
                no_restart_reason=reason if failed.failures else "",
            )
    if root is not None and not ((summary.lost_nodes or summary.stopped_for_waiting_nodes) and _victim_level(root)):
        return _decide_after_failure(summary, root, policy, rng)
    if summary.lost_nodes:
        return _decide_after_node_loss(summary, policy, rng)
    return _make_decision(summary, NextStep.RE_RENDEZVOUS, reason=_describe_waiting_nodes(summary))


def _decide_after_failure(
    summary: AttemptSummary, root: AttemptReport, policy: RestartPolicy, rng: Callable[[], float]
) -> AttemptDecision:
    failed_attempt = FailedAttempt(
        cause=None,
        no_restart_reason=lambda: root.no_restart_reason,
        healthy_seconds=root.healthy_seconds,
        step=max((report.step for report in summary.reports.values() if report.step >= 0), default=None),
    )
    root_cause_rank = -1 if _victim_level(root) and summary.verdict is not None else _root_cause_rank(root)
    return _restart_or_fail(summary, policy, rng, failed_attempt, root_cause_rank=root_cause_rank, reason=root.reason)


def _decide_after_node_loss(summary: AttemptSummary, policy: RestartPolicy, rng: Callable[[], float]) -> AttemptDecision:
    """Only if the lost node may have caused all failures of ranks."""
    node, loss = next(iter(summary.lost_nodes.items()))
    first_rank = _first_rank(summary, node)
    reason = f"{describe_node(summary.node_infos, node)} was lost: {loss}"
    infos = summary.node_infos
    host = next((lost for lost in summary.lost_nodes if lost in infos and infos[lost].is_host), None)
    if host is not None:
        no_restart_reason = f"the coordinator ran on {describe_node(infos, host)}, and the others cannot go on without it"
        return _make_decision(
            summary,
            NextStep.FAILED,
            root_cause_rank=first_rank,
            reason=f"{reason}; {no_restart_reason}",
            no_restart_reason=no_restart_reason,
        )
    remaining = summary.size - len(summary.lost_nodes) + summary.waiting_nodes
    if remaining >= summary.min_nodes:
        return _make_decision(summary, NextStep.RE_RENDEZVOUS, root_cause_rank=first_rank, reason=reason)
    too_few = f"{remaining} of at least {summary.min_nodes} nodes remain"
    failed_attempt = FailedAttempt(cause=None, no_restart_reason=lambda: "")
    decision = _restart_or_fail(summary, policy, rng, failed_attempt, root_cause_rank=first_rank, reason=reason)
    if decision.next_step is not NextStep.FAILED:
        return decision
    return replace(decision, no_restart_reason=decision.no_restart_reason or too_few)


def _restart_or_fail(
    summary: AttemptSummary,
    policy: RestartPolicy,
    rng: Callable[[], float],
    failed_attempt: FailedAttempt,
    *,
    root_cause_rank: int,
    reason: str,
) -> AttemptDecision:
    history = summary.history
    counters = RestartCounters(
        restarts_used=history.restarts_used,
        furthest_step=history.furthest_step,
        stalled_attempts=history.stalled_attempts,
        is_first_attempt=not history.attempts,
    )
    budget = RestartBudget(policy, rng, counters)
    restart = budget.decide(failed_attempt)
    history = replace(
        history,
        restarts_used=budget.counters.restarts_used,
        furthest_step=budget.counters.furthest_step,
        stalled_attempts=budget.counters.stalled_attempts,
    )
    summary = replace(summary, history=history)
    if restart.delay is None:
        return _make_decision(
            summary,
            NextStep.FAILED,
            root_cause_rank=root_cause_rank,
            reason=reason,
            no_restart_reason=restart.no_restart_reason,
        )
    if summary.lost_nodes or summary.waiting_nodes:  # without the delay: other nodes have to be awaited
        decision = _make_decision(summary, NextStep.RE_RENDEZVOUS, root_cause_rank=root_cause_rank, reason=reason)
        return replace(decision, is_restart_counted=True)
    decision = _make_decision(summary, NextStep.RESTART, root_cause_rank=root_cause_rank, reason=reason)
    return replace(decision, delay=restart.delay, is_restart_counted=True)


def _make_decision(
    summary: AttemptSummary,
    next_step: NextStep,
    *,
    root_cause_rank: int = -1,
    reason: str = "",
    no_restart_reason: str = "",
    timed_out: bool = False,
) -> AttemptDecision:
    failures = [failure for node in _order_by_blame(summary) for failure in summary.reports[node].failures]
    sent = limit_total_size(failures[:MAX_FAILURES], MAX_FAILURES_BYTES) if next_step is not NextStep.DONE else ()
    omitted_by_nodes = sum(report.failures_omitted for report in summary.reports.values())
    infos = summary.node_infos
    return AttemptDecision(
        attempt=summary.attempt,
        next_step=next_step,
        history=replace(summary.history, attempts=summary.attempt + 1),
        root_cause_rank=root_cause_rank,
        failures=sent,
        failures_omitted=omitted_by_nodes + len(failures) - len(sent),
        lost_nodes=tuple(
            LostNode(node, infos[node].hostname, _first_rank(summary, node), infos[node].nprocs, loss)
            for node, loss in summary.lost_nodes.items()
            if node in infos
        )[:MAX_LOST_NODES],
        reason=reason,
        no_restart_reason=no_restart_reason,
        timed_out=timed_out,
    )


# Which rank failed first.


def _find_cause_on_other_node(summary: AttemptSummary, policy: RestartPolicy) -> AttemptSummary:
    """Blame the ranks that caused the failures by a comparison of all reports, or return `summary`."""
    if summary.lost_nodes or summary.stopped_for_waiting_nodes:
        return summary
    reports = summary.reports
    outcomes = {report.outcome for report in reports.values()}
    if not outcomes.isdisjoint({NodeOutcome.TIMED_OUT, NodeOutcome.ABORTED}):
        return summary
    if summary.verdict is None and NodeOutcome.FAILED not in outcomes:
        return summary
    verdict = find_reported_verdict(reports.values())
    if summary.verdict is not None and (verdict is None or verdict.finding != summary.verdict.finding):
        verdict = summary.verdict  # the verdict that has ended the attempt
    if verdict is not None and is_explained(reports.values(), verdict):
        return _apply_verdict(summary, verdict, policy)
    return _report_missing_ranks(summary, policy)


def _apply_verdict(summary: AttemptSummary, verdict: CollectiveVerdict, policy: RestartPolicy) -> AttemptSummary:
    reports = {}
    for node, report in sorted(summary.reports.items()):
        failures = blame_ranks(report, summary.node_infos[node], _first_rank(summary, node), verdict)
        causes = {FailureKind[failure["kind"]] for failure in failures if not failure["is_secondary"]}
        reports[node] = replace(
            report,
            outcome=NodeOutcome.FAILED,
            failures=failures,
            waited_for_other_nodes=not causes,
            may_be_victim=False,
            no_restart_reason=_get_no_restart_reason(causes, report, policy) if causes else report.no_restart_reason,
            reason=verdict.sentence,
        )
    return replace(summary, reports=reports, failure_order=list(reports), verdict=verdict)


def _report_missing_ranks(summary: AttemptSummary, policy: RestartPolicy) -> AttemptSummary:
    """Blame the missing ranks, unless a node has failed by itself (its `_victim_level` is 0)."""
    root = _find_root_report(summary)
    victims = [report for report in summary.reports.values() if report.waited_for_other_nodes]
    if root is None or not _victim_level(root) or not victims:
        return summary
    blamed = {
        node: _blame_missing_ranks(report, victims[0], policy)
        for node, report in sorted(summary.reports.items())
        if report.missing_ranks
    }
    return replace(
        summary,
        failure_order=list(dict.fromkeys([*summary.failure_order, *blamed])),
        reports={**summary.reports, **blamed},
    )


def _blame_missing_ranks(report: AttemptReport, victim: AttemptReport, policy: RestartPolicy) -> AttemptReport:
    return replace(
        report,
        outcome=NodeOutcome.FAILED,
        failures=(*report.missing_ranks, *report.failures),
        failures_omitted=report.failures_omitted + report.missing_ranks_omitted,
        waited_for_other_nodes=False,
        no_restart_reason=_get_no_restart_reason({FailureKind.HANG}, victim, policy),
        reason=victim.reason,
    )


def _get_no_restart_reason(causes: set[FailureKind], victim: AttemptReport, policy: RestartPolicy) -> str:
    """Return why the job cannot be restarted after failures of the kinds in `causes`, or "" if a restart is possible."""
    if policy.retry_if is None:
        return ""
    if not policy.causes:  # `retry_if` is a function, which was called only with the victim's failure
        return victim.no_restart_reason
    return "" if causes <= set(policy.causes) else NOT_IN_RETRY_IF


def _find_root_report(summary: AttemptSummary) -> AttemptReport | None:
    """Return the report of the failed node with the lowest `_victim_level`, the first of them that the coordinator got."""
    failed = [
        summary.reports[node]
        for node in summary.failure_order
        if node in summary.reports and summary.reports[node].outcome is NodeOutcome.FAILED
    ]
    return min(failed, key=_victim_level, default=None)


def _victim_level(report: AttemptReport) -> int:
    """Return 2 if another node caused the first failure in the report, 1 if another node possibly caused it, else 0."""
    if report.failures and report.failures[0].get("is_secondary") is True:
        return 2
    return 1 if report.waited_for_other_nodes or report.may_be_victim else 0


def _root_cause_rank(report: AttemptReport) -> int:
    rank = report.failures[0].get("rank") if report.failures else None
    return rank if isinstance(rank, int) else -1


def _order_by_blame(summary: AttemptSummary) -> list[int]:
    positions = {node: position for position, node in enumerate(summary.failure_order)}
    return sorted(
        summary.reports,
        key=lambda node: (_victim_level(summary.reports[node]), positions.get(node, math.inf), node),
    )


def _first_rank(summary: AttemptSummary, node: int) -> int:
    return summary.first_ranks.get(node, -1)


def _describe_waiting_nodes(summary: AttemptSummary) -> str:
    count = summary.waiting_nodes
    return f"more nodes want to join: {count}" if count else "a node that wanted to join has left again"

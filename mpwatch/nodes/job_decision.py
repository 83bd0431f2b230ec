"""Decide what the nodes do after an attempt: end, or restart. The coordinator calls this. Pure.

    all nodes succeeded                                    DONE
    a node's `timeout` ran out, or its caller raised       FAILED
    a rank failed                                          RESTART if the restart policy allows it, else FAILED
    a node is lost, enough nodes remain                    RESTART; costs no restart
    a node is lost, too few nodes remain                   RESTART if a restart is left, else FAILED
    the node of the coordinator is lost                    FAILED
    more nodes want to join                                RESTART; costs no restart
    a stop was requested                                   FAILED instead of RESTART

If a comparison of all ranks' collectives (job_verdict.py) explains all failures of an attempt, it also names the root cause.
Otherwise failures that may be consequences of events on other nodes are left out, and the root cause is the first remaining
one, as the coordinator has heard of them. If none remains, missing ranks are blamed, for which ranks of other nodes have
probably waited. A rank that failed by itself is a more likely root cause than a lost node.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

from mpwatch.nodes.failure_codec import limit_total_size
from mpwatch.nodes.job_verdict import NodeCollectives, blame_ranks, find_reported_verdict, is_explained
from mpwatch.nodes.messages import AttemptDecision, AttemptOutcome, AttemptReport, LostNode, NextStep, NodeInfo
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.results.failure import FailureKind
from mpwatch.results.texts import format_ranks
from mpwatch.watcher.diagnosis.collective_verdict import CollectiveVerdict, Finding
from mpwatch.watcher.restarts.restart_budget import NOT_IN_RETRY_IF, FailedAttempt, RestartBudget

MAX_FAILURES = 64  # failures that are sent in full. Further failures are only counted
MAX_FAILURES_BYTES = 512 * 1024  # of all failures together


@dataclass(kw_only=True)
class JobAttempt:
    """What the coordinator knows of one attempt. A node is known by its place in `infos`, its group rank."""

    number: int = 0
    infos: Sequence[NodeInfo] = ()
    failure_order: list[int] = field(default_factory=list)
    """The nodes whose ranks have failed, in the order of their messages."""
    reports: dict[int, AttemptReport] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    """The nodes whose ranks have exited, also before the report."""
    lost: dict[int, str] = field(default_factory=dict)
    """The reason for each lost node, the first one first."""
    collectives: dict[int, NodeCollectives] = field(default_factory=dict)
    """Of each node whose ranks have stalled or ended."""
    verdict: CollectiveVerdict | None = None
    """The mismatch between the ranks' collectives that has ended the attempt."""
    warned: set[Finding] = field(default_factory=set)
    held_steps: dict[int, int | None] = field(default_factory=dict)
    """The highest step that the ranks of a node have passed, if any, of each node whose ranks hold."""
    was_stopped_for_newcomers: bool = False
    """Then a victim may have failed because of this stop."""

    @property
    def active(self) -> set[int]:
        return set(range(len(self.infos))) - self.lost.keys()

    @property
    def first_ranks(self) -> list[int]:
        return list(accumulate((info.nprocs for info in self.infos), initial=0))

    @property
    def _may_have_victims(self) -> bool:
        return bool(self.lost) or self.was_stopped_for_newcomers

    def describe_node(self, node: int) -> str:
        return f"node {node} ({self.infos[node].hostname})"

    def decide(
        self, policy: RestartPolicy, budget: RestartBudget, *, min_nodes: int, newcomers: int, stop_cause: str
    ) -> AttemptDecision:
        """`budget` counts the restarts of the job, `newcomers` is how many nodes want to join, and `stop_cause` is what has
        requested a stop of the job, or empty.
        """
        blamed = self._blame_other_nodes(policy)
        decision = blamed._decide(budget, min_nodes, newcomers)
        if stop_cause and not decision.ends_job:
            stopped = describe_stop(stop_cause)
            decision = replace(
                decision,
                next_step=NextStep.FAILED,
                delay=0.0,
                reason=decision.reason if decision.root_cause_rank >= 0 else stopped,
                no_restart_reason=stopped,
                is_restart_counted=False,
            )
        restarts_left = max(0, policy.max_restarts - budget.restarts_used)
        return blamed._add_failures(replace(decision, restarts_left=restarts_left))

    def _decide(self, budget: RestartBudget, min_nodes: int, newcomers: int) -> AttemptDecision:
        make = partial(AttemptDecision, self.number)
        if len(self.reports) == len(self.infos) and self._outcomes == {AttemptOutcome.SUCCEEDED}:
            return make(NextStep.DONE)
        root = self._find_root_report()
        for node, report in self.reports.items():
            reason = f"{self.describe_node(node)}: {report.reason}"
            if report.outcome is AttemptOutcome.TIMED_OUT:
                return make(NextStep.FAILED, reason=self._describe_timeout(reason, report), timed_out=True)
            if report.outcome is AttemptOutcome.ABORTED:
                failed = root or report  # a rank that failed before user code raised is the root cause
                rank, why = _root_cause_rank(failed), reason if failed.failures else ""
                return make(NextStep.FAILED, root_cause_rank=rank, reason=reason, no_restart_reason=why)
        if root is not None and not (self._may_have_victims and _victim_level(root)):
            rank = -1 if _victim_level(root) and self.verdict is not None else _root_cause_rank(root)
            failed_attempt = FailedAttempt(
                cause=None,
                no_restart_reason=lambda: root.no_restart_reason,
                healthy_seconds=root.healthy_seconds,
                step=max((report.step for report in self.reports.values() if report.step >= 0), default=None),
            )
            make = partial(make, root_cause_rank=rank, reason=root.reason)
            return _restart_or_fail(make, budget, failed_attempt)
        if self.lost:
            return self._decide_after_node_loss(budget, min_nodes, newcomers)
        waiting = f"more nodes want to join: {newcomers}" if newcomers else "a node that wanted to join has left again"
        return make(NextStep.RESTART, reason=waiting)

    def _decide_after_node_loss(self, budget: RestartBudget, min_nodes: int, newcomers: int) -> AttemptDecision:
        """Only if the lost node may have caused all failures of ranks."""
        node, loss = next(iter(self.lost.items()))
        reason = f"{self.describe_node(node)} was lost: {loss}"
        make = partial(AttemptDecision, self.number, root_cause_rank=self.first_ranks[node], reason=reason)
        host = next((lost for lost in self.lost if self.infos[lost].is_host), None)
        if host is not None:
            why = f"the coordinator ran on {self.describe_node(host)}, and the others cannot go on without it"
            return make(NextStep.FAILED, reason=f"{reason}; {why}", no_restart_reason=why)
        remaining = len(self.active) + newcomers
        if remaining >= min_nodes:
            return make(NextStep.RESTART)
        failed_attempt = FailedAttempt(cause=None, no_restart_reason=lambda: "")
        decision = _restart_or_fail(make, budget, failed_attempt)
        too_few = f"{remaining} of at least {min_nodes} nodes remain"
        has_reason = decision.next_step is not NextStep.FAILED or decision.no_restart_reason
        return decision if has_reason else replace(decision, no_restart_reason=too_few)

    def _describe_timeout(self, reason: str, report: AttemptReport) -> str:
        if others := [rank for other in self.reports.values() if other is not report for rank in other.unfinished]:
            reason = f"{reason}; on other nodes {format_ranks(others)} had not returned"
        verdict = find_reported_verdict(self.reports.values())
        return reason if verdict is None or verdict.sentence in reason else f"{reason}; {verdict.sentence}"

    def _add_failures(self, decision: AttemptDecision) -> AttemptDecision:
        reports = sorted(self.reports, key=lambda node: (self._get_blame_order(node), node))
        failures = [failure for node in reports for failure in self.reports[node].failures]
        is_done = decision.next_step is NextStep.DONE
        sent = () if is_done else limit_total_size(failures[:MAX_FAILURES], MAX_FAILURES_BYTES)
        omitted_by_nodes = sum(report.failures_omitted for report in self.reports.values())
        firsts = self.first_ranks
        lost = [
            LostNode(node, self.infos[node].hostname, firsts[node], self.infos[node].nprocs, loss)
            for node, loss in self.lost.items()
        ]
        return replace(
            decision,
            failures=sent,
            failures_omitted=omitted_by_nodes + len(failures) - len(sent),
            lost_nodes=tuple(lost),
        )

    # ---- which rank failed first

    @property
    def _outcomes(self) -> set[AttemptOutcome]:
        return {report.outcome for report in self.reports.values()}

    def _get_blame_order(self, node: int) -> tuple[int, float]:
        order = self.failure_order
        return _victim_level(self.reports[node]), order.index(node) if node in order else math.inf

    def _find_root_report(self) -> AttemptReport | None:
        """Return the report of the failed node with the lowest `_victim_level`, the first of them that has come."""
        reports = self.reports
        known = [node for node in self.failure_order if node in reports]
        failed = [node for node in known if reports[node].outcome is AttemptOutcome.FAILED]
        return reports[min(failed, key=self._get_blame_order)] if failed else None

    def _blame_other_nodes(self, policy: RestartPolicy) -> "JobAttempt":
        """Blame the ranks that have caused the failures by a comparison of all reports, or return the attempt as it is."""
        outcomes = self._outcomes
        if self._may_have_victims or not outcomes.isdisjoint({AttemptOutcome.TIMED_OUT, AttemptOutcome.ABORTED}):
            return self
        if self.verdict is None and AttemptOutcome.FAILED not in outcomes:
            return self
        verdict = find_reported_verdict(self.reports.values())
        if self.verdict is not None and (verdict is None or verdict.finding != self.verdict.finding):
            verdict = self.verdict  # the verdict that has ended the attempt
        if verdict is not None and is_explained(self.reports.values(), verdict):
            return self._apply_verdict(verdict, policy)
        return self._blame_missing_ranks(policy)

    def _apply_verdict(self, verdict: CollectiveVerdict, policy: RestartPolicy) -> "JobAttempt":
        reports = {}
        for node, report in sorted(self.reports.items()):
            failures = blame_ranks(report, self.infos[node].hostname, node, self.first_ranks[node], verdict)
            causes = {FailureKind[failure["kind"]] for failure in failures if not failure["is_secondary"]}
            reports[node] = replace(
                report,
                outcome=AttemptOutcome.FAILED,
                failures=failures,
                waited_for_other_nodes=not causes,
                may_be_victim=False,
                no_restart_reason=_get_no_restart_reason(causes, report, policy) if causes else report.no_restart_reason,
                reason=verdict.sentence,
            )
        return replace(self, reports=reports, failure_order=list(reports), verdict=verdict)

    def _blame_missing_ranks(self, policy: RestartPolicy) -> "JobAttempt":
        """Blame them unless a node has failed by itself (its `_victim_level` is 0)."""
        root = self._find_root_report()
        victim = next((report for report in self.reports.values() if report.waited_for_other_nodes), None)
        if root is None or not _victim_level(root) or victim is None:
            return self
        blamed = {
            node: replace(
                report,
                outcome=AttemptOutcome.FAILED,
                failures=(*report.missing_ranks, *report.failures),
                waited_for_other_nodes=False,
                no_restart_reason=_get_no_restart_reason({FailureKind.HANG}, victim, policy),
                reason=victim.reason,
            )
            for node, report in sorted(self.reports.items())
            if report.missing_ranks
        }
        order = list(dict.fromkeys([*self.failure_order, *blamed]))
        return replace(self, failure_order=order, reports={**self.reports, **blamed})


def describe_stop(cause: str) -> str:
    return f"a stop was requested ({cause})"


def _restart_or_fail(
    make: "partial[AttemptDecision]", budget: RestartBudget, failed_attempt: FailedAttempt
) -> AttemptDecision:
    restart = budget.decide(failed_attempt)
    if restart.delay is None:
        return make(NextStep.FAILED, no_restart_reason=restart.no_restart_reason)
    return make(NextStep.RESTART, delay=restart.delay, is_restart_counted=True)


def _get_no_restart_reason(causes: set[FailureKind], victim: AttemptReport, policy: RestartPolicy) -> str:
    """Return why the job cannot be restarted after failures of the kinds in `causes`, or "" if a restart is possible."""
    if policy.retry_if is None:
        return ""
    if not policy.causes:  # `retry_if` is a function, which was called only with the victim's failure
        return victim.no_restart_reason
    return "" if causes <= set(policy.causes) else NOT_IN_RETRY_IF


def _victim_level(report: AttemptReport) -> int:
    """Return 2 if another node caused the first failure in the report, 1 if another node possibly caused it, else 0."""
    if report.failures and report.failures[0].get("is_secondary") is True:
        return 2
    return 1 if report.waited_for_other_nodes or report.may_be_victim else 0


def _root_cause_rank(report: AttemptReport) -> int:
    return int(report.failures[0]["rank"]) if report.failures else -1

"""Compare the collectives of all nodes, to find a rank that has called a wrong collective. All functions are pure.

If ranks of a node have stalled, the node sends the latest collectives of its ranks to the coordinator (RanksStalled). Each
AttemptReport also contains the latest collectives of the node's ranks. The coordinator uses the functions of
watcher/diagnosis/ to compare the collectives of all ranks. A run on one node uses the same functions. The coordinator
ignores the comparison if a node was lost, or if the comparison leaves a failure unexplained.
"""

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace

from mpwatch.nodes.failure_codec import decode_failure, encode_failure
from mpwatch.nodes.messages import AttemptReport, Failures, RankRecord
from mpwatch.results.collective import CollectiveState
from mpwatch.results.failure import FailureKind, ProcessFailure, add_summary
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.diagnosis.collective_verdict import (
    CollectiveVerdict,
    VerdictKind,
    find_verdict,
    get_current_collective,
)

MAX_RECORDS_CHARACTERS = 128 * 1024  # of all collectives in an AttemptReport
MAX_LATEST = 8  # the number of a rank's completed collectives that are sent


def make_records(
    answers: Mapping[int, RankCollectives], returned: Container[int], pids: Mapping[int, int | None]
) -> tuple[RankRecord, ...]:
    """Return a record for each rank, with its latest collectives, but no more than MAX_RECORDS_CHARACTERS."""
    kept: list[RankRecord] = []
    left = MAX_RECORDS_CHARACTERS
    for rank, answer in answers.items():
        record = RankRecord(rank, rank in returned, _keep_latest(answer).to_json(), pids.get(rank))
        left -= len(record.collectives)
        if left < 0:
            break
        kept.append(record)
    return tuple(kept)


def _keep_latest(answer: RankCollectives) -> RankCollectives:
    first = max(0, len(answer.collectives) - MAX_LATEST)
    kept = tuple(
        call for number, call in enumerate(answer.collectives) if number >= first or call.state is CollectiveState.WAITING
    )
    return replace(answer, collectives=kept, stack="", has_all=answer.has_all and len(kept) == len(answer.collectives))


@dataclass(frozen=True)
class NodeCollectives:
    answers: Mapping[int, RankCollectives]
    returned: frozenset[int]


def read_records(records: Collection[RankRecord]) -> NodeCollectives:
    answers = {record.rank: RankCollectives.from_json(record.collectives) for record in records}
    return NodeCollectives(answers, frozenset(record.rank for record in records if record.has_returned))


def find_reported_verdict(reports: Iterable[AttemptReport]) -> CollectiveVerdict | None:
    job = merge_nodes(read_records(report.collectives) for report in reports)
    return find_verdict(job.answers, job.returned)


def merge_nodes(nodes: Iterable[NodeCollectives]) -> NodeCollectives:
    answers: dict[int, RankCollectives] = {}
    returned: set[int] = set()
    for node in nodes:
        answers |= node.answers
        returned |= node.returned
    return NodeCollectives(answers, frozenset(returned))


def is_explained(reports: Iterable[AttemptReport], verdict: CollectiveVerdict) -> bool:
    reports = list(reports)
    failures = [
        (failure.get("is_secondary") is True or failure.get("kind") == FailureKind.MISMATCH.name, failure.get("signal"))
        for report in reports
        for failure in report.failures
    ]
    return verdict.explains(failures, has_timed_out=any(report.waited_for_other_nodes for report in reports))


def blame_ranks(report: AttemptReport, hostname: str, node: int, first_rank: int, verdict: CollectiveVerdict) -> Failures:
    """Return the failures of a node, those of blamed ranks first, and all others marked as secondary."""
    known = {failure.get("rank"): failure for failure in (*report.missing_ranks, *report.failures)}
    have_failed = {failure.get("rank") for failure in report.failures}
    blamed = {}
    for record in report.collectives:
        if record.rank in verdict.blamed:
            encoded = known.get(record.rank)
            before = decode_failure(encoded) if encoded else _build_failure(record, hostname, node, first_rank)
            is_late = verdict.kind is VerdictKind.ABSENT and not record.has_returned and record.rank not in have_failed
            kind = FailureKind.HANG if is_late else FailureKind.MISMATCH
            failure = replace(before, kind=kind, evidence=verdict.evidence[record.rank], summary="", is_secondary=False)
            blamed[record.rank] = encode_failure(add_summary(failure))
    others = [{**failure, "is_secondary": True} for failure in report.failures if failure.get("rank") not in blamed]
    return *blamed.values(), *others


def _build_failure(record: RankRecord, hostname: str, node: int, first_rank: int) -> ProcessFailure:
    """For a blamed rank of which the report has no failure."""
    return ProcessFailure(
        rank=record.rank,
        local_rank=record.rank - first_rank,
        pid=record.pid,
        hostname=hostname,
        group_rank=node,
        kind=FailureKind.MISMATCH,
        exit_code=1,
        collective=get_current_collective(RankCollectives.from_json(record.collectives)),
    )

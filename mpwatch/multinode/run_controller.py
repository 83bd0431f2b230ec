"""What the caller's thread makes of a run of several nodes: as story.py of the watcher, but what follows on an attempt is
for all nodes to decide.

    link: an attempt starts --> who our ranks are, their environments --> link: they can be started
    ranks are gone --> what became of them here --> link: told to the others --> what came of it for all

Code of the user's runs here: exceptions are rebuilt, `retry_if` and `env` are called. What they raise ends the
run.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from signal import Signals
from typing import Any, TypeVar

from mpwatch.errors import LaunchError
from mpwatch.events.types import RendezvousCompleted, Restarting
from mpwatch.multinode.local_ranks import NodeNews
from mpwatch.multinode.node_machine import PrepareRanks, ReportJob
from mpwatch.multinode.node_thread import NodeThread
from mpwatch.multinode.protocol.failure_codec import as_many_as_fit, from_plain, to_plain
from mpwatch.multinode.protocol.json_codec import MAX_INTEGER
from mpwatch.multinode.protocol.messages import (
    NO_ATTEMPT,
    AttemptDecision,
    AttemptReport,
    LostNode,
    NextStep,
    NodeOutcome,
    RankAssignment,
    StartAttempt,
)
from mpwatch.multinode.protocol.signed_json import InvalidEntryError
from mpwatch.multinode.rank_assignment import workers_of
from mpwatch.options.spec import WorkerSpec
from mpwatch.results.model import Attempt, FailureKind, ProcessFailure, WorkerState
from mpwatch.results.report import summary_of
from mpwatch.results.report import verdict as words_for
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.diagnosis.diagnose import find_missing_ranks, find_possible_victims, find_waiting_ranks
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.machine.transitions import DoNotRestart
from mpwatch.watcher.machine.transitions import StopReason as Fate
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.output.output_thread import LAST_SECONDS
from mpwatch.watcher.processes.rank_environment import environments_of
from mpwatch.watcher.restarts.restart_budget import not_worth_it
from mpwatch.watcher.restarts.run_controller import RunController, publish_outcomes
from mpwatch.watcher.watcher_thread import WatcherThread

log = logging.getLogger("mpwatch")
T = TypeVar("T")
REPORT_LIMIT, ABSENT_LIMIT = 128 * 1024, 64 * 1024  # bytes of the failures that a node tells of, and of those that may be
OUTCOMES = {
    Fate.SUCCEEDED: NodeOutcome.SUCCEEDED,
    Fate.TIMED_OUT: NodeOutcome.TIMED_OUT,
    Fate.CANCELLED_BY_JOB: NodeOutcome.STOPPED,
}


class MultiNodeRunController(RunController[T]):
    """Of one run, as one node sees it.

    Args:
        spec: what is run.
        journal: where it is noted what happens.
        link: to the other nodes.
    """

    def __init__(self, spec: WorkerSpec[T], event_bus: EventBus, node_thread: NodeThread) -> None:
        super().__init__(spec, event_bus)
        assert spec.rendezvous is not None
        self._rendezvous = spec.rendezvous
        self._node_thread = node_thread
        self._verdict: AttemptDecision | None = None  # on the job
        self._heard: AttemptDecision | None = None  # the latest
        self._start: StartAttempt | None = None
        self._strangers: dict[int, ProcessFailure] = {}  # failures that other nodes know of
        self._absent: dict[int, ProcessFailure] = {}  # those of ours that may have been waited for elsewhere
        self._untold: tuple[AttemptObservations, RunResult[T]] | None = None  # an attempt, as long as only we have judged it

    @property
    def is_concluded(self) -> bool:
        """Whether it is known what came of the job; else this node has left it."""
        return self._verdict is not None

    def judge(self, watcher_thread: WatcherThread) -> float | None:
        """Report the attempts that have ended here, follow what the other nodes decide, and start the restart that is due.

        See RunController. Raises LaunchError, and what `retry_if` and `env` raise.
        """
        try:
            for observations in watcher_thread.commands.take_decision_requests():
                watcher_thread.output.catch_up(LAST_SECONDS)
                self._node_thread.ended(self._report(observations))
            for news in self._node_thread.news():
                self._attend(watcher_thread, news)
            return self._run_due()
        except Exception as error:
            self._abort(error)  # first: the ranks' thread is now told to end, as by a signal, which the others would believe
            raise

    def result(self) -> RunResult[T]:
        """What came of the job, as this node knows it."""
        assert self._pending_call is not None
        (observations,) = self._pending_call.observations
        if observations.ranks and observations.attempt not in {attempt.number for attempt in self._attempts}:
            self._close(observations)  # they were interrupted, which nobody judges
        here = next((result for _, result in self._latest.values()), _nothing_yet(observations))
        self._tell_what_is_untold()
        result = replace(self._of_job(here), attempts=tuple(self._attempts))
        self._end(result.state, "" if result.state is WorkerState.SUCCEEDED else words_for(result))
        return replace(result, events=tuple(self.event_bus.events))

    def fail(self, error: BaseException) -> None:
        """Something else than a rank has failed."""
        self._abort(error)
        super().fail(error)

    def _abort(self, error: BaseException) -> None:
        """Tell the others; and what has failed here before, if they do not know."""
        latest = self._attempts[-1] if self._attempts else None
        is_known = latest is None or (self._heard is not None and self._heard.attempt >= latest.number)
        failures = () if latest is None or is_known else _told(latest)
        self._node_thread.abort(AttemptReport(0, 0, NodeOutcome.ABORTED, failures, reason=summary_of(error)[:1000]))
        self._tell_what_is_untold()

    def _attend(self, watcher_thread: WatcherThread, news: NodeNews) -> None:
        if isinstance(news, BaseException):
            raise news
        if isinstance(news, PrepareRanks):
            self._prepare(news.start, news.place)
            return
        verdict = self._heard = self._in_full(news.verdict)
        self._note(verdict)
        if isinstance(news, ReportJob):
            self._conclude(watcher_thread, verdict)

    def _in_full(self, verdict: AttemptDecision) -> AttemptDecision:
        """If the nodes could not meet anew, then what has parted them comes first."""
        if verdict.attempt == NO_ATTEMPT and self._heard is not None and self._heard.cause >= 0:
            return replace(self._heard, decision=NextStep.FAILED, why_not=verdict.reason)
        return verdict

    def _prepare(self, start: StartAttempt, place: RankAssignment) -> None:
        """Who our ranks are in the attempt that starts."""
        self._latest.clear()
        self._absent.clear()
        self._start = start
        met: dict[str, Any] = {
            "attempt": start.attempt,
            "job": self._rendezvous.run_id,
            "group_rank": place.group_rank,
            "group_world_size": start.group_world_size,
            "world_size": start.world_size,
            "role_rank": place.role_rank,
            "role_world_size": place.role_world_size,
            "master_addr": start.master_addr,
            "master_port": start.master_port,
        }
        workers = workers_of(self._spec, place.rank, **met)
        self.event_bus.ranks = [worker.rank for worker in workers]
        self.event_bus.publish(RendezvousCompleted, self.event_bus.ranks, backend=self._node_thread.backend, **met)
        environments = environments_of(self._spec, workers)
        self._delayed.clear()  # an earlier restart that the nodes have called off
        self._delay(start.delay, partial(self._node_thread.prepared, start, environments))

    def _report(self, observations: AttemptObservations) -> AttemptReport:
        """What the other nodes are told of our ranks, now that they are gone."""
        observations.collect_stderr()
        waiting, possible_victims = find_waiting_ranks(observations), find_possible_victims(observations)
        result = self._close(observations)
        has_failed = bool(result.failures) and observations.verdict is not Fate.TIMED_OUT
        are_victims = all(failure.is_secondary or rank in waiting for rank, failure in result.failures.items())
        may_be_missed = are_victims and observations.verdict in (Fate.FAILED, Fate.CANCELLED_BY_JOB)
        absent = find_missing_ranks(observations, result) if may_be_missed else []
        self._absent = {failure.rank: failure for failure in absent}
        told, told_absent = _told(result), as_many_as_fit(map(to_plain, absent), ABSENT_LIMIT)
        failed_attempt = self._failed_attempt(observations, result)
        why_not = not_worth_it(self._spec.policy, failed_attempt) if has_failed and self._spec.policy.max_restarts else ""
        assert observations.verdict is not None
        return AttemptReport(
            group_rank=0,
            attempt=0,  # both are the link's to fill in
            outcome=NodeOutcome.FAILED if has_failed else OUTCOMES.get(observations.verdict, NodeOutcome.FAILED),
            failures=told,
            unsaid=len(result.failures) - len(told),
            lacks_a_peer=are_victims and not waiting.isdisjoint(result.failures),
            may_be_victim=result.root_cause is not None and result.root_cause.rank in possible_victims,
            absent=told_absent,
            absent_unsaid=len(absent) - len(told_absent),
            why_not=why_not[:1000],
            reason=result.reason[:1000],
            healthy_seconds=max(0.0, observations.healthy_seconds),
            step=-1 if failed_attempt.step is None else min(max(failed_attempt.step, -1), MAX_INTEGER),
        )

    def _note(self, verdict: AttemptDecision) -> None:
        """What came of an attempt for all nodes."""
        self._strangers = self._failures_of(verdict)
        if not self._attempts or self._attempts[-1].number != verdict.attempt:
            return
        attempt = self._attempts[-1]
        failures = {**self._strangers, **attempt.failures}
        cause = failures.get(verdict.cause)
        self._tell_what_is_untold(failures, cause)
        state = attempt.state if cause is None else WorkerState.FAILED
        if cause is None and verdict.decision is NextStep.RE_RENDEZVOUS:  # to make room: who complains, does so of that
            state = WorkerState.STOPPED
        self._attempts[-1] = replace(attempt, failures=failures, root_cause=cause, state=state, reason=verdict.reason)
        if verdict.decision in (NextStep.RESTART, NextStep.RE_RENDEZVOUS):
            self.event_bus.publish(
                Restarting,
                self.event_bus.ranks,
                attempt=verdict.attempt,
                cause=cause,
                delay=verdict.delay,
                restarts_left=verdict.restarts_left,
                reason=verdict.reason if cause is None else "",
            )

    def _publish_outcomes(self, observations: AttemptObservations, result: RunResult[T]) -> None:
        """Not before it is known who failed first on all nodes."""
        self._tell_what_is_untold()
        self._untold = observations, result

    def _tell_what_is_untold(
        self, failures: Mapping[int, ProcessFailure] | None = None, cause: ProcessFailure | None = None
    ) -> None:
        """As all nodes have judged it; if they have not, as we have."""
        if self._untold is None:
            return
        (observations, result), self._untold = self._untold, None
        if failures is not None:
            ours = {rank: failures[rank] for rank in observations.ranks if rank in failures}
            states = {**result.worker_states, **dict.fromkeys(ours, WorkerState.FAILED)}
            result = replace(result, failures=ours, worker_states=states, root_cause=cause)
        publish_outcomes(self.event_bus, observations, result)

    def _conclude(self, watcher_thread: WatcherThread, verdict: AttemptDecision) -> None:
        self._verdict = verdict
        if verdict.decision is NextStep.FAILED and self._start is None:
            raise LaunchError(verdict.reason)
        watcher_thread.commands.post(DoNotRestart(0, generation=1 << 62))

    def _failures_of(self, verdict: AttemptDecision) -> dict[int, ProcessFailure]:
        """Of other nodes; and of those that are gone, one for each rank that they had."""
        found: dict[int, ProcessFailure] = {}
        if verdict.unsaid:
            log.warning("%d more failures are not told of: what nodes tell one another is bounded", verdict.unsaid)
        ranks = ((gone, gone.rank + n) for gone in verdict.gone if gone.rank >= 0 for n in range(gone.nprocs))
        found |= {rank: _lost(gone, rank) for gone, rank in ranks}
        for plain in verdict.failures:
            try:
                failure = from_plain(plain)
            except InvalidEntryError as error:
                log.warning("a failure that another node tells of is dropped: %s", error)
                continue
            if failure.rank not in self.event_bus.ranks:
                found[failure.rank] = failure
            elif failure.rank in self._absent:  # as the others have found out
                found[failure.rank] = self._absent[failure.rank]
        return found

    def _of_job(self, here: RunResult[T]) -> RunResult[T]:
        """What is known of our ranks, and what all nodes have decided."""
        verdict = self._verdict
        if verdict is None:  # this node was interrupted
            return (
                replace(here, state=WorkerState.STOPPED, return_values={}) if here.state is WorkerState.SUCCEEDED else here
            )
        if verdict.decision is NextStep.DONE:
            return here
        failures = dict(sorted({**self._strangers, **here.failures}.items()))
        cause = failures.get(verdict.cause)
        return replace(
            here,
            state=WorkerState.FAILED,
            return_values={},
            failures=failures,
            root_cause=None if verdict.timed_out else cause,
            worker_states={**here.worker_states, **dict.fromkeys(self._strangers, WorkerState.FAILED)},
            reason=verdict.reason or here.reason,
            not_restarted=verdict.why_not,
        )


def _told(what: RunResult[Any] | Attempt) -> tuple[Mapping[str, Any], ...]:
    """Its failures, as other nodes hear of them: the root cause first."""
    failures = sorted(what.failures.values(), key=lambda failure: failure is not what.root_cause)
    return as_many_as_fit(map(to_plain, failures), REPORT_LIMIT)


def _lost(gone: LostNode, rank: int) -> ProcessFailure:
    return ProcessFailure(
        rank=rank,
        local_rank=rank - gone.rank,
        pid=None,
        hostname=gone.host,
        group_rank=gone.group_rank,
        kind=FailureKind.LOST,
        exit_code=1,
        evidence=gone.why,
    )


def _nothing_yet(observations: AttemptObservations) -> RunResult[Any]:
    """Of a run that was ended before its ranks were started."""
    why = "" if observations.signum is None else f": this process received {Signals(observations.signum).name}"
    return RunResult(state=WorkerState.STOPPED, reason=f"the run was stopped before its ranks were started{why}")

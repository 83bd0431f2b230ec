"""In a run of several nodes, the caller's thread reports attempts to the coordinator and follows its decisions.

It is as watcher/restarts/run_controller.py, except that all nodes follow the same decision after an attempt.

    NodeThread -- StartAttempt --> make the workers and environments ------> NodeThread: start the ranks
    watcher thread -- the call is over ------> diagnose its ranks -- report_attempt --> NodeThread --> coordinator
    NodeThread -- AttemptDecision --> publish events, add the failures of other nodes

User code runs in the caller's thread: the functions `retry_if` and `env`, and methods of exception classes during
unpickling. If `retry_if` or `env` raises an exception, the run ends.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from mpwatch.errors import LaunchError
from mpwatch.events.types import RendezvousCompleted, Restarting
from mpwatch.nodes.failure_codec import decode_failure, encode_failure, limit_total_size, make_lost_failures
from mpwatch.nodes.job_verdict import make_records
from mpwatch.nodes.json_codec import InvalidMessageError
from mpwatch.nodes.messages import (
    NO_ATTEMPT,
    AttemptDecision,
    AttemptOutcome,
    AttemptReport,
    NextStep,
    StartAttempt,
    StopAttempt,
)
from mpwatch.nodes.node_thread import NodeThread, NodeUpdate
from mpwatch.options.spec import WorkerSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.clock import monotonic
from mpwatch.results.failure import ProcessFailure, summarize_exception
from mpwatch.results.model import Attempt, WorkerState
from mpwatch.results.report import make_restart_notes
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.call import Call
from mpwatch.watcher.caller import Caller
from mpwatch.watcher.diagnosis.diagnose import (
    find_missing_ranks,
    find_possible_victims,
    find_waiting_ranks,
    get_all_collectives,
)
from mpwatch.watcher.diagnosis.failures import has_returned
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.log import log_now
from mpwatch.watcher.machine.transitions import StopReason
from mpwatch.watcher.output.rank_output import LAST_DRAIN_SECONDS
from mpwatch.watcher.processes.rank_environment import RankSetup, build_rank_setups
from mpwatch.watcher.restarts.restart_budget import RestartBudget, find_no_restart_reason
from mpwatch.watcher.restarts.run_controller import RestartGroup, RunController, make_empty_result, publish_outcomes
from mpwatch.watcher.watcher import Watcher

T = TypeVar("T")
MAX_FAILURES_BYTES = 128 * 1024  # of the failures in an AttemptReport
MAX_MISSING_RANKS_BYTES = 64 * 1024  # of the missing ranks in an AttemptReport
MAX_REASON = 1000  # characters
OUTCOMES = {
    StopReason.SUCCEEDED: AttemptOutcome.SUCCEEDED,
    StopReason.TIMED_OUT: AttemptOutcome.TIMED_OUT,
    StopReason.CANCELLED_BY_JOB: AttemptOutcome.STOPPED,
}


class MultiNodeRunController(RunController[T]):
    """This node's part of a run of several nodes, in the caller's thread, except `_start_attempt`."""

    def __init__(self, spec: WorkerSpec[T]) -> None:
        super().__init__(spec)
        assert spec.rendezvous is not None
        self._rendezvous = spec.rendezvous
        self._node_thread: NodeThread
        self._job_decision: AttemptDecision | None = None  # the decision that has ended the job
        self._latest_decision: AttemptDecision | None = None
        self._latest_start: StartAttempt | None = None
        self._job_failures: dict[int, ProcessFailure] = {}  # the failures in the latest decision, by rank
        self._missing_ranks: dict[int, ProcessFailure] = {}  # of this node's ranks for which other nodes may have waited
        self._latest_call: Call | None = None  # that was not handled yet
        self._unpublished: tuple[AttemptObservations, RunResult[T]] | None = None  # these wait for the decision of the job

    def _make_watcher(self, resources: ExitStack) -> Watcher:
        self._node_thread = NodeThread(self._spec, self._deadline)
        resources.callback(self._node_thread.release)
        watcher = Watcher(self._spec, self._event_bus, keep_ranks=False, node=self._node_thread)
        resources.callback(watcher.close_when_finished)
        resources.enter_context(closing(self._node_thread))
        return watcher

    def _follow(self, caller: Caller) -> None:
        """Take part in the job until its end, or until this node is interrupted."""
        self._node_thread.start(self._watcher, self._start_attempt)
        caller.serve = self._serve
        caller.wait(self._is_over)

    def _leave(self, caller: Caller) -> None:
        if self._job_decision is not None:
            self._node_thread.acknowledge_shutdown()
        elif len(caller.signals.received) > 1:  # the user asks for a faster end
            self._node_thread.finish_within(0.0)

    def _start_attempt(self, setups: list[RankSetup]) -> None:  # in the node thread
        call = self._start(setups)
        last = self._groups[0].last if self._groups else None
        self._groups = [RestartGroup(call, RestartBudget(self._spec.policy), last)]
        self._latest_call = call

    def _is_over(self) -> bool:
        call = self._latest_call
        if call is not None and not call.has_ended():
            return False
        is_interrupted = call is not None and call.evidence is not None and call.evidence.signum is not None
        return self._job_decision is not None or is_interrupted or self._watcher.loop.interrupted is not None

    def _serve(self) -> None:
        try:
            call = self._latest_call
            # After an interrupt nothing is reported: the coordinator knows of it, and this node leaves the job.
            if call is not None and call.evidence is not None and call.evidence.signum is None:
                self._latest_call = None
                self._watcher.output.drain_all(LAST_DRAIN_SECONDS)
                self._node_thread.report_attempt(self._make_report(call.evidence))
            for update in self._node_thread.take_updates():
                self._handle_update(update)
        except BaseException as error:
            self._abort(error)  # first, since the watcher then stops the ranks, as if for a signal
            raise

    def _build_result(self) -> RunResult[T]:
        for group in self._groups:
            evidence = group.evidence
            if evidence is not None and evidence.attempt not in {attempt.number for attempt in self._attempts}:
                self._record_attempt(group, evidence)  # it was interrupted, so it was not reported
        empty = make_empty_result(self._watcher.loop.interrupted)
        local = next((group.last[1] for group in self._groups if group.last is not None), empty)
        self._publish_pending_outcomes()
        result = replace(self._combine_with_job(local), attempts=tuple(self._attempts))
        self._publish_run_ended(result.state, "" if result.state is WorkerState.SUCCEEDED else result.verdict)
        return replace(result, events=tuple(self._event_bus.events), elapsed=monotonic() - self._started_at)

    def _end_with_error(self, error: BaseException) -> None:
        self._abort(error)
        super()._end_with_error(error)

    def _abort(self, error: BaseException) -> None:
        """Report the error to the coordinator, with the failures of this node that the other nodes do not know yet."""
        attempt = self._attempts[-1] if self._attempts else None
        decision = self._latest_decision
        is_known = attempt is None or (decision is not None and decision.attempt >= attempt.number)
        failures = () if attempt is None or is_known else _encode_failures(attempt)
        reason = summarize_exception(error)[:MAX_REASON]
        self._node_thread.abort(AttemptReport(0, AttemptOutcome.ABORTED, failures=failures, reason=reason))
        self._publish_pending_outcomes()

    def _handle_update(self, update: NodeUpdate) -> None:
        if isinstance(update, BaseException):
            raise update
        if isinstance(update, StartAttempt):
            self._prepare_ranks(update)
            return
        if isinstance(update, StopAttempt):
            log_now(logging.INFO, "the ranks of this node are stopped: %s", update.reason)
            return
        self._latest_decision = decision = self._restore_root_cause(update)
        self._record_decision(decision)
        if decision.ends_job:
            self._job_decision = decision
            if decision.next_step is NextStep.FAILED and self._latest_start is None:
                raise LaunchError(decision.reason)

    def _prepare_ranks(self, start: StartAttempt) -> None:
        self._missing_ranks.clear()
        self._latest_start = start
        assert isinstance(self._spec.nprocs, int)
        names = ("group_rank", "group_world_size", "world_size", "role_world_size", "master_addr", "master_port")
        facts = {name: getattr(start, name) for name in names}
        workers = [
            Worker(
                rank=start.first_rank + local_rank,
                local_rank=local_rank,
                local_world_size=self._spec.nprocs,
                role=self._spec.role,
                role_rank=start.first_role_rank + local_rank,
                restart_count=start.attempt,
                run_id=self._rendezvous.run_id,
                **facts,
            )
            for local_rank in range(self._spec.nprocs)
        ]
        ranks = self._event_bus.ranks = [worker.rank for worker in workers]
        facts |= {"attempt": start.attempt, "job": self._rendezvous.run_id, "role_rank": start.first_role_rank}
        self._event_bus.publish(RendezvousCompleted, ranks, **facts)
        setups = build_rank_setups(self._spec, workers)
        start_ranks = partial(self._node_thread.start_ranks, start.attempt, setups)
        self._watcher.post(self._watcher.loop.timers.call_at, monotonic() + start.delay, start_ranks)

    def _is_start_counted(self, attempt: int) -> bool:
        return attempt > 0 and self._latest_start is not None and self._latest_start.is_counted

    def _make_report(self, observations: AttemptObservations) -> AttemptReport:
        observations.collect_stderr()
        waiting, possible_victims = find_waiting_ranks(observations), find_possible_victims(observations)
        ranks = observations.ranks
        returned = [rank for rank, observed in ranks.items() if has_returned(observations, observed)]
        pids = {rank: observed.pid for rank, observed in ranks.items()}
        result = self._record_attempt(self._groups[0], observations)
        records = make_records(get_all_collectives(observations), returned, pids)
        stop_reason = observations.stop_reason
        assert stop_reason is not None
        has_failed = bool(result.failures) and stop_reason is not StopReason.TIMED_OUT
        are_victims = all(failure.is_secondary or rank in waiting for rank, failure in result.failures.items())
        may_be_missed = are_victims and stop_reason in (StopReason.FAILED, StopReason.CANCELLED_BY_JOB)
        missing = find_missing_ranks(observations, result) if may_be_missed else []
        self._missing_ranks = {failure.rank: failure for failure in missing}
        failures = _encode_failures(result)
        failed_attempt = self._build_failed_attempt(observations, result)
        states = result.worker_states if stop_reason in (StopReason.TIMED_OUT, StopReason.CANCELLED_BY_JOB) else {}
        is_restart_possible = has_failed and self._spec.policy.max_restarts
        no_restart_reason = find_no_restart_reason(self._spec.policy, failed_attempt) if is_restart_possible else ""
        return AttemptReport(
            attempt=0,  # NodeMachine.report_attempt fills it in
            outcome=AttemptOutcome.FAILED if has_failed else OUTCOMES.get(stop_reason, AttemptOutcome.FAILED),
            failures=failures,
            failures_omitted=len(result.failures) - len(failures),
            waited_for_other_nodes=are_victims and not waiting.isdisjoint(result.failures),
            may_be_victim=result.root_cause is not None and result.root_cause.rank in possible_victims,
            missing_ranks=limit_total_size(map(encode_failure, missing), MAX_MISSING_RANKS_BYTES),
            collectives=records,
            no_restart_reason=no_restart_reason[:MAX_REASON],
            reason=result.reason[:MAX_REASON],
            unfinished=tuple(rank for rank, state in states.items() if state is not WorkerState.SUCCEEDED),
            healthy_seconds=max(0.0, observations.healthy_seconds),
            step=-1 if failed_attempt.step is None else max(failed_attempt.step, -1),
        )

    def _restore_root_cause(self, decision: AttemptDecision) -> AttemptDecision:
        """NO_ATTEMPT: this node cannot join again. Then the cause is still that of the attempt before."""
        latest = self._latest_decision
        if decision.attempt == NO_ATTEMPT and latest is not None and latest.root_cause_rank >= 0:
            return replace(latest, next_step=NextStep.FAILED, no_restart_reason=decision.reason)
        return decision

    def _record_decision(self, decision: AttemptDecision) -> None:
        self._job_failures = self._collect_job_failures(decision)
        if not self._attempts or self._attempts[-1].number != decision.attempt:
            return
        attempt = self._attempts[-1]
        failures = {**attempt.failures, **self._job_failures}
        cause = failures.get(decision.root_cause_rank)
        self._publish_pending_outcomes(failures, cause)
        state = attempt.state if cause is None else WorkerState.FAILED
        if cause is None and not decision.ends_job:
            state = WorkerState.STOPPED  # since nodes wait to join. Failures of ranks are only consequences of the stop
        self._attempts[-1] = replace(attempt, failures=failures, root_cause=cause, state=state, reason=decision.reason)
        if not decision.ends_job:
            self._event_bus.publish(
                Restarting,
                self._event_bus.ranks,
                attempt=decision.attempt,
                cause=cause,
                delay=decision.delay,
                restarts_left=decision.restarts_left,
                reason=decision.reason if cause is None else "",
                is_counted=decision.is_restart_counted,
            )

    def _collect_job_failures(self, decision: AttemptDecision) -> dict[int, ProcessFailure]:
        if decision.failures_omitted:
            text = "%d more failures are not listed: messages between nodes are limited"
            log_now(logging.WARNING, text, decision.failures_omitted)
        found: dict[int, ProcessFailure] = {}
        for node in decision.lost_nodes:
            found |= {failure.rank: failure for failure in make_lost_failures(node)}
        for encoded in decision.failures:
            try:
                failure = decode_failure(encoded)
            except InvalidMessageError as error:
                log_now(logging.WARNING, "a failure that another node has reported is dropped: %s", error)
                continue
            if failure.rank not in self._event_bus.ranks:
                found[failure.rank] = failure
            elif self._attempts and self._attempts[-1].number == decision.attempt:
                found[failure.rank] = self._add_local_facts(failure, self._attempts[-1])
        return found

    def _add_local_facts(self, failure: ProcessFailure, attempt: Attempt) -> ProcessFailure:
        """Add what only this node knows of its rank, such as the exception itself."""
        local = attempt.failures.get(failure.rank) or self._missing_ranks.get(failure.rank)
        if local is None:  # the collectives of all nodes have shown that this rank called a wrong collective
            last = self._groups[0].last
            return replace(failure, stack="" if last is None else last[1].stacks.get(failure.rank, ""))
        names = ("kind", "evidence", "summary", "is_secondary")
        return replace(local, **{name: getattr(failure, name) for name in names})

    def _publish_outcomes(self, observations: AttemptObservations, result: RunResult[T]) -> None:
        """Keep them until the coordinator has decided which rank failed first."""
        self._publish_pending_outcomes()
        self._unpublished = observations, result

    def _publish_pending_outcomes(
        self, failures: Mapping[int, ProcessFailure] | None = None, cause: ProcessFailure | None = None
    ) -> None:
        """With these failures, or with those that this node itself has found."""
        if self._unpublished is None:
            return
        (observations, result), self._unpublished = self._unpublished, None
        if failures is not None:
            local = {rank: failures[rank] for rank in observations.ranks if rank in failures}
            states = {**result.worker_states, **dict.fromkeys(local, WorkerState.FAILED)}
            result = replace(result, failures=local, worker_states=states, root_cause=cause)
        publish_outcomes(self._event_bus, observations, result)

    def _combine_with_job(self, local: RunResult[T]) -> RunResult[T]:
        """Give the result of this node's ranks the state and the failures of the whole job."""
        decision = self._job_decision
        if decision is None:  # this node was interrupted
            is_success = local.state is WorkerState.SUCCEEDED
            return replace(local, state=WorkerState.STOPPED) if is_success else local
        if decision.next_step is NextStep.DONE:
            return local
        failures = dict(sorted({**local.failures, **self._job_failures}.items()))
        cause = failures.get(decision.root_cause_rank)
        return replace(
            local,
            state=WorkerState.FAILED,
            return_values={rank: value for rank, value in local.return_values.items() if rank not in failures},
            failures=failures,
            root_cause=None if decision.timed_out else cause,
            worker_states={**local.worker_states, **dict.fromkeys(self._job_failures, WorkerState.FAILED)},
            reason=decision.reason or local.reason,
            notes=(*local.notes, *make_restart_notes(decision.no_restart_reason, self._attempts)),
        )


def _encode_failures(source: RunResult[Any] | Attempt) -> tuple[Mapping[str, Any], ...]:
    """The root cause comes first."""
    failures = sorted(source.failures.values(), key=lambda failure: failure is not source.root_cause)
    return limit_total_size(map(encode_failure, failures), MAX_FAILURES_BYTES)

"""One run, in the thread of the program: start, wait, diagnose; does the budget say again? then new ranks and a new Call.

    api.run -> run_single_node -> RunController.run -> EventLoop.start -> ProcessPool.start -> process

and back: EventLoop (Call.evidence) -> RunController: diagnose, decide about a restart -> build_result -> api.run.

This runs user code: unpickled exceptions and return values, `retry_if` and `env`. A rank whose return value cannot be
unpickled has failed. An exception of `retry_if` or `env` ends the run.
"""

import logging
import math
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from mpwatch.events.types import CollectivesRecorded, Restarting, WorkerFailed, WorkerStopped
from mpwatch.live_view.select import MakeView
from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.clock import monotonic
from mpwatch.results.failure import summarize_exception
from mpwatch.results.model import Attempt, WorkerState
from mpwatch.results.report import make_restart_notes
from mpwatch.results.run_result import RunResult, format_attempts
from mpwatch.watcher.call import Call
from mpwatch.watcher.caller import Caller
from mpwatch.watcher.diagnosis.diagnose import diagnose, format_interrupt
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.machine.transitions import Interrupted, StopReason
from mpwatch.watcher.observers.deferred_log import log_now
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.output.rank_output import LAST_DRAIN_SECONDS
from mpwatch.watcher.pack_call import pack_spec
from mpwatch.watcher.processes.rank_environment import RankSetup
from mpwatch.watcher.restarts.merge_results import merge_results
from mpwatch.watcher.restarts.restart_budget import FailedAttempt, RestartBudget, RestartDecision
from mpwatch.watcher.signals import check_stop_signals
from mpwatch.watcher.watcher import Watcher
from mpwatch.wire.exceptions.decoder import add_note
from mpwatch.wire.pickling.call_payload import Payload

T = TypeVar("T")


def run_single_node(
    spec: WorkerSpec[T],
    make_view: MakeView | None = None,
    *,
    payload: Payload | None = None,
    on_start: Callable[[Caller], object] | None = None,
) -> RunResult[T]:
    """Run a function on all ranks. When this returns or raises, no rank is left, and `payload` is closed.

    `on_start` is called with the Caller before the ranks are started.
    """
    __tracebackhide__ = True  # see mpwatch.run
    check_stop_signals(spec)
    controller = RunController(spec, EventBus(uuid.uuid4().hex, spec, keep_events=True))
    try:
        with ExitStack() as resources:
            payload = resources.enter_context(closing(payload or pack_spec(spec)))
            watcher = Watcher(spec, controller.event_bus, keep_ranks=False)
            resources.callback(watcher.close_when_finished)
            setups = watcher.prepare(range(int(spec.nprocs)), 0)
            watcher.output.use_current_streams()
            caller = Caller(watcher, make_view=make_view, ends_ranks=True)
            if on_start is not None:
                on_start(caller)
            caller.execute(partial(controller.run, caller, payload, setups))
            watcher.drain_output(caller.drain_timeout(controller.seconds_left()))
        result = caller.build_result(controller.build_result)
    except BaseException as error:
        controller.end_with_error(error)
        raise
    caller.deliver_signals(result, controller.list_evidence())
    return result


class RunController(Generic[T]):
    """With scope="worker" or `keep_going` each rank is a group of its own, else all are one. The lowest rank names it."""

    def __init__(self, spec: WorkerSpec[T], event_bus: EventBus) -> None:
        self.event_bus = event_bus
        self.started_at = event_bus.started_at
        self._spec = spec
        self._watcher: Watcher
        self._payload: Payload
        self._calls: dict[int, Call] = {}  # the latest one of each group
        self._budgets: dict[int, RestartBudget] = {}  # by group
        self._last_attempts: dict[int, tuple[AttemptObservations, RunResult[T]]] = {}  # by group
        self._restartable_groups: set[int] = set()  # whose last attempt has failed, but could be restarted
        self._attempts: list[Attempt] = []
        self._has_failed = False  # a group will not be restarted, and so no other one
        self._no_restart_reason = ""

    def run(self, caller: Caller, payload: Payload, setups: Sequence[RankSetup]) -> None:
        """Start the ranks, and restart them as often as needed. Return when none is left.

        Raises LaunchError, and any exception of `retry_if` and `env`.
        """
        self._prepare(caller, payload)
        for group in [setups] if self._spec.policy.scope == "group" else [[setup] for setup in setups]:
            self._start(group)
        running: list[Call] = list(self._calls.values())

        def has_news() -> bool:
            return any(call.has_ended() for call in running)

        while running:
            caller.wait(has_news)
            for call in [call for call in running if call.has_ended()]:
                running.remove(call)
                restart = None if call.evidence is None else self._on_end(call.evidence)
                running += [] if restart is None else [restart]
        self._watcher.post(self._watcher.loop.end)
        caller.wait(lambda: False)

    def _prepare(self, caller: Caller, payload: Payload) -> None:
        caller.list_attempts = self.list_evidence
        self._watcher, self._payload = caller.watcher, payload
        self.event_bus.publish_run_started(self._spec, fn=self._spec.fn_name)

    def _start(self, setups: Sequence[RankSetup], due_at: float = 0.0) -> Call:
        """Make the watcher start ranks at a time of CLOCK_MONOTONIC, and call them. Any thread may call this."""
        spec, ranks = self._spec, [setup.worker.rank for setup in setups]
        is_restart = bool(setups[0].worker.restart_count) and bool(self._attempts)
        call = self._calls[min(ranks)] = Call(
            self._payload,
            ranks,
            started_at=self.started_at,
            timeout=spec.timeout,
            stop_after=spec.stop_policy.after,
            is_restart=is_restart,
        )
        self._watcher.post(self._watcher.loop.start, setups, call, due_at)
        return call

    def seconds_left(self) -> float:
        """Return how many seconds of the run's `timeout` are left, or infinity if there is no timeout."""
        timeout = self._spec.timeout
        return math.inf if timeout is None else self.started_at + timeout + self._suspended_seconds - monotonic()

    @property
    def _suspended_seconds(self) -> float:
        return self._watcher.loop.suspended_seconds if self._calls else 0.0

    def list_evidence(self) -> list[AttemptObservations]:
        known = {group: evidence for group, (evidence, _) in self._last_attempts.items()}
        latest = {group: call.evidence for group, call in self._calls.items() if call.evidence is not None}
        return list((known | latest).values())

    def _on_end(self, evidence: AttemptObservations) -> Call | None:
        """A group has ended: restart it, or stop the others, or let them go on. Return the next call of the group."""
        has_failed = evidence.stop_reason is StopReason.FAILED
        if has_failed and evidence.signum is None and self._spec.has_decisions:
            self._watcher.output.drain_all(LAST_DRAIN_SECONDS)
            result = self._record_attempt(evidence)
            decision = self._decide(evidence, result)
            if decision is not None:
                return None if self._has_failed else self._restart(evidence, result, decision)
        may_go_on = has_failed and (self._spec.keep_going or self._watcher.loop.stop_request is not None)
        if evidence.stop_reason is not StopReason.SUCCEEDED and not may_go_on:
            self._has_failed = True
            self._watcher.post(self._watcher.loop.end_calls, StopReason.INTERRUPTED)
        return None

    def _decide(self, evidence: AttemptObservations, result: RunResult[T]) -> RestartDecision | None:
        """Return the decision to restart a failed group, or None if it is not restarted."""
        group = min(evidence.ranks)
        budget = self._budgets.setdefault(group, RestartBudget(self._spec.policy))
        if stop_reason := self._find_stop_reason():
            decision = RestartDecision(no_restart_reason=stop_reason)
        else:
            decision = budget.decide(self._build_failed_attempt(evidence, result))
        if decision.delay is None:
            self._no_restart_reason = self._no_restart_reason or decision.no_restart_reason
            if self._spec.keep_going:
                what = result.verdict if result.root_cause is None else str(result.root_cause)
                log_now(logging.WARNING, "%s; no other rank is stopped, because of keep_going=True", what)
            return None
        self._restartable_groups.add(group)
        return decision

    def _restart(self, evidence: AttemptObservations, result: RunResult[T], decision: RestartDecision) -> Call:
        assert decision.delay is not None
        setups = self._watcher.prepare(list(evidence.ranks), evidence.attempt + 1)
        self.event_bus.publish(
            Restarting,
            evidence.ranks,
            attempt=evidence.attempt,
            cause=result.root_cause,
            delay=decision.delay,
            restarts_left=decision.restarts_left,
        )
        # The watcher thread waits for the end of the delay, so a slow observer does not make it longer.
        return self._start(setups, monotonic() + decision.delay)

    def _find_stop_reason(self) -> str:
        """Return why a requested stop prevents restarts, or an empty text."""
        request = self._watcher.loop.stop_request
        return f"a stop was requested ({request.cause})" if request is not None and self._spec.policy.max_restarts else ""

    def _build_failed_attempt(self, evidence: AttemptObservations, result: RunResult[Any]) -> FailedAttempt:
        cause = result.root_cause
        heartbeat = None if cause is None else evidence.ranks[cause.rank].heartbeat
        steps = [progress.step for progress in result.progress.values() if progress.step is not None]
        return FailedAttempt(
            cause=cause,
            had_heartbeat=heartbeat is not None and (heartbeat.beat_at is not None or heartbeat.report is not None),
            healthy_seconds=evidence.healthy_seconds,
            step=max(steps, default=None),
            seconds_left=self.seconds_left,
        )

    def _record_attempt(self, evidence: AttemptObservations) -> RunResult[T]:
        result = diagnose_attempt(evidence)
        self._last_attempts[min(evidence.ranks)] = evidence, result
        self._restartable_groups.discard(min(evidence.ranks))
        attempt = Attempt(
            number=evidence.attempt,
            ranks=tuple(evidence.ranks),
            started_at=self.event_bus.wall_time(evidence.attempt_started_at),
            elapsed=evidence.ended_at - evidence.attempt_started_at,
            state=result.state,
            failures=result.failures,
            root_cause=result.root_cause,
            reason=result.reason,
            is_counted=self._is_start_counted(evidence.attempt),
        )
        self._attempts.append(attempt)
        self._publish_outcomes(evidence, result)
        return result

    def _is_start_counted(self, attempt: int) -> bool:
        """Return whether the start of the attempt counts as a restart for `max_restarts`."""
        return attempt > 0

    def _publish_outcomes(self, evidence: AttemptObservations, result: RunResult[T]) -> None:
        publish_outcomes(self.event_bus, evidence, result)

    def build_result(self) -> RunResult[T]:
        latest = self.list_evidence()
        for evidence in latest:
            known = self._last_attempts.get(min(evidence.ranks))
            if known is None or known[0] is not evidence:
                self._record_attempt(evidence)
        interrupted = self._watcher.loop.interrupted
        if latest:
            result = self._merge_attempts(latest, was_interrupted=interrupted is not None)
        else:
            result = make_empty_result(interrupted)
        reason = "" if result.state is WorkerState.SUCCEEDED else result.verdict
        self._publish_run_ended(result.state, reason)
        return replace(result, events=tuple(self.event_bus.events), elapsed=monotonic() - self.started_at)

    def _merge_attempts(self, latest: Sequence[AttemptObservations], *, was_interrupted: bool) -> RunResult[T]:
        may_restart = bool(self._spec.policy.max_restarts)
        has_failed = any(evidence.stop_reason is StopReason.FAILED for evidence in latest)
        if may_restart and has_failed and not self._no_restart_reason:
            was_signalled = was_interrupted or any(evidence.signum is not None for evidence in latest)
            self._no_restart_reason = self._find_stop_reason() or ("this process received a signal" if was_signalled else "")
        parts = list(self._last_attempts.values())
        merged = merge_results(parts, self._restartable_groups, keep_going=self._spec.keep_going)
        have_all_returned = all(evidence.stop_reason is StopReason.SUCCEEDED for evidence in latest)
        if have_all_returned and merged.state is WorkerState.FAILED and may_restart:
            self._no_restart_reason = "all ranks had returned, but a return value cannot be unpickled"
        attempts = tuple(self._attempts)
        notes = (*merged.notes, *make_restart_notes(self._no_restart_reason, attempts))
        return replace(merged, attempts=attempts, notes=notes)

    def end_with_error(self, error: BaseException) -> None:
        """Publish that `error` has ended the run. If ranks had failed before, a note of `error` says so."""
        failed = [attempt for attempt in self._attempts if attempt.root_cause is not None]
        if failed and isinstance(error, Exception):
            add_note(error, "\n".join(["raised after ranks had failed:", *format_attempts(failed)]))
        state = WorkerState.FAILED if isinstance(error, Exception) else WorkerState.STOPPED
        self._publish_run_ended(state, summarize_exception(error))

    def _publish_run_ended(self, state: WorkerState, reason: str) -> None:
        workers = [observed.worker for evidence in self.list_evidence() for observed in evidence.ranks.values()]
        restarts = sum(attempt.is_counted for attempt in self._attempts)
        self.event_bus.publish_run_ended(state, workers, restarts=restarts, reason=reason)


def make_empty_result(interrupted: Interrupted | None) -> RunResult[Any]:
    reason = "the run was stopped before its ranks were started"
    if interrupted is not None:
        reason = f"{format_interrupt(interrupted.signum, interrupted.cause)}, before its ranks were started"
    return RunResult(state=WorkerState.STOPPED, reason=reason)


def diagnose_attempt(evidence: AttemptObservations) -> RunResult[Any]:
    """Diagnose an attempt that is over, and drop the data that only the diagnosis needs. See `diagnose`."""
    evidence.collect_stderr()
    try:
        return diagnose(evidence)
    finally:
        evidence.drop_payloads()


def publish_outcomes(event_bus: EventBus, evidence: AttemptObservations, result: RunResult[Any]) -> None:
    for rank, failure in sorted(result.failures.items(), key=lambda item: item[1] is not result.root_cause):
        event_bus.publish(
            WorkerFailed,
            [rank],
            at=evidence.run_started_at + failure.elapsed,
            attempt=evidence.attempt,
            failure=failure,
            is_root_cause=failure is result.root_cause,
        )
    for rank, state in result.worker_states.items():
        if state is WorkerState.STOPPED:
            event_bus.publish(WorkerStopped, [rank], at=evidence.stopped_at, attempt=evidence.attempt)
    for rank, observed in evidence.ranks.items():
        if observed.collectives is not None and result.state is not WorkerState.SUCCEEDED:
            event_bus.publish(
                CollectivesRecorded,
                [rank],
                at=observed.collectives_at,
                attempt=evidence.attempt,
                collectives=observed.collectives.collectives,
            )

"""One run, in the thread of the program: start, wait, diagnose; does the budget say again? then new ranks and a new Call.

    api.run -> RunController.run -> Caller.execute -> EventLoop.start -> ProcessPool.start -> process

and back: EventLoop (Call.evidence) -> RunController: diagnose, decide about a restart, build the result -> api.run.

This runs user code: unpickled exceptions and return values, `retry_if` and `env`. A rank whose return value cannot be
unpickled has failed. An exception of `retry_if` or `env` ends the run.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
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
from mpwatch.watcher.caller import Caller, OnStart
from mpwatch.watcher.diagnosis.diagnose import diagnose, format_interrupt
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.log import log_now
from mpwatch.watcher.machine.transitions import Interrupted, StopReason
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


@dataclass(eq=False)
class RestartGroup:
    """Ranks that are restarted together: all, or a single one with scope="worker" or `keep_going`."""

    call: Call  # the latest one
    budget: RestartBudget
    last: tuple[AttemptObservations, RunResult[Any]] | None = None  # the latest attempt that was diagnosed
    may_restart: bool = False  # that attempt has failed, but could be restarted

    @property
    def evidence(self) -> AttemptObservations | None:
        """Of the latest attempt that is over."""
        return self.call.evidence or (None if self.last is None else self.last[0])


class RunController(Generic[T]):
    """One run on this machine. Several nodes: see nodes/run_controller.py."""

    def __init__(self, spec: WorkerSpec[T]) -> None:
        self._spec = spec
        self._event_bus = EventBus(spec, keep_events=True)
        self._started_at = self._event_bus.started_at
        self._deadline = math.inf if spec.timeout is None else self._started_at + spec.timeout  # without suspensions
        self._payload: Payload
        self._watcher: Watcher
        self._setups: Sequence[RankSetup]  # of the first start
        self._groups: list[RestartGroup] = []
        self._attempts: list[Attempt] = []
        self._has_failed = False  # a group will not be restarted, and so no other one
        self._no_restart_reason = ""

    def run(
        self, make_view: MakeView | None = None, *, payload: Payload | None = None, on_start: OnStart | None = None
    ) -> RunResult[T]:
        """Run the function on all ranks. When this returns or raises, no rank is left, and `payload` is closed.

        `on_start` is called with the Caller before the ranks are started.
        """
        __tracebackhide__ = True  # see mpwatch.run
        check_stop_signals(self._spec)
        with ExitStack() as resources:
            resources.callback(self._event_bus.outbox.run_all)  # log records that are made while threads end
            self._payload = resources.enter_context(closing(payload or pack_spec(self._spec)))
            self._watcher = self._make_watcher(resources)
            self._watcher.use_current_streams()
            try:
                caller = Caller(self._watcher, make_view=make_view, ends_ranks=True)
                caller.list_attempts = self._list_evidence
                if on_start is not None:
                    on_start(caller)
                caller.execute(partial(self._execute, caller))
                caller.drain_output(self._deadline)
                result = caller.build_result(self._build_result)
                self._leave(caller)
            except BaseException as error:
                self._end_with_error(error)
                raise
        caller.deliver_signals(result, self._list_evidence())
        return result

    def _make_watcher(self, resources: ExitStack) -> Watcher:
        watcher = Watcher(self._spec, self._event_bus, keep_ranks=False)
        resources.callback(watcher.close_when_finished)
        self._setups = watcher.prepare(range(int(self._spec.nprocs)), 0)
        return watcher

    def _execute(self, caller: Caller) -> None:
        """Start the ranks, and return when none is left. Raises LaunchError, and any exception of `retry_if` and `env`."""
        self._event_bus.publish_run_started()
        self._follow(caller)
        self._watcher.post(self._watcher.loop.end)
        caller.wait(lambda: False)

    def _follow(self, caller: Caller) -> None:
        """Call the function, and restart the ranks as often as needed."""
        for setups in [self._setups] if self._spec.policy.scope == "group" else [[setup] for setup in self._setups]:
            self._groups.append(RestartGroup(self._start(setups), RestartBudget(self._spec.policy)))
        running = list(self._groups)
        while running:
            caller.wait(lambda: any(group.call.has_ended() for group in running))
            for group in [group for group in running if group.call.has_ended()]:
                if not self._restart(group):
                    running.remove(group)

    def _leave(self, caller: Caller) -> None:
        """In a job of several nodes: the result is known."""

    def _start(self, setups: Sequence[RankSetup], due_at: float = 0.0) -> Call:
        """Make the watcher start ranks at a time of CLOCK_MONOTONIC, and call them. Any thread may call this."""
        call = Call(
            self._payload,
            [setup.worker.rank for setup in setups],
            started_at=self._started_at,
            timeout=self._spec.timeout,
            stop_after=self._spec.stop_policy.after,
            is_restart=bool(setups[0].worker.restart_count) and bool(self._attempts),
        )
        self._watcher.post(self._watcher.loop.start, setups, call, due_at)
        return call

    def _seconds_left(self) -> float:
        return self._deadline + self._watcher.loop.suspended_seconds - monotonic()

    def _list_evidence(self) -> list[AttemptObservations]:
        return [evidence for group in self._groups if (evidence := group.evidence) is not None]

    def _restart(self, group: RestartGroup) -> bool:
        """A group has ended: restart it, or stop the others, or let them go on. Return whether it is restarted."""
        evidence = group.call.evidence
        if evidence is None:  # the call was refused
            return False
        has_failed = evidence.stop_reason is StopReason.FAILED
        if has_failed and evidence.signum is None and self._spec.has_decisions:
            self._watcher.output.drain_all(LAST_DRAIN_SECONDS)
            result = self._record_attempt(group, evidence)
            decision = self._decide(group, evidence, result)
            if decision.delay is not None and self._has_failed:
                return False
            if decision.delay is not None:
                setups = self._watcher.prepare(list(evidence.ranks), evidence.attempt + 1)
                self._event_bus.publish(
                    Restarting,
                    evidence.ranks,
                    attempt=evidence.attempt,
                    cause=result.root_cause,
                    delay=decision.delay,
                    restarts_left=decision.restarts_left,
                )
                # The watcher thread waits for the end of the delay, so a slow observer does not make it longer.
                group.call = self._start(setups, monotonic() + decision.delay)
                return True
        may_go_on = has_failed and (self._spec.keep_going or self._watcher.loop.stop_request is not None)
        if evidence.stop_reason is not StopReason.SUCCEEDED and not may_go_on:
            self._has_failed = True
            self._watcher.post(self._watcher.loop.end_calls, StopReason.INTERRUPTED)
        return False

    def _decide(self, group: RestartGroup, evidence: AttemptObservations, result: RunResult[T]) -> RestartDecision:
        if stop_reason := self._find_stop_reason():
            decision = RestartDecision(no_restart_reason=stop_reason)
        else:
            decision = group.budget.decide(self._build_failed_attempt(evidence, result))
        group.may_restart = decision.delay is not None
        if not group.may_restart:
            self._no_restart_reason = self._no_restart_reason or decision.no_restart_reason
            if self._spec.keep_going:
                what = result.verdict if result.root_cause is None else str(result.root_cause)
                log_now(logging.WARNING, "%s; no other rank is stopped, because of keep_going=True", what)
        return decision

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
            seconds_left=self._seconds_left,
        )

    def _record_attempt(self, group: RestartGroup, evidence: AttemptObservations) -> RunResult[T]:
        result = diagnose_attempt(evidence)
        group.last, group.may_restart = (evidence, result), False
        attempt = Attempt(
            number=evidence.attempt,
            ranks=tuple(evidence.ranks),
            started_at=self._event_bus.wall_time(evidence.attempt_started_at),
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
        publish_outcomes(self._event_bus, evidence, result)

    def _build_result(self) -> RunResult[T]:
        for group in self._groups:
            evidence = group.evidence
            if evidence is not None and (group.last is None or group.last[0] is not evidence):
                self._record_attempt(group, evidence)
        latest = self._list_evidence()
        interrupted = self._watcher.loop.interrupted
        if latest:
            result = self._merge_attempts(latest, was_interrupted=interrupted is not None)
        else:
            result = make_empty_result(interrupted)
        reason = "" if result.state is WorkerState.SUCCEEDED else result.verdict
        self._publish_run_ended(result.state, reason)
        return replace(result, events=tuple(self._event_bus.events), elapsed=monotonic() - self._started_at)

    def _merge_attempts(self, latest: Sequence[AttemptObservations], *, was_interrupted: bool) -> RunResult[T]:
        may_restart = bool(self._spec.policy.max_restarts)
        has_failed = any(evidence.stop_reason is StopReason.FAILED for evidence in latest)
        if may_restart and has_failed and not self._no_restart_reason:
            was_signalled = was_interrupted or any(evidence.signum is not None for evidence in latest)
            self._no_restart_reason = self._find_stop_reason() or ("this process received a signal" if was_signalled else "")
        parts = [group.last for group in self._groups if group.last is not None]
        final = [group.last[1] for group in self._groups if group.last is not None and not group.may_restart]
        merged = merge_results(parts, final, keep_going=self._spec.keep_going)
        have_all_returned = all(evidence.stop_reason is StopReason.SUCCEEDED for evidence in latest)
        if have_all_returned and merged.state is WorkerState.FAILED and may_restart:
            self._no_restart_reason = "all ranks had returned, but a return value cannot be unpickled"
        attempts = tuple(self._attempts)
        notes = (*merged.notes, *make_restart_notes(self._no_restart_reason, attempts))
        return replace(merged, attempts=attempts, notes=notes)

    def _end_with_error(self, error: BaseException) -> None:
        """Publish that `error` has ended the run. If ranks had failed before, a note of `error` says so."""
        failed = [attempt for attempt in self._attempts if attempt.root_cause is not None]
        if failed and isinstance(error, Exception):
            add_note(error, "\n".join(["raised after ranks had failed:", *format_attempts(failed)]))
        state = WorkerState.FAILED if isinstance(error, Exception) else WorkerState.STOPPED
        self._publish_run_ended(state, summarize_exception(error))

    def _publish_run_ended(self, state: WorkerState, reason: str) -> None:
        workers = [observed.worker for evidence in self._list_evidence() for observed in evidence.ranks.values()]
        restarts = sum(attempt.is_counted for attempt in self._attempts)
        self._event_bus.publish_run_ended(state, workers, restarts=restarts, reason=reason)


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

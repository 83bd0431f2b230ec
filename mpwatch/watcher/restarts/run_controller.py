"""Controls one run, in the caller's thread: diagnoses attempts, decides about restarts, delays them, builds the result.

    watcher thread --- all ranks of a group have exited ---> handle_ended_attempts: diagnose, then decide
                   <--- RestartCommand, after the delay ----'
                   <--- DoNotRestart, at once --------------'

RestartBudget computes the delay before a restart. The watcher thread waits for the end of the delay, so a slow observer in
the caller's thread cannot make the delay longer.

This module runs user code, because it unpickles exceptions and return values, and calls `retry_if` and `env`. If a return
value cannot be unpickled, the rank that has returned it counts as failed. If `retry_if` or `env` raises an exception, this
exception ends the run.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from mpwatch.events.types import CollectivesRecorded, Restarting, WorkerFailed, WorkerStopped
from mpwatch.options.spec import WorkerSpec
from mpwatch.os_support.clock import monotonic
from mpwatch.results.failure import summarize_exception
from mpwatch.results.model import Attempt, WorkerState
from mpwatch.results.report import make_restart_notes
from mpwatch.results.run_result import RunResult, format_attempts
from mpwatch.watcher.commands import CommandQueue, DelayedAction, RestartCommand
from mpwatch.watcher.diagnosis.diagnose import diagnose
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.machine.transitions import DoNotRestart, Restart, StopReason
from mpwatch.watcher.observers.deferred_log import log_now
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.output.output_thread import LAST_DRAIN_SECONDS
from mpwatch.watcher.pending_call import PendingCall
from mpwatch.watcher.restarts.merge_results import merge_results
from mpwatch.watcher.restarts.restart_budget import FailedAttempt, RestartBudget, RestartDecision
from mpwatch.watcher.watcher_thread import WatcherThread
from mpwatch.wire.exceptions.decoder import add_note

T = TypeVar("T")


class RunController(Generic[T]):
    """The controller of one run. In this class, the id of a restart group is the group's lowest rank.

    Args:
        spec: what to run.
        event_bus: receives the events of the run.
    """

    def __init__(self, spec: WorkerSpec[T], event_bus: EventBus) -> None:
        self.event_bus = event_bus
        self.started_at = event_bus.started_at
        self._spec = spec
        self._pending_call: PendingCall | None = None  # None until the ranks are about to be started
        self._budgets: dict[int, RestartBudget] = {}  # by id of the restart group
        self._last_attempts: dict[int, tuple[AttemptObservations, RunResult[T]]] = {}  # by id of the restart group
        self._restartable_groups: set[int] = set()  # ids of groups whose last attempt failed, but may be restarted
        self._attempts: list[Attempt] = []
        self._run_has_failed = False  # a restart group will not be restarted
        self._no_restart_reason = ""

    def begin(self, pending_call: PendingCall) -> None:
        """Publish that the run has started. Call this method just before the ranks are started."""
        self._pending_call = pending_call
        self.event_bus.publish_run_started(self._spec, fn=self._spec.fn_name)

    def seconds_left(self) -> float:
        """Return how many seconds of the run's `timeout` are left, or infinity if there is no timeout."""
        timeout = self._spec.timeout
        suspended_seconds = 0.0 if self._pending_call is None else self._pending_call.suspended_seconds
        return math.inf if timeout is None else self.started_at + timeout + suspended_seconds - monotonic()

    def handle_ended_attempts(self, watcher_thread: WatcherThread) -> None:
        """For each attempt that has failed since the previous call of this method, decide whether its ranks are restarted.

        Raises LaunchError if a restart cannot be prepared. Also raises any exception of the user's functions `retry_if` and
        `env`.
        """
        for observations in watcher_thread.commands.take_decision_requests():
            watcher_thread.output.drain_ended_ranks(LAST_DRAIN_SECONDS)
            result = self._record_attempt(observations)
            self._decide(watcher_thread, observations, result)

    def _decide(self, watcher_thread: WatcherThread, observations: AttemptObservations, result: RunResult[T]) -> None:
        """Decide whether a failed restart group is restarted, and pass the decision to the watcher thread."""
        group_id, commands = min(observations.ranks), watcher_thread.commands
        budget = self._budgets.setdefault(group_id, RestartBudget(self._spec.policy))
        stop_reason = self._find_stop_reason()
        if stop_reason:
            decision = RestartDecision(no_restart_reason=stop_reason)
        else:
            decision = budget.decide(self._build_failed_attempt(observations, result))
        if decision.delay is None:
            self._run_has_failed = not self._spec.keeps_going
            self._no_restart_reason = self._no_restart_reason or decision.no_restart_reason
            commands.post(DoNotRestart(group_id, generation=observations.attempt))
            if self._spec.keeps_going:
                what = result.verdict if result.root_cause is None else str(result.root_cause)
                log_now(logging.WARNING, "%s; no other rank is stopped, because of keep_going=True", what)
            return
        self._restartable_groups.add(group_id)
        if self._run_has_failed:  # another group has ended the run
            commands.post(DoNotRestart(group_id, generation=observations.attempt))
            return
        setups = watcher_thread.prepare_restart(list(observations.ranks), observations.attempt + 1)
        self.event_bus.publish(
            Restarting,
            observations.ranks,
            attempt=observations.attempt,
            cause=result.root_cause,
            delay=decision.delay,
            restarts_left=decision.restarts_left,
        )
        restart = RestartCommand(Restart(group_id, generation=observations.attempt), setups)
        schedule_restart(commands, decision.delay, partial(commands.post, restart))

    def _find_stop_reason(self) -> str:
        """If a requested stop prevents restarts, return a text that names the cause of the stop. Otherwise return ""."""
        request = None if self._pending_call is None else self._pending_call.stop_request
        return f"a stop was requested ({request.cause})" if request is not None and self._spec.policy.max_restarts else ""

    def _build_failed_attempt(self, observations: AttemptObservations, result: RunResult[Any]) -> FailedAttempt:
        cause = result.root_cause
        heartbeat = None if cause is None else observations.ranks[cause.rank].heartbeat
        steps = [progress.step for progress in result.progress.values() if progress.step is not None]
        return FailedAttempt(
            cause=cause,
            had_heartbeat=heartbeat is not None and (heartbeat.beat_at is not None or heartbeat.report is not None),
            healthy_seconds=observations.healthy_seconds,
            step=max(steps, default=None),
            seconds_left=self.seconds_left,
        )

    def _record_attempt(self, observations: AttemptObservations) -> RunResult[T]:
        """Diagnose an attempt that is over, record it and publish the outcomes of its ranks."""
        result = diagnose_attempt(observations)
        self._last_attempts[min(observations.ranks)] = observations, result
        self._restartable_groups.discard(min(observations.ranks))
        attempt = Attempt(
            number=observations.attempt,
            ranks=tuple(observations.ranks),
            started_at=self.event_bus.wall_time(observations.attempt_started_at),
            elapsed=observations.ended_at - observations.attempt_started_at,
            state=result.state,
            failures=result.failures,
            root_cause=result.root_cause,
            reason=result.reason,
            is_counted=self._is_start_counted(observations.attempt),
        )
        self._attempts.append(attempt)
        self._publish_outcomes(observations, result)
        return result

    def _count_restarts(self, latest: Iterable[AttemptObservations]) -> int:
        """Return how often ranks were restarted. `latest` contains the last attempt of each restart group."""
        return sum(observations.attempt for observations in latest)

    def _is_start_counted(self, attempt: int) -> bool:
        """Return whether the start of the attempt counts as a restart for `max_restarts`."""
        return attempt > 0

    def _publish_outcomes(self, observations: AttemptObservations, result: RunResult[T]) -> None:
        publish_outcomes(self.event_bus, observations, result)

    def build_result(self) -> RunResult[T]:
        """Return the result of the run, and publish that the run has ended. Call this method when all ranks have exited."""
        assert self._pending_call is not None
        for observations in self._pending_call.observations:
            known = self._last_attempts.get(min(observations.ranks))
            if known is None or known[0].attempt != observations.attempt:
                self._record_attempt(observations)
            if (
                observations.stop_reason is StopReason.FAILED
                and observations.signum is not None
                and self._spec.policy.max_restarts
            ):
                stop_reason = self._find_stop_reason()
                self._no_restart_reason = self._no_restart_reason or stop_reason or "this process received a signal"
        keep_going = self._spec.keeps_going
        merged = merge_results(list(self._last_attempts.values()), self._restartable_groups, keep_going=keep_going)
        have_all_returned = all(
            observations.stop_reason is StopReason.SUCCEEDED for observations in self._pending_call.observations
        )
        if have_all_returned and merged.state is WorkerState.FAILED and self._spec.policy.max_restarts:
            self._no_restart_reason = "all ranks had returned, but a return value cannot be unpickled"
        attempts = tuple(self._attempts)
        notes = (*merged.notes, *make_restart_notes(self._no_restart_reason, attempts))
        result = replace(merged, attempts=attempts, notes=notes)
        reason = "" if result.state is WorkerState.SUCCEEDED else result.verdict
        self._publish_run_ended(result.state, reason)
        return replace(result, events=tuple(self.event_bus.events), elapsed=monotonic() - self.started_at)

    def end_with_error(self, error: BaseException) -> None:
        """Publish that the exception `error` has ended the run.

        If ranks had failed before, add a note about their failures to `error`.
        """
        failed = [attempt for attempt in self._attempts if attempt.root_cause is not None]
        if failed and isinstance(error, Exception):
            add_note(error, "\n".join(["raised after ranks had failed:", *format_attempts(failed)]))
        state = WorkerState.FAILED if isinstance(error, Exception) else WorkerState.STOPPED
        self._publish_run_ended(state, summarize_exception(error))

    def _publish_run_ended(self, state: WorkerState, reason: str) -> None:
        observed = {group_id: observations for group_id, (observations, _) in self._last_attempts.items()}
        if self._pending_call is not None:  # also of attempts that were not diagnosed, since an error ended the run
            observed |= {
                min(observations.ranks): observations
                for observations in self._pending_call.observations
                if observations.ranks
            }
        workers = [of_rank.worker for observations in observed.values() for of_rank in observations.ranks.values()]
        restarts = self._count_restarts(observed.values())
        self.event_bus.publish_run_ended(state, workers, restarts=restarts, reason=reason)


def diagnose_attempt(observations: AttemptObservations) -> RunResult[Any]:
    """Diagnose an attempt that is over, and drop the data that only the diagnosis needs. See `diagnose`."""
    observations.collect_stderr()
    try:
        return diagnose(observations)
    finally:
        observations.drop_payloads()


def schedule_restart(commands: CommandQueue, seconds: float, restart: Callable[[], object]) -> None:
    """Make the watcher thread call `restart` after a delay of `seconds`."""
    commands.post(DelayedAction(monotonic() + seconds, restart))


def publish_outcomes(event_bus: EventBus, observations: AttemptObservations, result: RunResult[Any]) -> None:
    """Publish an event for each failure, each stopped rank and each rank's collectives. The root cause comes first."""
    for rank, failure in sorted(result.failures.items(), key=lambda item: item[1] is not result.root_cause):
        event_bus.publish(
            WorkerFailed,
            [rank],
            at=observations.run_started_at + failure.elapsed,
            attempt=observations.attempt,
            failure=failure,
            is_root_cause=failure is result.root_cause,
        )
    for rank, state in result.worker_states.items():
        if state is WorkerState.STOPPED:
            event_bus.publish(WorkerStopped, [rank], at=observations.stopped_at, attempt=observations.attempt)
    for rank, observed in observations.ranks.items():
        if observed.collectives is not None and result.state is not WorkerState.SUCCEEDED:
            event_bus.publish(
                CollectivesRecorded,
                [rank],
                at=observed.collectives_at,
                attempt=observations.attempt,
                collectives=observed.collectives.collectives,
            )

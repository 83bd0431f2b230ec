"""What the caller's thread makes of a run while it goes on, and in the end: attempts are judged, and a result comes of them.

    watcher thread  --- ranks have failed, all are reaped ---> judge: which rank failed first? restart?
                    <--- restart, when the delay is over ------'  or do not restart

Code of the user's runs here: exceptions are rebuilt, `retry_if` and `env` are called. What they raise ends the run.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from mpwatch.events.types import Restarting, WorkerFailed, WorkerStopped
from mpwatch.options.spec import WorkerSpec
from mpwatch.results.model import Attempt, WorkerState
from mpwatch.results.report import attempts_text, summary_of, verdict
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.commands import PendingCall, RestartCommand
from mpwatch.watcher.diagnosis.diagnose import diagnose
from mpwatch.watcher.diagnosis.observations import AttemptObservations
from mpwatch.watcher.machine.transitions import DoNotRestart, Restart, StopReason
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.output.output_thread import LAST_SECONDS
from mpwatch.watcher.restarts.merge_results import merged
from mpwatch.watcher.restarts.restart_budget import FailedAttempt, RestartBudget
from mpwatch.watcher.watcher_thread import WatcherThread
from mpwatch.wire.exceptions.decoder import annotate

T = TypeVar("T")


class RunController(Generic[T]):
    """Of one run, from its start.

    Args:
        spec: what is run.
        journal: where it is noted what happens.
    """

    def __init__(self, spec: WorkerSpec[T], event_bus: EventBus) -> None:
        self.event_bus = event_bus
        self.started_at = event_bus.started_at
        self._spec = spec
        self._pending_call: PendingCall | None = None  # once it has begun
        self._budgets: dict[int, RestartBudget] = {}  # by the first of the ranks that are started together
        self._latest: dict[int, tuple[AttemptObservations, RunResult[T]]] = {}  # the same
        self._waiting: set[int] = set()  # those of them that are about to be started again
        self._attempts: list[Attempt] = []
        self._delayed: list[tuple[float, Callable[[], None]]] = []  # restarts, each with the time when it is due
        self._is_lost = False  # some are not started again
        self._not_restarted = ""

    def begin(self, pending_call: PendingCall) -> None:
        """The ranks are about to be started for this."""
        self._pending_call = pending_call
        self.event_bus.begin(self._spec, fn=self._spec.fn_name)

    def seconds_left(self) -> float:
        """Of the run's time."""
        timeout = self._spec.timeout
        return math.inf if timeout is None else self.started_at + timeout - time.monotonic()

    def judge(self, watcher_thread: WatcherThread) -> float | None:
        """Decide about the attempts that have failed since the last call, and start the restarts that are due.

        Returns the seconds until the next restart is due; None if no restart waits for its delay. Raises what `retry_if`
        and `env` raise, and LaunchError.
        """
        for observations in watcher_thread.commands.take_decision_requests():
            watcher_thread.output.catch_up(LAST_SECONDS)
            self._decide(watcher_thread, observations, self._close(observations))
        return self._run_due()

    def _delay(self, seconds: float, restart: Callable[[], None]) -> None:
        """Have `judge` call `restart` when this many seconds have passed."""
        self._delayed.append((time.monotonic() + seconds, restart))

    def _run_due(self) -> float | None:
        now = time.monotonic()
        due = [restart for due_at, restart in self._delayed if due_at <= now]
        self._delayed = [(due_at, restart) for due_at, restart in self._delayed if due_at > now]
        for restart in due:
            restart()
        return min((due_at - now for due_at, _ in self._delayed), default=None)

    def result(self) -> RunResult[T]:
        """What came of all ranks."""
        assert self._pending_call is not None
        for observations in self._pending_call.observations:
            known = self._latest.get(min(observations.ranks))
            if known is None or known[0].attempt != observations.attempt:
                self._close(observations)
            if (
                observations.verdict is StopReason.FAILED
                and observations.signum is not None
                and self._spec.policy.max_restarts
            ):
                self._not_restarted = self._not_restarted or "a signal to this process came before"
        together = merged(list(self._latest.values()), self._waiting)
        has_returned = all(observations.verdict is StopReason.SUCCEEDED for observations in self._pending_call.observations)
        if has_returned and together.state is WorkerState.FAILED and self._spec.policy.max_restarts:
            self._not_restarted = "all ranks had returned, and what one returned cannot be rebuilt"
        result = replace(together, attempts=tuple(self._attempts), not_restarted=self._not_restarted)
        reason = "" if result.state is WorkerState.SUCCEEDED else verdict(result)
        self._end(result.state, reason)
        return replace(result, events=tuple(self.event_bus.events))

    def fail(self, error: BaseException) -> None:
        """Something else than a rank has failed: the ranks could not be started, or something was thrown at the caller."""
        failed = [attempt for attempt in self._attempts if attempt.root_cause is not None]
        if failed and isinstance(error, Exception):
            annotate(error, "\n".join(["raised after ranks had failed:", *attempts_text(failed)]))
        self._end(WorkerState.FAILED if isinstance(error, Exception) else WorkerState.STOPPED, summary_of(error))

    def _close(self, observations: AttemptObservations) -> RunResult[T]:
        """An attempt is over."""
        result = diagnose_attempt(observations)
        self._latest[min(observations.ranks)] = observations, result
        self._waiting.discard(min(observations.ranks))
        self._attempts.append(_attempt(self.event_bus, observations, result))
        self._publish_outcomes(observations, result)
        return result

    def _publish_outcomes(self, observations: AttemptObservations, result: RunResult[T]) -> None:
        publish_outcomes(self.event_bus, observations, result)

    def _decide(self, watcher_thread: WatcherThread, observations: AttemptObservations, result: RunResult[T]) -> None:
        first, commands = min(observations.ranks), watcher_thread.commands
        budget = self._budgets.setdefault(first, RestartBudget(self._spec.policy))
        decision = budget.decide(self._failed_attempt(observations, result))
        if decision.delay is None:
            self._is_lost, self._not_restarted = True, decision.why_not
            self._delayed.clear()
        elif self._is_lost:  # or it would be, but nobody waits for it
            self._waiting.add(first)
        if decision.delay is None or self._is_lost:
            commands.post(DoNotRestart(first, generation=observations.attempt))
            return
        setups = watcher_thread.prepare_again(list(observations.ranks), observations.attempt + 1)
        self.event_bus.publish(
            Restarting,
            observations.ranks,
            attempt=observations.attempt,
            cause=result.root_cause,
            delay=decision.delay,
            restarts_left=decision.restarts_left,
        )
        self._waiting.add(first)
        restart = RestartCommand(Restart(first, generation=observations.attempt), setups)
        self._delay(decision.delay, partial(commands.post, restart))

    def _failed_attempt(self, observations: AttemptObservations, result: RunResult[Any]) -> FailedAttempt:
        cause = result.root_cause
        heartbeat = None if cause is None else observations.ranks[cause.rank].heartbeat
        steps = [told.step for told in result.progress.values() if told.step is not None]
        return FailedAttempt(
            cause=cause,
            had_begun=heartbeat is not None and (heartbeat.beat_at, heartbeat.report) != (None, None),
            healthy_seconds=observations.healthy_seconds,
            step=max(steps, default=None),
            seconds_left=self.seconds_left,
        )

    def _end(self, state: WorkerState, reason: str) -> None:
        observed = {first: observations for first, (observations, _) in self._latest.items()}
        if self._pending_call is not None:
            # of lives that nobody has judged, too
            observed |= {
                min(observations.ranks): observations
                for observations in self._pending_call.observations
                if observations.ranks
            }
        workers = [of_rank.worker for observations in observed.values() for of_rank in observations.ranks.values()]
        restarts = sum(observations.attempt for observations in observed.values())
        self.event_bus.end(state, workers, restarts=restarts, reason=reason)


def diagnose_attempt(observations: AttemptObservations) -> RunResult[Any]:
    """Diagnose an attempt that is over, and drop what only the diagnosis needs."""
    observations.collect_stderr()
    try:
        return diagnose(observations)
    finally:
        observations.forget()


def publish_outcomes(event_bus: EventBus, observations: AttemptObservations, result: RunResult[Any]) -> None:
    """What became of those that did not return; who failed first, first."""
    for rank, failure in sorted(result.failures.items(), key=lambda item: item[1] is not result.root_cause):
        event_bus.publish(
            WorkerFailed,
            [rank],
            at=observations.started_at + failure.elapsed,
            attempt=observations.attempt,
            failure=failure,
            is_root_cause=failure is result.root_cause,
        )
    for rank, state in result.worker_states.items():
        if state is WorkerState.STOPPED:
            event_bus.publish(WorkerStopped, [rank], at=observations.stopped_at, attempt=observations.attempt)


def _attempt(event_bus: EventBus, observations: AttemptObservations, result: RunResult[Any]) -> Attempt:
    return Attempt(
        number=observations.attempt,
        ranks=tuple(observations.ranks),
        started_at=event_bus.wall_time(observations.began_at),
        elapsed=observations.ended_at - observations.began_at,
        state=result.state,
        failures=result.failures,
        root_cause=result.root_cause,
        reason=result.reason,
    )

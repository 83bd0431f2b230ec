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

    def __init__(self, spec: WorkerSpec[T], journal: EventBus) -> None:
        self.journal = journal
        self.started_at = journal.started_at
        self._spec = spec
        self._errand: PendingCall | None = None  # once it has begun
        self._ledgers: dict[int, RestartBudget] = {}  # by the first of the ranks that are started together
        self._latest: dict[int, tuple[AttemptObservations, RunResult[T]]] = {}  # the same
        self._waiting: set[int] = set()  # those of them that are about to be started again
        self._attempts: list[Attempt] = []
        self._delayed: list[tuple[float, Callable[[], None]]] = []  # restarts, each with the time when it is due
        self._is_lost = False  # some are not started again
        self._not_restarted = ""

    def begin(self, errand: PendingCall) -> None:
        """The ranks are about to be started for this."""
        self._errand = errand
        self.journal.begin(self._spec, fn=self._spec.fn_name)

    def seconds_left(self) -> float:
        """Of the run's time."""
        timeout = self._spec.timeout
        return math.inf if timeout is None else self.started_at + timeout - time.monotonic()

    def judge(self, life: WatcherThread) -> float | None:
        """Decide about the attempts that have failed since the last call, and start the restarts that are due.

        Returns the seconds until the next restart is due; None if no restart waits for its delay. Raises what `retry_if`
        and `env` raise, and LaunchError.
        """
        for facts in life.mailbox.asked():
            life.output.catch_up(LAST_SECONDS)
            self._decide(life, facts, self._close(facts))
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
        assert self._errand is not None
        for facts in self._errand.facts:
            known = self._latest.get(min(facts.ranks))
            if known is None or known[0].attempt != facts.attempt:
                self._close(facts)
            if facts.verdict is StopReason.FAILED and facts.signum is not None and self._spec.policy.max_restarts:
                self._not_restarted = self._not_restarted or "a signal to this process came before"
        together = merged(list(self._latest.values()), self._waiting)
        has_returned = all(facts.verdict is StopReason.SUCCEEDED for facts in self._errand.facts)
        if has_returned and together.state is WorkerState.FAILED and self._spec.policy.max_restarts:
            self._not_restarted = "all ranks had returned, and what one returned cannot be rebuilt"
        result = replace(together, attempts=tuple(self._attempts), not_restarted=self._not_restarted)
        reason = "" if result.state is WorkerState.SUCCEEDED else verdict(result)
        self._end(result.state, reason)
        return replace(result, events=tuple(self.journal.events))

    def fail(self, error: BaseException) -> None:
        """Something else than a rank has failed: the ranks could not be started, or something was thrown at the caller."""
        failed = [attempt for attempt in self._attempts if attempt.root_cause is not None]
        if failed and isinstance(error, Exception):
            annotate(error, "\n".join(["raised after ranks had failed:", *attempts_text(failed)]))
        self._end(WorkerState.FAILED if isinstance(error, Exception) else WorkerState.STOPPED, summary_of(error))

    def _close(self, facts: AttemptObservations) -> RunResult[T]:
        """An attempt is over."""
        result = diagnose_attempt(facts)
        self._latest[min(facts.ranks)] = facts, result
        self._waiting.discard(min(facts.ranks))
        self._attempts.append(_attempt(self.journal, facts, result))
        self._tell_fates(facts, result)
        return result

    def _tell_fates(self, facts: AttemptObservations, result: RunResult[T]) -> None:
        tell_fates(self.journal, facts, result)

    def _decide(self, life: WatcherThread, facts: AttemptObservations, result: RunResult[T]) -> None:
        first, mailbox = min(facts.ranks), life.mailbox
        ledger = self._ledgers.setdefault(first, RestartBudget(self._spec.policy))
        decision = ledger.decide(self._trial(facts, result))
        if decision.delay is None:
            self._is_lost, self._not_restarted = True, decision.why_not
            self._delayed.clear()
        elif self._is_lost:  # or it would be, but nobody waits for it
            self._waiting.add(first)
        if decision.delay is None or self._is_lost:
            mailbox.post(DoNotRestart(first, generation=facts.attempt))
            return
        places = life.prepare_again(list(facts.ranks), facts.attempt + 1)
        self.journal.note(
            Restarting,
            facts.ranks,
            attempt=facts.attempt,
            cause=result.root_cause,
            delay=decision.delay,
            restarts_left=decision.restarts_left,
        )
        self._waiting.add(first)
        restart = RestartCommand(Restart(first, generation=facts.attempt), places)
        self._delay(decision.delay, partial(mailbox.post, restart))

    def _trial(self, facts: AttemptObservations, result: RunResult[Any]) -> FailedAttempt:
        cause = result.root_cause
        pulse = None if cause is None else facts.ranks[cause.rank].pulse
        steps = [told.step for told in result.progress.values() if told.step is not None]
        return FailedAttempt(
            cause=cause,
            had_begun=pulse is not None and (pulse.beat_at, pulse.report) != (None, None),
            healthy_seconds=facts.healthy_seconds,
            step=max(steps, default=None),
            seconds_left=self.seconds_left,
        )

    def _end(self, state: WorkerState, reason: str) -> None:
        seen = {first: facts for first, (facts, _) in self._latest.items()}
        if self._errand is not None:
            # of lives that nobody has judged, too
            seen |= {min(facts.ranks): facts for facts in self._errand.facts if facts.ranks}
        workers = [of_rank.worker for facts in seen.values() for of_rank in facts.ranks.values()]
        restarts = sum(facts.attempt for facts in seen.values())
        self.journal.end(state, workers, restarts=restarts, reason=reason)


def diagnose_attempt(facts: AttemptObservations) -> RunResult[Any]:
    """Diagnose an attempt that is over, and drop what only the diagnosis needs."""
    facts.gather()
    try:
        return diagnose(facts)
    finally:
        facts.forget()


def tell_fates(journal: EventBus, facts: AttemptObservations, result: RunResult[Any]) -> None:
    """What became of those that did not return; who failed first, first."""
    for rank, failure in sorted(result.failures.items(), key=lambda item: item[1] is not result.root_cause):
        journal.note(
            WorkerFailed,
            [rank],
            at=facts.started_at + failure.elapsed,
            attempt=facts.attempt,
            failure=failure,
            is_root_cause=failure is result.root_cause,
        )
    for rank, state in result.worker_states.items():
        if state is WorkerState.STOPPED:
            journal.note(WorkerStopped, [rank], at=facts.stopped_at, attempt=facts.attempt)


def _attempt(journal: EventBus, facts: AttemptObservations, result: RunResult[Any]) -> Attempt:
    return Attempt(
        number=facts.attempt,
        ranks=tuple(facts.ranks),
        started_at=journal.wall_time(facts.began_at),
        elapsed=facts.ended_at - facts.began_at,
        state=result.state,
        failures=result.failures,
        root_cause=result.root_cause,
        reason=result.reason,
    )

"""`JobRestarts` decides whether a job goes on with new nodes after all its nodes were lost. Pure.

While at least one node remains, the nodes decide together what happens after a failure: see nodes/job_decision.py.
`JobRestarts` reads the events that the nodes send, and records the attempts of the job. New nodes get the RestartHistory of
the job, which contains the number of restarts so far.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mpwatch
from mpwatch.events.types import Event, RendezvousCompleted, Restarting, RunEnded, Stopping
from mpwatch.nodes.job_decision import describe_stop
from mpwatch.nodes.messages import RestartHistory
from mpwatch.results.failure import add_summary
from mpwatch.results.model import Attempt
from mpwatch.watcher.restarts.restart_budget import FailedAttempt, RestartBudget, RestartCounters

HAS_ENDED = "the ranks had ended before that"
NO_FAILURES: Mapping[int, mpwatch.ProcessFailure] = {}


class JobRestarts:
    """What the driver knows about the attempts of one job. `not_restarted` is why the loss of all nodes has ended it, if the
    policy allows restarts at all.
    """

    def __init__(self, policy: mpwatch.RestartPolicy, run_id: str) -> None:
        self.not_restarted = ""
        self._run_id = run_id
        self._policy = policy
        self._restarts_used = 0
        self._start: RendezvousCompleted | None = None  # of the attempt that runs
        self._attempts: dict[int, Attempt] = {}  # those that have ended, by number
        self._counted: set[int] = set()  # attempts that were restarts which the policy allows
        self._has_lost_all = False
        self._stop_reason = ""  # why the job will not be restarted in any case

    def handle_event(self, event: Event) -> None:
        """Every node sends Restarting. The first one ends the attempt."""
        if isinstance(event, RendezvousCompleted):
            if event.attempt not in self._attempts:
                self._start = event
        elif isinstance(event, Restarting):
            self._restarts_used = self._policy.max_restarts - event.restarts_left
            if self._start is not None and self._start.attempt == event.attempt:
                self._end_attempt(self._start, event.time, event.cause, reason=event.reason)
            if event.is_counted:
                self._counted.add(event.attempt + 1)
        elif isinstance(event, Stopping):
            self._stop_reason = describe_stop(event.stop_cause)
        elif isinstance(event, RunEnded) and event.ranks and event.state is not mpwatch.WorkerState.STOPPED:
            self._stop_reason = HAS_ENDED

    def lose_all(
        self, losses: Sequence[mpwatch.ProcessFailure], time: float, monotonic: float
    ) -> tuple[RestartHistory, Restarting] | None:
        """After the loss of all nodes, return the RestartHistory for new ones and the Restarting event to publish, or None
        if no restart is allowed. `losses` has a failure for each of their ranks, in the order in which they were lost.
        """
        self._has_lost_all = True
        failures = {failure.rank: add_summary(failure) for failure in losses}
        cause = failures[losses[0].rank]
        is_counted = self._start is not None  # else the nodes were lost while they met again, and have counted that restart
        if self._start is not None:
            self._end_attempt(self._start, time, cause, failures=failures)
        if self._stop_reason:
            self.not_restarted = self._stop_reason
            return None
        latest = self._attempts[max(self._attempts)]
        if is_counted:
            budget = RestartBudget(self._policy, counters=RestartCounters(restarts_used=self._restarts_used))
            decision = budget.decide(FailedAttempt(cause=None, no_restart_reason=lambda: ""))
            if decision.delay is None:
                self.not_restarted = decision.no_restart_reason
                return None
            self._restarts_used = budget.counters.restarts_used
            self._counted.add(latest.number + 1)
        event = Restarting(
            time=time,
            monotonic=monotonic,
            run_id=self._run_id,
            ranks=latest.ranks,
            attempt=latest.number,
            cause=cause,
            delay=0.0,
            restarts_left=self._policy.max_restarts - self._restarts_used,
            is_counted=is_counted,
        )
        return RestartHistory(latest.number + 1, self._restarts_used), event

    def complete(self, result: mpwatch.RunResult[Any]) -> mpwatch.RunResult[Any]:
        """Add the attempts of lost nodes, which new nodes do not know."""
        if not self._has_lost_all:
            return result
        attempts = {**self._attempts, **{attempt.number: attempt for attempt in result.attempts}}
        return replace(
            result,
            attempts=tuple(
                replace(attempts[number], is_counted=attempts[number].is_counted or number in self._counted)
                for number in sorted(attempts)
            ),
        )

    def _end_attempt(
        self,
        start: RendezvousCompleted,
        time: float,
        cause: mpwatch.ProcessFailure | None,
        *,
        failures: Mapping[int, mpwatch.ProcessFailure] = NO_FAILURES,
        reason: str = "",
    ) -> None:
        self._start = None
        self._attempts[start.attempt] = Attempt(
            number=start.attempt,
            ranks=tuple(range(start.world_size)),
            started_at=start.time,
            elapsed=max(0.0, time - start.time),
            state=mpwatch.WorkerState.STOPPED if cause is None else mpwatch.WorkerState.FAILED,
            failures=failures or ({} if cause is None else {cause.rank: cause}),
            root_cause=cause,
            reason=reason,
        )

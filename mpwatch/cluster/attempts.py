"""`JobAttempts` records the attempts of a job, since new nodes do not know those of lost nodes. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mpwatch
from mpwatch.events.types import Event, RendezvousCompleted, Restarting
from mpwatch.results.model import Attempt


class JobAttempts:
    def __init__(self) -> None:
        self._start: RendezvousCompleted | None = None  # of the attempt that runs
        self._ended: dict[int, Attempt] = {}
        self._counted: set[int] = set()  # attempts that are restarts which the policy allows

    def handle_event(self, event: Event) -> None:
        """Every node publishes these events. The first Restarting ends the attempt."""
        if isinstance(event, RendezvousCompleted) and event.attempt not in self._ended:
            self._start = event
        elif isinstance(event, Restarting):
            if self._start is not None and self._start.attempt == event.attempt:
                self.end(event.time, event.cause, reason=event.reason)
            if event.is_counted:
                self._counted.add(event.attempt + 1)

    def end(
        self,
        time: float,
        cause: mpwatch.ProcessFailure | None,
        failures: Mapping[int, mpwatch.ProcessFailure] | None = None,
        reason: str = "",
    ) -> tuple[int, ...]:
        """End the attempt that runs, if any, at a time in seconds since 1970. Return the ranks of the latest attempt."""
        start, self._start = self._start, None
        if start is not None:
            self._ended[start.attempt] = Attempt(
                number=start.attempt,
                ranks=tuple(range(start.world_size)),
                started_at=start.time,
                elapsed=max(0.0, time - start.time),
                state=mpwatch.WorkerState.STOPPED if cause is None else mpwatch.WorkerState.FAILED,
                failures=failures or ({} if cause is None else {cause.rank: cause}),
                root_cause=cause,
                reason=reason,
            )
        return self._ended[max(self._ended)].ranks

    def complete(self, result: mpwatch.RunResult[Any]) -> mpwatch.RunResult[Any]:
        """Add the attempts of lost nodes."""
        attempts = {**self._ended, **{attempt.number: attempt for attempt in result.attempts}}
        if len(attempts) == len(result.attempts):
            return result
        return replace(
            result,
            attempts=tuple(
                replace(attempts[number], is_counted=attempts[number].is_counted or number in self._counted)
                for number in sorted(attempts)
            ),
        )

"""Applies a RestartPolicy to one run: decides after a failure whether the ranks are restarted, and how long the delay is.

This module reads no clock: its caller passes the times.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import random

from mpwatch.options.restart_policy import PROGRAMMING_ERRORS, RestartPolicy
from mpwatch.results.failure import FailureKind, ProcessFailure

NOT_IN_RETRY_IF = "`retry_if` does not allow a restart after this failure"


@dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    cause: ProcessFailure | None
    """The root cause."""
    had_heartbeat: bool = False
    """Whether the rank that failed first had sent a heartbeat or a report."""
    healthy_seconds: float = 0.0
    """How long all ranks had been ready before the failure, in seconds."""
    step: int | None = None
    """The highest step that a rank has reported."""
    seconds_left: Callable[[], float] = lambda: math.inf
    """Returns how many seconds of the run's `timeout` are left. It is called after `retry_if`, which may take long."""
    no_restart_reason: Callable[[], str] | None = None
    """Returns why the failure does not allow a restart, or an empty text. If it is None, the rules of the policy decide.

    In a job of several nodes, the node of the failed rank has already applied the rules of the policy."""


@dataclass(frozen=True, kw_only=True)
class RestartDecision:
    delay: float | None = None
    """Seconds before the restart, or None if the ranks are not restarted."""
    restarts_left: int = 0
    no_restart_reason: str = ""
    """Why the ranks are not restarted. The text is empty if they are restarted, or if the policy has max_restarts=0."""


class RestartBudget:
    """Counts restarts, and decides whether another is allowed. `rng` returns a number from 0 to 1, for the jitter."""

    def __init__(self, policy: RestartPolicy, rng: Callable[[], float] = random) -> None:
        self._policy, self._rng = policy, rng
        self.restarts_used = 0  # since the first start, or since `reset_after` has set the count to 0
        self._furthest_step = -1  # that a rank has reported
        self._stalled_attempts = 0  # in a row, that reached no new highest step. The first attempt never counts
        self._is_first_attempt = True

    def decide(self, failed_attempt: FailedAttempt) -> RestartDecision:
        policy = self._policy
        if not policy.max_restarts:
            return RestartDecision()
        self._count(failed_attempt)
        if self.restarts_used >= policy.max_restarts:
            return RestartDecision(no_restart_reason=f"all restarts are used up (max_restarts={policy.max_restarts})")
        if policy.max_no_progress is not None and self._stalled_attempts >= policy.max_no_progress:
            return RestartDecision(no_restart_reason=self._describe_no_progress())
        if failed_attempt.no_restart_reason is None:
            reason = find_no_restart_reason(policy, failed_attempt)
        else:
            reason = failed_attempt.no_restart_reason()
        if reason:
            return RestartDecision(no_restart_reason=reason)
        delay = self._compute_delay()
        seconds_left = failed_attempt.seconds_left()
        if delay >= seconds_left:
            return RestartDecision(
                no_restart_reason=f"`timeout` leaves {max(0.0, seconds_left):.1f} s, and the delay is {delay:.1f} s"
            )
        self.restarts_used += 1
        return RestartDecision(delay=delay, restarts_left=policy.max_restarts - self.restarts_used)

    def _count(self, failed_attempt: FailedAttempt) -> None:
        reset_after = self._policy.reset_after
        if reset_after is not None and failed_attempt.healthy_seconds >= reset_after:
            self.restarts_used = 0
        step = -1 if failed_attempt.step is None else failed_attempt.step
        has_progressed = step > self._furthest_step or self._is_first_attempt
        self._stalled_attempts = 0 if has_progressed else self._stalled_attempts + 1
        self._furthest_step, self._is_first_attempt = max(self._furthest_step, step), False

    def _describe_no_progress(self) -> str:
        furthest, stalled = self._furthest_step, self._stalled_attempts
        how_far = f"no step beyond {furthest} was reported" if furthest >= 0 else "no step was reported"
        times = f"{stalled} restarts in a row" if stalled > 1 else "the last restart"
        return f"{how_far} after {times} (max_no_progress={self._policy.max_no_progress})"

    def _compute_delay(self) -> float:
        policy = self._policy
        doublings = min(self.restarts_used, 1000)  # 2.0**1024 raises OverflowError
        delay = min(policy.delay * 2.0**doublings, policy.max_delay)
        return min(delay * (1 + policy.jitter * (2 * self._rng() - 1)), policy.max_delay)


def find_no_restart_reason(policy: RestartPolicy, failed_attempt: FailedAttempt) -> str:
    """Return why the policy does not allow a restart, or an empty text. Raises what `retry_if` raises."""
    retry_if, cause = policy.retry_if, failed_attempt.cause
    if cause is None:
        return ""
    if retry_if is None:
        return _find_default_reason(cause, had_heartbeat=failed_attempt.had_heartbeat)
    if causes := policy.causes:
        kinds = {wanted for wanted in causes if isinstance(wanted, FailureKind)}
        types = tuple(wanted for wanted in causes if isinstance(wanted, type))
        is_wanted = cause.kind in kinds or (cause.exception is not None and issubclass(type(cause.exception), types))
    else:
        assert callable(retry_if)
        is_wanted = bool(retry_if(cause))
    return "" if is_wanted else NOT_IN_RETRY_IF


def _find_default_reason(cause: ProcessFailure, *, had_heartbeat: bool) -> str:
    """Return why the rank would fail again after a restart, or an empty text if a restart may succeed."""
    if cause.kind is FailureKind.START:
        return "the rank failed before it called the function (to restart nevertheless, set `retry_if`)"
    is_programming_error = cause.exception is not None and issubclass(type(cause.exception), PROGRAMMING_ERRORS)
    if is_programming_error and not had_heartbeat:
        name = type(cause.exception).__qualname__
        return (
            f"{name} before the first heartbeat or report counts as an error in the code"
            " (to restart nevertheless, set `retry_if`)"
        )
    return ""

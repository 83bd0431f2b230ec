"""Whether ranks that have failed are started again, and when: a RestartPolicy at work, on the failures of one run. Pure.

It has no clock and no chance of its own: times are handed in, and a source of random numbers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import random

from mpwatch.options.restart_policy import PROGRAMMING_ERRORS, RestartPolicy
from mpwatch.results.model import FailureKind, ProcessFailure

UNWANTED = "it is no failure that `retry_if` wants to be tried again"


@dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    """What has to be known of an attempt that failed."""

    cause: ProcessFailure | None
    """What failed first."""
    had_begun: bool = False
    """Whether that rank had sent a heartbeat or a report."""
    healthy_seconds: float = 0.0
    """From when all ranks were ready to the failure."""
    step: int | None = None
    """The furthest that a rank has reported."""
    seconds_left: Callable[[], float] = lambda: math.inf
    """Of the run's `timeout`, when this is called: `retry_if` may take its time."""
    why_not: Callable[[], str] | None = None
    """Why it is not worth another try, if somebody else knows who has seen the cause; empty if it is."""


@dataclass(frozen=True, kw_only=True)
class RestartDecision:
    """What is to be done: start the ranks again after a delay, or not."""

    delay: float | None = None
    """In seconds; None: not again."""
    restarts_left: int = 0
    why_not: str = ""
    """Empty also if nobody has asked for restarts."""


@dataclass(frozen=True, kw_only=True)
class RestartCounters:
    """What is known of earlier attempts."""

    used: int = 0
    """Restarts, since they were last given back."""
    furthest: int = -1
    """Step."""
    stalled: int = 0
    """Attempts in a row that came no further; the first one cannot."""
    is_new: bool = True


NOTHING_YET = RestartCounters()


class RestartBudget:
    """The restarts of some ranks, from their first start on.

    Args:
        policy: how often, and which failures.
        chance: gives a number from 0 to 1, for the jitter.
        account: of the attempts that others have judged.
    """

    def __init__(
        self, policy: RestartPolicy, chance: Callable[[], float] = random, counters: RestartCounters = NOTHING_YET
    ) -> None:
        self._policy = policy
        self._chance = chance
        self.counters = counters

    def decide(self, failed_attempt: FailedAttempt) -> RestartDecision:
        """About this attempt, the latest. Raises whatever `retry_if` raises."""
        policy = self._policy
        if not policy.max_restarts:
            return RestartDecision()
        self._note(failed_attempt)
        if self.counters.used >= policy.max_restarts:
            return RestartDecision(why_not=f"all restarts are used up (max_restarts={policy.max_restarts})")
        if policy.max_no_progress is not None and self.counters.stalled >= policy.max_no_progress:
            return RestartDecision(why_not=self._no_progress())
        if why_not := not_worth_it(policy, failed_attempt) if failed_attempt.why_not is None else failed_attempt.why_not():
            return RestartDecision(why_not=why_not)
        delay = self._delay()
        seconds_left = failed_attempt.seconds_left()
        if delay >= seconds_left:
            return RestartDecision(
                why_not=f"`timeout` leaves {max(0.0, seconds_left):.1f} s, and the delay is {delay:.1f} s"
            )
        self.counters = replace(self.counters, used=self.counters.used + 1)
        return RestartDecision(delay=delay, restarts_left=policy.max_restarts - self.counters.used)

    def _note(self, failed_attempt: FailedAttempt) -> None:
        known, reset_after = self.counters, self._policy.reset_after
        step = -1 if failed_attempt.step is None else failed_attempt.step
        self.counters = RestartCounters(
            used=0 if reset_after is not None and failed_attempt.healthy_seconds >= reset_after else known.used,
            furthest=max(known.furthest, step),
            stalled=0 if step > known.furthest or known.is_new else known.stalled + 1,
            is_new=False,
        )

    def _no_progress(self) -> str:
        furthest, stalled = self.counters.furthest, self.counters.stalled
        how_far = f"no step beyond {furthest} was reported" if furthest >= 0 else "no step was reported"
        times = f"{stalled} restarts in a row" if stalled > 1 else "the last restart"
        return f"{how_far} after {times} (max_no_progress={self._policy.max_no_progress})"

    def _delay(self) -> float:
        policy = self._policy
        doublings = min(self.counters.used, 1000)  # 2.0**1024 is no float
        delay = min(policy.delay * 2.0**doublings, policy.max_delay)
        return min(delay * (1 + policy.jitter * (2 * self._chance() - 1)), policy.max_delay)


def not_worth_it(policy: RestartPolicy, failed_attempt: FailedAttempt) -> str:
    """Why the policy does not want this failure to be tried again; empty if it does. Raises whatever `retry_if` raises."""
    retry_if, cause = policy.retry_if, failed_attempt.cause
    if retry_if is None:
        return _hopeless(failed_attempt)
    if cause is None:
        return ""
    if causes := policy.causes:
        kinds = {wanted for wanted in causes if isinstance(wanted, FailureKind)}
        types = tuple(wanted for wanted in causes if isinstance(wanted, type))
        is_wanted = cause.kind in kinds or (cause.exception is not None and issubclass(type(cause.exception), types))
    else:
        assert callable(retry_if)
        is_wanted = bool(retry_if(cause))
    return "" if is_wanted else UNWANTED


def _hopeless(failed_attempt: FailedAttempt) -> str:
    """Why it would go the same way again, as far as one can tell who knows nothing of the function."""
    cause = failed_attempt.cause
    if cause is None:
        return ""
    if cause.kind is FailureKind.START:
        return "it never came to call the function (`retry_if` can allow for that)"
    is_programming = cause.exception is not None and issubclass(type(cause.exception), PROGRAMMING_ERRORS)
    if is_programming and not failed_attempt.had_begun:
        name = type(cause.exception).__qualname__
        return f"{name} before the first heartbeat or report is taken for an error in the code (`retry_if` can allow for it)"
    return ""

"""Decisions about restarts: a RestartPolicy applied to given failures. No clock, no random numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpwatch import FailureKind, ProcessFailure, RestartPolicy
from mpwatch.watcher.restarts.restart_budget import FailedAttempt, RestartBudget

NOT_IN_RETRY_IF = "`retry_if` does not allow a restart after this failure"


def failure(kind=FailureKind.EXCEPTION, exception=None):
    where = {"rank": 1, "local_rank": 1, "pid": 101, "hostname": "here"}
    return ProcessFailure(**where, kind=kind, exit_code=3, exception=exception)


EXIT = failure(FailureKind.EXIT)
VALUE_ERROR = failure(exception=ValueError("boom"))


def decide(policy, *attempts, rng_value=0.5):
    """Return the decisions after these failed attempts. Each has the fields of FailedAttempt."""
    budget = RestartBudget(policy, rng=lambda: rng_value)
    return [budget.decide(FailedAttempt(**{"cause": VALUE_ERROR, **attempt})) for attempt in attempts]


def decide_delays(policy, *attempts, **more):
    return [decision.delay for decision in decide(policy, *attempts, **more)]


@pytest.mark.parametrize(
    ("options", "rng_value", "delays"),
    [
        ({"delay": 1.5, "max_delay": 20.0, "jitter": 0.0}, 0.5, [1.5, 3.0, 6.0, 12.0, 20.0, 20.0]),
        ({"delay": 10.0, "jitter": 0.25}, 0.0, [7.5, 15.0]),
        ({"delay": 10.0, "jitter": 0.25}, 1.0, [12.5, 25.0]),
    ],
)
def test_the_delay_doubles_with_a_jitter_up_to_a_limit(options, rng_value, delays):
    assert decide_delays(RestartPolicy(9, **options), *[{}] * len(delays), rng_value=rng_value) == delays


@given(st.integers(0, 30), st.floats(0, 1e308), st.floats(0, 1e308), st.floats(0, 1), st.floats(0, 1))
def test_neither_delays_nor_restarts_exceed_their_limits(max_restarts, delay, max_delay, jitter, random):
    policy = RestartPolicy(max_restarts, delay=delay, max_delay=max_delay, jitter=jitter)
    decisions = decide(policy, *[{}] * 40, rng_value=random)
    restarts = [decision for decision in decisions if decision.delay is not None]
    assert len(restarts) == max_restarts
    assert all(0.0 <= decision.delay <= max_delay for decision in restarts)
    assert [decision.restarts_left for decision in restarts] == list(range(max_restarts))[::-1]
    assert decisions[: len(restarts)] == restarts


def test_a_failure_that_is_not_restarted_uses_up_no_restart():
    policy = RestartPolicy(2, retry_if=ValueError)
    wrong, right = {"cause": EXIT}, {}
    reasons = [decision.no_restart_reason for decision in decide(policy, wrong, right, wrong, right, right, wrong)]
    assert reasons == [NOT_IN_RETRY_IF, "", NOT_IN_RETRY_IF, "", *["all restarts are used up (max_restarts=2)"] * 2]
    assert decide(RestartPolicy(0), {})[0].no_restart_reason == ""


def test_reset_after_resets_restarts_and_delay_but_not_the_attempts_without_progress():
    healthy, unhealthy = {"healthy_seconds": 60.0}, {"healthy_seconds": 59.9}
    options = {"delay": 1.0, "jitter": 0.0}
    attempts = unhealthy, unhealthy, healthy, unhealthy, unhealthy, healthy
    assert decide_delays(RestartPolicy(2, reset_after=60.0, **options), *attempts) == [1.0, 2.0, 1.0, 2.0, None, 1.0]
    assert decide_delays(RestartPolicy(1, **options), healthy, healthy) == [1.0, None]
    stalled = RestartPolicy(9, reset_after=60.0, max_no_progress=2)
    assert decide_delays(stalled, healthy, healthy, healthy) == [0.0, 0.0, None]


@pytest.mark.parametrize(
    ("limit", "steps", "reason"),
    [
        (1, (None, None), "no step was reported after the last restart (max_no_progress=1)"),
        (1, (5, None), "no step beyond 5 was reported after the last restart (max_no_progress=1)"),
        (2, (5, 5, 6, 6, 6), "no step beyond 6 was reported after 2 restarts in a row (max_no_progress=2)"),
        (2, (7, 6, 8, 8, 9), ""),
        (None, [None] * 50, ""),
    ],
)
def test_too_many_attempts_without_progress_end_the_run(limit, steps, reason):
    decisions = decide(RestartPolicy(99, max_no_progress=limit), *({"step": step} for step in steps))
    assert [decision.no_restart_reason for decision in decisions] == [""] * (len(steps) - 1) + [reason]


FAILED_START = "the rank failed before it called the function"
ERROR_IN_CODE = " before the first heartbeat or report counts as an error in the code"


@pytest.mark.parametrize(
    ("retry_if", "cause", "reason"),
    [
        (OSError, failure(exception=ConnectionError()), ""),
        (ConnectionError, failure(exception=OSError()), NOT_IN_RETRY_IF),
        (SystemExit, failure(FailureKind.EXIT, SystemExit(3)), ""),
        (FailureKind.EXIT, VALUE_ERROR, NOT_IN_RETRY_IF),
        ({KeyError, FailureKind.EXCEPTION}, VALUE_ERROR, ""),
        (TypeError, failure(exception=TypeError()), ""),
        (lambda failure: failure.exit_code == 4, EXIT, NOT_IN_RETRY_IF),
        (lambda failure: False, None, ""),  # there is no root cause to ask about
        # by default
        (None, VALUE_ERROR, ""),
        (None, failure(FailureKind.HANG), ""),
        (None, None, ""),
        (None, failure(FailureKind.START, OSError()), FAILED_START),
        (None, failure(exception=TypeError()), "TypeError" + ERROR_IN_CODE),
        (None, failure(exception=ModuleNotFoundError()), "ModuleNotFoundError" + ERROR_IN_CODE),
    ],
)
def test_which_failures_are_restarted(retry_if, cause, reason):
    (decision,) = decide(RestartPolicy(3, retry_if=retry_if), {"cause": cause})
    assert decision.delay == (None if reason else 0.0)
    assert decision.no_restart_reason.startswith(reason)


@pytest.mark.parametrize(("left", "text"), [(4.0, "4.0"), (-2.0, "0.0"), (4.1, None)])
def test_there_is_no_restart_if_the_timeout_ends_during_the_delay(left, text):
    policy = RestartPolicy(1, delay=4.0, jitter=0.0)
    first, second = decide(policy, {"seconds_left": lambda: left}, {"seconds_left": lambda: math.inf})
    assert first.no_restart_reason == (f"`timeout` leaves {text} s, and the delay is 4.0 s" if text else "")
    assert second.delay == (4.0 if text else None)  # a restart that was refused is not used up

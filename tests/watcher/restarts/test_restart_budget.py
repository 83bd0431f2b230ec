"""Decisions about restarts: a RestartPolicy applied to given failures. No clock, no random numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpwatch import FailureKind, RestartPolicy
from mpwatch.watcher.restarts.restart_budget import FailedAttempt, RestartBudget
from support.event_streams import failure

VALUE_ERROR = failure(1)
EXIT = failure(1, FailureKind.EXIT, exit_code=3)
START = failure(1, FailureKind.START)
NOT_IN_RETRY_IF = "`retry_if` does not allow a restart after this failure"


class TransientError(ConnectionError):
    pass


def make_budget(max_restarts=3, *, rng_value=0.5, **more):
    return RestartBudget(RestartPolicy(max_restarts, **{"jitter": 0.0, **more}), rng=lambda: rng_value)


def failed_attempt(cause=VALUE_ERROR, *, seconds_left=math.inf, **more):
    return FailedAttempt(cause=cause, seconds_left=lambda: seconds_left, **more)


def raised(error, **more):
    return failure(1, exception=error, **more)


def decide_delays(budget, times, **more):
    return [budget.decide(failed_attempt(**more)).delay for _ in range(times)]


# --- budgets


def test_without_restarts_no_reason_is_given():
    decision = make_budget(0).decide(failed_attempt())
    assert (decision.delay, decision.restarts_left, decision.no_restart_reason) == (None, 0, "")


def test_restarts_are_used_up():
    budget = make_budget(2)
    assert [budget.decide(failed_attempt()).restarts_left for _ in range(2)] == [1, 0]
    for _ in range(2):
        last = budget.decide(failed_attempt())
        assert (last.delay, last.no_restart_reason) == (None, "all restarts are used up (max_restarts=2)")


def test_a_failure_without_a_restart_uses_up_none():
    budget = make_budget(1, retry_if=ConnectionError)
    assert budget.decide(failed_attempt()).delay is None
    assert budget.decide(failed_attempt(raised(ConnectionError()))).delay == 0.0


def test_used_up_restarts_are_the_reason_before_retry_if():
    budget = make_budget(1, retry_if=ConnectionError)
    budget.decide(failed_attempt(raised(ConnectionError())))
    assert "max_restarts=1" in budget.decide(failed_attempt()).no_restart_reason


# --- decide_delays


def test_the_delay_doubles_up_to_a_limit():
    assert decide_delays(make_budget(9, delay=1.5, max_delay=20.0), 6) == [1.5, 3.0, 6.0, 12.0, 20.0, 20.0]


def test_a_delay_of_more_than_the_limit_is_the_limit():
    assert decide_delays(make_budget(delay=100.0, max_delay=2.0), 2) == [2.0, 2.0]


def test_a_delay_of_zero_stays_zero():
    assert decide_delays(make_budget(3, jitter=1.0), 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("rng_value", "expected"), [(0.0, 7.5), (0.25, 8.75), (0.5, 10.0), (1.0, 12.5)])
def test_jitter_makes_a_delay_longer_or_shorter(rng_value, expected):
    assert make_budget(delay=10.0, jitter=0.25, rng_value=rng_value).decide(failed_attempt()).delay == expected


def test_jitter_makes_no_delay_longer_than_the_limit():
    budget = make_budget(delay=10.0, max_delay=10.0, jitter=0.5, rng_value=1.0)
    assert decide_delays(budget, 3) == [10.0, 10.0, 10.0]


def test_each_restart_has_its_own_random_number():
    random_numbers = iter([0.0, 1.0])
    budget = RestartBudget(RestartPolicy(2, delay=1.0, jitter=0.5), rng=lambda: next(random_numbers))
    assert decide_delays(budget, 2) == [0.5, 3.0]


def test_random_numbers_by_default():
    assert 9.0 <= RestartBudget(RestartPolicy(1, delay=10.0)).decide(failed_attempt()).delay <= 11.0


def test_the_delay_of_very_many_restarts():
    budget = make_budget(2000, delay=1e-300, max_delay=7.0)
    assert decide_delays(budget, 2000)[-1] == 7.0


@given(
    st.integers(0, 30),
    st.floats(0, 1e308),
    st.floats(0, 1e308),
    st.floats(0, 1),
    st.lists(st.floats(0, 1), min_size=40, max_size=40),
)
def test_neither_delays_nor_restarts_exceed_their_limits(max_restarts, delay, max_delay, jitter, random_numbers):
    source = iter(random_numbers)
    policy = RestartPolicy(max_restarts, delay=delay, max_delay=max_delay, jitter=jitter)
    budget = RestartBudget(policy, rng=lambda: next(source))
    decisions = [budget.decide(failed_attempt()) for _ in range(40)]
    restarts = [decision for decision in decisions if decision.delay is not None]
    assert len(restarts) == max_restarts
    assert all(0.0 <= decision.delay <= max_delay for decision in restarts)
    assert [decision.restarts_left for decision in restarts] == list(range(max_restarts))[::-1]
    assert decisions[: len(restarts)] == restarts


# --- reset_after


def test_reset_after_resets_restarts_and_delay():
    budget = make_budget(2, delay=1.0, reset_after=60.0)
    assert decide_delays(budget, 2) == [1.0, 2.0]
    decision = budget.decide(failed_attempt(healthy_seconds=60.0))
    assert (decision.delay, decision.restarts_left) == (1.0, 1)
    assert decide_delays(budget, 2, healthy_seconds=59.9) == [2.0, None]


def test_reset_after_resets_restarts_that_are_used_up():
    budget = make_budget(1, reset_after=60.0)
    assert decide_delays(budget, 5, healthy_seconds=100.0) == [0.0] * 5


def test_without_reset_after_nothing_is_reset():
    assert decide_delays(make_budget(1), 2, healthy_seconds=1e9) == [0.0, None]


def test_reset_after_does_not_reset_the_count_of_attempts_without_progress():
    budget = make_budget(9, reset_after=1.0, max_no_progress=2)
    assert decide_delays(budget, 3, healthy_seconds=100.0) == [0.0, 0.0, None]


# --- max_no_progress


def decide_after_steps(budget, *reached):
    return [budget.decide(failed_attempt(step=step)) for step in reached]


@pytest.mark.parametrize(
    ("limit", "reached", "no_restart_reason"),
    [
        (1, (None, None), "no step was reported after the last restart (max_no_progress=1)"),
        (2, (None, None, None), "no step was reported after 2 restarts in a row (max_no_progress=2)"),
        (1, (5, 5), "no step beyond 5 was reported after the last restart (max_no_progress=1)"),
        (1, (5, None), "no step beyond 5 was reported after the last restart (max_no_progress=1)"),
        (2, (5, 9, 7, 9), "no step beyond 9 was reported after 2 restarts in a row (max_no_progress=2)"),
        (2, (5, 5, 6, 6, 6), "no step beyond 6 was reported after 2 restarts in a row (max_no_progress=2)"),
        (1, (None, 0, 0), "no step beyond 0 was reported after the last restart (max_no_progress=1)"),
        (3, (5, 1, 2, 3), "no step beyond 5 was reported after 3 restarts in a row (max_no_progress=3)"),
    ],
)
def test_too_many_attempts_without_progress_end_the_run(limit, reached, no_restart_reason):
    *before, last = decide_after_steps(make_budget(99, max_no_progress=limit), *reached)
    assert [decision.no_restart_reason for decision in before] == [""] * len(before)
    assert (last.delay, last.no_restart_reason) == (None, no_restart_reason)


@pytest.mark.parametrize("reached", [(1, 2, 3, 4), (None, 0, 1, 2), (0, 1, 1, 2, 2, 3), (7, 6, 8, 8, 9)])
def test_progress_allows_restarts(reached):
    assert all(decision.delay == 0.0 for decision in decide_after_steps(make_budget(99, max_no_progress=2), *reached))


def test_without_a_limit_no_progress_is_needed():
    assert all(decision.delay == 0.0 for decision in decide_after_steps(make_budget(99), *[None] * 99))


# --- which failures


@pytest.mark.parametrize(
    ("retry_if", "cause", "is_wanted"),
    [
        (ConnectionError, raised(ConnectionError()), True),
        (ConnectionError, raised(TransientError()), True),
        (ConnectionError, raised(OSError()), False),
        (ConnectionError, EXIT, False),
        (Exception, raised(KeyboardInterrupt()), False),
        (BaseException, raised(KeyboardInterrupt()), True),
        (SystemExit, failure(1, FailureKind.EXIT, exception=SystemExit(3)), True),
        (FailureKind.EXIT, EXIT, True),
        (FailureKind.EXIT, VALUE_ERROR, False),
        (FailureKind.START, START, True),
        ((OSError, ValueError), VALUE_ERROR, True),
        ([FailureKind.OOM, FailureKind.EXIT], EXIT, True),
        ({FailureKind.OOM, FailureKind.SIGNAL}, EXIT, False),
        (frozenset([ValueError, FailureKind.EXIT]), EXIT, True),
        ({ValueError, FailureKind.OOM}, VALUE_ERROR, True),
        ({KeyError, FailureKind.EXCEPTION}, VALUE_ERROR, True),
        ({KeyError, FailureKind.OOM}, VALUE_ERROR, False),
        (TypeError, raised(TypeError()), True),
        (lambda failure: failure.exit_code == 3, EXIT, True),
        (lambda failure: failure.exit_code == 4, EXIT, False),
        (lambda failure: [], EXIT, False),
        (lambda failure: "yes", START, True),
    ],
)
def test_which_failures_are_wanted(retry_if, cause, is_wanted):
    decision = make_budget(retry_if=retry_if).decide(failed_attempt(cause))
    assert (decision.delay, decision.no_restart_reason) == ((0.0, "") if is_wanted else (None, NOT_IN_RETRY_IF))


def test_what_retry_if_raises_is_raised():
    def retry_if(failure):
        raise LookupError(failure.rank)

    with pytest.raises(LookupError, match="1"):
        make_budget(retry_if=retry_if).decide(failed_attempt())


def test_retry_if_is_not_called_when_no_restart_is_left():
    calls = []
    budget = make_budget(1, retry_if=lambda failure: calls.append(failure) or True)
    decide_delays(budget, 3)
    assert calls == [VALUE_ERROR]


@pytest.mark.parametrize("retry_if", [None, ValueError, lambda failure: False])
def test_an_attempt_without_root_cause_is_restarted(retry_if):
    assert make_budget(retry_if=retry_if).decide(failed_attempt(None)).delay == 0.0


@pytest.mark.parametrize(
    "error", [TypeError, NameError, UnboundLocalError, AttributeError, ModuleNotFoundError, IndentationError]
)
def test_programming_errors_are_restarted_only_after_a_heartbeat(error):
    cause = raised(error("x"))
    no_restart_reason = make_budget().decide(failed_attempt(cause)).no_restart_reason
    assert no_restart_reason.startswith(
        f"{error.__name__} before the first heartbeat or report counts as an error in the code"
    )
    assert "retry_if" in no_restart_reason
    assert make_budget().decide(failed_attempt(cause, had_heartbeat=True)).delay == 0.0


@pytest.mark.parametrize(
    "cause", [VALUE_ERROR, EXIT, raised(KeyError()), failure(1, FailureKind.HANG), failure(1, FailureKind.LOST)]
)
@pytest.mark.parametrize("had_heartbeat", [False, True])
def test_other_failures_are_restarted(cause, had_heartbeat):
    assert make_budget().decide(failed_attempt(cause, had_heartbeat=had_heartbeat)).delay == 0.0


def test_a_failed_start_is_not_restarted():
    assert make_budget().decide(failed_attempt(START)).no_restart_reason == (
        "the rank failed before it called the function (to restart nevertheless, set `retry_if`)"
    )


def test_a_call_that_could_not_be_loaded_is_not_restarted():
    assert (
        "before it called the function"
        in make_budget().decide(failed_attempt(failure(1, FailureKind.START, exception=OSError()))).no_restart_reason
    )


# --- the run's time


@pytest.mark.parametrize(("left", "text"), [(4.0, "4.0"), (3.94, "3.9"), (-2.0, "0.0")])
def test_no_restart_if_the_delay_is_as_long_as_what_is_left_of_the_timeout(left, text):
    decision = make_budget(delay=4.0).decide(failed_attempt(seconds_left=left))
    assert (decision.delay, decision.no_restart_reason) == (None, f"`timeout` leaves {text} s, and the delay is 4.0 s")


def test_a_restart_if_the_delay_is_shorter_than_what_is_left_of_the_timeout():
    assert make_budget(delay=4.0).decide(failed_attempt(seconds_left=4.1)).delay == 4.0


def test_a_restart_that_was_refused_for_lack_of_time_is_not_used_up():
    budget = make_budget(1, delay=4.0)
    budget.decide(failed_attempt(seconds_left=1.0))
    assert budget.decide(failed_attempt(seconds_left=9.0)).delay == 4.0


def test_the_time_of_retry_if_counts_towards_the_timeout():
    left = [9.0]
    budget = make_budget(delay=4.0, retry_if=lambda _: left.append(1.0) or True)
    decision = budget.decide(FailedAttempt(cause=VALUE_ERROR, seconds_left=lambda: left[-1]))
    assert decision.no_restart_reason == "`timeout` leaves 1.0 s, and the delay is 4.0 s"

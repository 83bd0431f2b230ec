"""Whether ranks are started again, and when: a policy at work on failures that are written down. No clock, no chance."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streams import failure

from mpwatch import FailureKind, RestartPolicy
from mpwatch.watcher.restarts.restart_budget import FailedAttempt, RestartBudget

VALUE_ERROR = failure(1)
EXIT = failure(1, FailureKind.EXIT, exit_code=3)
START = failure(1, FailureKind.START)
NOT_WANTED = "it is no failure that `retry_if` wants to be tried again"


class TransientError(ConnectionError):
    pass


def ledger(max_restarts=3, *, chance=0.5, **more):
    return RestartBudget(RestartPolicy(max_restarts, **{"jitter": 0.0, **more}), chance=lambda: chance)


def trial(cause=VALUE_ERROR, *, seconds_left=math.inf, **more):
    return FailedAttempt(cause=cause, seconds_left=lambda: seconds_left, **more)


def raised(error, **more):
    return failure(1, exception=error, **more)


def delays(it, times, **more):
    return [it.decide(trial(**more)).delay for _ in range(times)]


# --- budgets


def test_nobody_who_has_asked_for_no_restart_is_told_why_there_is_none():
    decision = ledger(0).decide(trial())
    assert (decision.delay, decision.restarts_left, decision.why_not) == (None, 0, "")


def test_restarts_are_used_up():
    it = ledger(2)
    assert [it.decide(trial()).restarts_left for _ in range(2)] == [1, 0]
    for _ in range(2):
        last = it.decide(trial())
        assert (last.delay, last.why_not) == (None, "all restarts are used up (max_restarts=2)")


def test_a_failure_that_is_not_worth_it_uses_up_nothing():
    it = ledger(1, retry_if=ConnectionError)
    assert it.decide(trial()).delay is None
    assert it.decide(trial(raised(ConnectionError()))).delay == 0.0


def test_what_is_used_up_is_said_rather_than_what_is_not_worth_it():
    it = ledger(1, retry_if=ConnectionError)
    it.decide(trial(raised(ConnectionError())))
    assert "max_restarts=1" in it.decide(trial()).why_not


# --- delays


def test_the_delay_doubles_up_to_a_limit():
    assert delays(ledger(9, delay=1.5, max_delay=20.0), 6) == [1.5, 3.0, 6.0, 12.0, 20.0, 20.0]


def test_a_delay_of_more_than_the_limit_is_the_limit():
    assert delays(ledger(delay=100.0, max_delay=2.0), 2) == [2.0, 2.0]


def test_no_delay_stays_none():
    assert delays(ledger(3, jitter=1.0), 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("chance", "expected"), [(0.0, 7.5), (0.25, 8.75), (0.5, 10.0), (1.0, 12.5)])
def test_chance_makes_a_delay_longer_or_shorter(chance, expected):
    assert ledger(delay=10.0, jitter=0.25, chance=chance).decide(trial()).delay == expected


def test_chance_makes_no_delay_longer_than_the_limit():
    it = ledger(delay=10.0, max_delay=10.0, jitter=0.5, chance=1.0)
    assert delays(it, 3) == [10.0, 10.0, 10.0]


def test_chance_is_asked_for_each_restart():
    chances = iter([0.0, 1.0])
    it = RestartBudget(RestartPolicy(2, delay=1.0, jitter=0.5), chance=lambda: next(chances))
    assert delays(it, 2) == [0.5, 3.0]


def test_without_a_source_of_chance_there_is_one():
    assert 9.0 <= RestartBudget(RestartPolicy(1, delay=10.0)).decide(trial()).delay <= 11.0


def test_very_many_restarts_have_a_delay_still():
    it = ledger(2000, delay=1e-300, max_delay=7.0)
    assert delays(it, 2000)[-1] == 7.0


@given(
    st.integers(0, 30),
    st.floats(0, 1e308),
    st.floats(0, 1e308),
    st.floats(0, 1),
    st.lists(st.floats(0, 1), min_size=40, max_size=40),
)
def test_neither_delays_nor_restarts_exceed_their_limits(max_restarts, delay, max_delay, jitter, chances):
    source = iter(chances)
    policy = RestartPolicy(max_restarts, delay=delay, max_delay=max_delay, jitter=jitter)
    it = RestartBudget(policy, chance=lambda: next(source))
    decisions = [it.decide(trial()) for _ in range(40)]
    again = [decision for decision in decisions if decision.delay is not None]
    assert len(again) == max_restarts
    assert all(0.0 <= decision.delay <= max_delay for decision in again)
    assert [decision.restarts_left for decision in again] == list(range(max_restarts))[::-1]
    assert decisions[: len(again)] == again


# --- reset_after


def test_ranks_that_were_healthy_for_long_get_restarts_and_delay_back():
    it = ledger(2, delay=1.0, reset_after=60.0)
    assert delays(it, 2) == [1.0, 2.0]
    decision = it.decide(trial(healthy_seconds=60.0))
    assert (decision.delay, decision.restarts_left) == (1.0, 1)
    assert delays(it, 2, healthy_seconds=59.9) == [2.0, None]


def test_restarts_that_are_used_up_come_back_as_well():
    it = ledger(1, reset_after=60.0)
    assert delays(it, 5, healthy_seconds=100.0) == [0.0] * 5


def test_nothing_comes_back_unless_it_is_asked_for():
    assert delays(ledger(1), 2, healthy_seconds=1e9) == [0.0, None]


def test_no_progress_is_none_however_long_ranks_were_healthy():
    it = ledger(9, reset_after=1.0, max_no_progress=2)
    assert delays(it, 3, healthy_seconds=100.0) == [0.0, 0.0, None]


# --- max_no_progress


def steps(it, *reached):
    return [it.decide(trial(step=step)) for step in reached]


@pytest.mark.parametrize(
    ("limit", "reached", "why_not"),
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
def test_without_progress_it_ends(limit, reached, why_not):
    *before, last = steps(ledger(99, max_no_progress=limit), *reached)
    assert [decision.why_not for decision in before] == [""] * len(before)
    assert (last.delay, last.why_not) == (None, why_not)


@pytest.mark.parametrize("reached", [(1, 2, 3, 4), (None, 0, 1, 2), (0, 1, 1, 2, 2, 3), (7, 6, 8, 8, 9)])
def test_with_progress_it_goes_on(reached):
    assert all(decision.delay == 0.0 for decision in steps(ledger(99, max_no_progress=2), *reached))


def test_without_a_limit_no_progress_is_needed():
    assert all(decision.delay == 0.0 for decision in steps(ledger(99), *[None] * 99))


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
    decision = ledger(retry_if=retry_if).decide(trial(cause))
    assert (decision.delay, decision.why_not) == ((0.0, "") if is_wanted else (None, NOT_WANTED))


def test_who_raises_in_the_predicate_is_heard():
    def retry_if(failure):
        raise LookupError(failure.rank)

    with pytest.raises(LookupError, match="1"):
        ledger(retry_if=retry_if).decide(trial())


def test_the_predicate_is_not_asked_when_there_are_no_restarts_left():
    asked = []
    it = ledger(1, retry_if=lambda failure: asked.append(failure) or True)
    delays(it, 3)
    assert asked == [VALUE_ERROR]


@pytest.mark.parametrize("retry_if", [None, ValueError, lambda failure: False])
def test_a_failure_that_is_no_rank_s_is_tried_again(retry_if):
    assert ledger(retry_if=retry_if).decide(trial(None)).delay == 0.0


@pytest.mark.parametrize(
    "error", [TypeError, NameError, UnboundLocalError, AttributeError, ModuleNotFoundError, IndentationError]
)
def test_errors_in_the_code_are_tried_again_only_if_the_rank_had_come_some_way(error):
    cause = raised(error("x"))
    why_not = ledger().decide(trial(cause)).why_not
    assert why_not.startswith(f"{error.__name__} before the first heartbeat or report is taken for an error in the code")
    assert "retry_if" in why_not
    assert ledger().decide(trial(cause, had_begun=True)).delay == 0.0


@pytest.mark.parametrize(
    "cause", [VALUE_ERROR, EXIT, raised(KeyError()), failure(1, FailureKind.HANG), failure(1, FailureKind.LOST)]
)
@pytest.mark.parametrize("had_begun", [False, True])
def test_other_failures_are_tried_again(cause, had_begun):
    assert ledger().decide(trial(cause, had_begun=had_begun)).delay == 0.0


def test_a_rank_that_never_came_to_call_the_function_is_not_tried_again():
    assert ledger().decide(trial(START)).why_not == "it never came to call the function (`retry_if` can allow for that)"


def test_a_rank_that_could_not_load_its_call_is_not_tried_again_whatever_it_raised():
    assert "never came to call" in ledger().decide(trial(failure(1, FailureKind.START, exception=OSError()))).why_not


# --- the run's time


@pytest.mark.parametrize(("left", "text"), [(4.0, "4.0"), (3.94, "3.9"), (-2.0, "0.0")])
def test_a_delay_that_takes_what_time_is_left_is_not_begun(left, text):
    decision = ledger(delay=4.0).decide(trial(seconds_left=left))
    assert (decision.delay, decision.why_not) == (None, f"`timeout` leaves {text} s, and the delay is 4.0 s")


def test_a_delay_that_leaves_some_time_is_begun():
    assert ledger(delay=4.0).decide(trial(seconds_left=4.1)).delay == 4.0


def test_a_restart_that_was_not_begun_is_not_used_up():
    it = ledger(1, delay=4.0)
    it.decide(trial(seconds_left=1.0))
    assert it.decide(trial(seconds_left=9.0)).delay == 4.0


def test_what_time_a_predicate_takes_is_none_that_is_left():
    left = [9.0]
    it = ledger(delay=4.0, retry_if=lambda _: left.append(1.0) or True)
    decision = it.decide(FailedAttempt(cause=VALUE_ERROR, seconds_left=lambda: left[-1]))
    assert decision.why_not == "`timeout` leaves 1.0 s, and the delay is 4.0 s"

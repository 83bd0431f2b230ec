"""The pure machine: whole histories, without a process, in microseconds."""

import signal
import time
from collections import Counter

import pytest

from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.machine.transitions import (
    KILL_SECONDS,
    LAST_CALL_SECONDS,
    LOOK_SECONDS,
    AbandonRank,
    CallRank,
    DumpStacks,
    Exited,
    Failed,
    Failing,
    IllegalEventError,
    Interrupted,
    RankPhase,
    Ready,
    RequestExit,
    Returned,
    RunStage,
    SendSignal,
    StackDumped,
    StartCall,
    StopReason,
)

GRACE = 10.0
PATIENCE = 300.0


def machine(n=3, timeout=None):
    return called(StateMachine(range(n), now=0.0, grace_period=GRACE, start_timeout=PATIENCE), timeout)


def called(it, timeout=None):
    assert it.handle(StartCall(started_at=0.0, timeout=timeout), 0.0) == []
    return it


def at_work(n=3, timeout=None):
    it = machine(n, timeout)
    for rank in range(n):
        assert it.handle(Ready(rank), 0.0) == [CallRank(rank)]
    return it


def after_a_look(it, event, now, *ranks):
    """What is done once these ranks have been looked at, which is what the event or the deadline leads to."""
    assert (it.expire(now) if event is None else it.handle(event, now)) == [DumpStacks(rank) for rank in ranks]
    assert it.stage is RunStage.DUMPING_STACKS
    *others, last = ranks
    for rank in others:
        assert it.handle(StackDumped(rank), now) == []
    return it.handle(StackDumped(last), now)


def stop(*ranks):
    return [SendSignal(rank, number) for rank in ranks for number in (signal.SIGTERM, signal.SIGCONT)]


def test_all_return_and_are_told_to_end_together():
    it = at_work()
    assert it.handle(Returned(2), 1.0) == []
    assert it.handle(Returned(0), 1.0) == []
    assert it.handle(Returned(1), 1.0) == [RequestExit(0), RequestExit(1), RequestExit(2)]
    assert it.deadline == 1.0 + GRACE
    for rank in range(3):
        assert it.handle(Exited(rank), 2.0) == []
    assert (it.stage, it.verdict, it.deadline) == (RunStage.FINISHED, StopReason.SUCCEEDED, None)


def test_a_failure_stops_all_at_once_itself_included():
    it = at_work()
    assert after_a_look(it, Failed(1), 5.0, 0, 2) == [*stop(0), RequestExit(1), *stop(1), *stop(2)]
    assert (it.stage, it.verdict, it.stopped_at, it.deadline) == (RunStage.TERMINATING, StopReason.FAILED, 5.0, 5.0 + GRACE)
    for rank in range(3):
        it.handle(Exited(rank), 6.0)
    assert it.stage is RunStage.FINISHED


def test_a_death_without_an_answer_is_a_failure():
    it = at_work()
    assert after_a_look(it, Exited(0), 5.0, 1, 2) == stop(1, 2)
    assert it.verdict is StopReason.FAILED


def test_a_look_takes_no_longer_than_it_may():
    it = at_work()
    assert it.handle(Failed(1), 1.0) == [DumpStacks(0), DumpStacks(2)]
    assert it.deadline == 1.0 + LOOK_SECONDS
    assert it.handle(StackDumped(2), 1.1) == []
    assert it.expire(1.0 + LOOK_SECONDS) == [*stop(0), RequestExit(1), *stop(1), *stop(2)]
    assert it.handle(StackDumped(0), 1.3) == []
    assert it.stopped_at == 1.0  # what they do from the look on may be because of it


@pytest.mark.parametrize("event", [Returned, Failed, Exited, Failing])
def test_whoever_says_something_else_is_not_waited_for_in_a_look(event):
    it = at_work(2)
    it.handle(Failed(1), 1.0)
    assert SendSignal(1, signal.SIGTERM) in it.handle(event(0), 1.1)
    assert (it.stage, it.verdict) == (RunStage.TERMINATING, StopReason.FAILED)


def test_a_rank_that_becomes_ready_during_a_look_is_not_called():
    it = machine(3)
    it.handle(Ready(0), 0.0)
    it.handle(Ready(1), 0.0)
    assert it.handle(Failed(1), 1.0) == [DumpStacks(0)]
    assert it.handle(Ready(2), 1.1) == []
    assert it.handle(StackDumped(0), 1.1) == [*stop(0), RequestExit(1), *stop(1), *stop(2)]


def test_ctrl_c_ends_a_look():
    it = at_work(2)
    it.handle(Failed(1), 1.0)
    assert it.handle(Interrupted(signal.SIGINT), 1.1)[0] == SendSignal(0, signal.SIGINT)
    assert (it.stage, it.verdict, it.signum) == (RunStage.TERMINATING, StopReason.FAILED, signal.SIGINT)


def test_a_rank_that_does_not_say_what_it_raised_is_waited_for_for_a_moment():
    it = at_work(2)
    assert it.handle(Failing(0), 1.0) == []
    assert it.deadline == 1.0 + LAST_CALL_SECONDS
    assert after_a_look(it, None, 1.0 + LAST_CALL_SECONDS, 0, 1) == stop(0, 1)
    assert it.verdict is StopReason.FAILED


def test_a_death_after_the_answer_is_none():
    it = at_work()
    it.handle(Returned(0), 1.0)
    assert it.handle(Exited(0), 2.0) == []
    assert it.handle(Returned(1), 3.0) == []
    assert it.handle(Returned(2), 3.0) == [RequestExit(1), RequestExit(2)]
    it.handle(Exited(1), 4.0)
    it.handle(Exited(2), 4.0)
    assert it.verdict is StopReason.SUCCEEDED


def test_the_only_rank_dies():
    it = at_work(1)
    assert it.handle(Exited(0), 1.0) == []
    assert (it.stage, it.verdict) == (RunStage.FINISHED, StopReason.FAILED)


def test_the_ladder_is_climbed_once_and_ends_in_giving_up():
    it = at_work(2)
    after_a_look(it, Failed(0), 1.0, 1)
    assert it.expire(1.0 + GRACE - 0.001) == []
    assert it.expire(1.0 + GRACE) == [SendSignal(0, signal.SIGKILL), SendSignal(1, signal.SIGKILL)]
    assert it.deadline == 1.0 + GRACE + KILL_SECONDS
    it.handle(Exited(0), 11.5)
    assert it.expire(1.0 + GRACE + KILL_SECONDS) == [AbandonRank(1)]
    assert (it.stage, it.phase_table.phases[1], it.deadline) == (RunStage.FINISHED, RankPhase.ABANDONED, None)


def test_a_complaint_waits_for_its_cause():
    it = at_work()
    assert it.handle(Failed(0, is_secondary=True), 1.0) == []
    assert (it.stage, it.deadline) == (RunStage.AWAITING_ROOT_CAUSE, 1.0 + LAST_CALL_SECONDS)
    assert it.handle(Failed(2, is_secondary=True), 1.5) == []
    assert it.deadline == 1.0 + LAST_CALL_SECONDS
    assert it.handle(Failed(1), 1.6) == [RequestExit(0), *stop(0), RequestExit(1), *stop(1), RequestExit(2), *stop(2)]
    assert it.verdict is StopReason.FAILED


def test_a_complaint_without_a_cause_ends_the_run_when_time_is_up():
    it = at_work()
    it.handle(Failed(0, is_secondary=True), 1.0)
    assert after_a_look(it, None, 1.0 + LAST_CALL_SECONDS, 1, 2) == [RequestExit(0), *stop(0), *stop(1, 2)]
    assert it.verdict is StopReason.FAILED


def test_a_complaint_without_a_cause_ends_the_run_when_nobody_else_is_at_work():
    it = at_work(2)
    it.handle(Returned(1), 0.5)
    assert it.handle(Failed(0, is_secondary=True), 1.0) == [RequestExit(0), *stop(0), RequestExit(1), *stop(1)]


def test_a_rank_that_lingers_is_stopped_and_named_and_the_run_has_succeeded():
    it = at_work(2)
    it.handle(Returned(0), 1.0)
    it.handle(Returned(1), 1.0)
    it.handle(Exited(0), 1.1)
    assert it.expire(1.0 + GRACE) == stop(1)
    it.handle(Exited(1), 11.1)
    assert (it.lingering, it.verdict) == ([1], StopReason.SUCCEEDED)


def test_the_timeout():
    it = at_work(timeout=3.0)
    it.handle(Returned(0), 1.0)
    assert it.deadline == 3.0
    assert after_a_look(it, None, 3.0, 1, 2) == [RequestExit(0), *stop(0), *stop(1, 2)]
    assert it.verdict is StopReason.TIMED_OUT


def test_ranks_that_do_not_come_up():
    it = machine(2)
    it.handle(Ready(0), 1.0)
    assert it.deadline == PATIENCE
    assert after_a_look(it, None, PATIENCE, 0) == stop(0, 1)
    assert (it.never_ready, it.verdict) == ([1], StopReason.FAILED)


def test_ctrl_c_reaches_the_functions_and_nobody_else():
    it = machine(3)
    it.handle(Ready(0), 0.0)
    it.handle(Ready(1), 0.0)
    it.handle(Returned(1), 0.5)
    assert it.handle(Interrupted(signal.SIGINT), 1.0) == [
        SendSignal(0, signal.SIGINT),
        SendSignal(0, signal.SIGCONT),
        RequestExit(1),
        *stop(1, 2),
    ]
    assert it.verdict is StopReason.INTERRUPTED
    assert it.handle(Failed(0), 1.5) == [RequestExit(0)]
    assert it.handle(Ready(2), 1.5) == [RequestExit(2)]


def test_ctrl_c_twice_kills():
    it = at_work(2)
    it.handle(Interrupted(signal.SIGINT), 1.0)
    kills = [SendSignal(0, signal.SIGKILL), SendSignal(1, signal.SIGKILL)]
    assert it.handle(Interrupted(signal.SIGINT), 1.1) == kills
    assert it.handle(Interrupted(signal.SIGINT), 1.2) == []
    assert it.deadline == 1.1 + KILL_SECONDS


def test_ctrl_c_while_a_failed_run_is_stopped_hurries_it():
    it = at_work(2)
    after_a_look(it, Failed(0), 1.0, 1)
    kills = [SendSignal(0, signal.SIGKILL), SendSignal(1, signal.SIGKILL)]
    assert it.handle(Interrupted(signal.SIGINT), 2.0) == kills
    assert (it.verdict, it.signum) == (StopReason.FAILED, signal.SIGINT)


def test_ctrl_c_after_all_have_returned_keeps_their_values():
    it = at_work(1)
    it.handle(Returned(0), 0.5)
    assert it.handle(Interrupted(signal.SIGINT), 1.0) == stop(0)
    assert (it.verdict, it.signum) == (StopReason.SUCCEEDED, signal.SIGINT)


def test_ctrl_c_in_the_wake_up_of_the_last_death_starts_nothing_again():
    it = at_work(1)
    it.handle(Returned(0), 0.5)
    it.handle(Exited(0), 1.0)
    assert it.handle(Interrupted(signal.SIGINT), 1.0) == []
    assert (it.stage, it.verdict, it.deadline) == (RunStage.FINISHED, StopReason.SUCCEEDED, None)


def test_sigterm_to_the_watcher_is_sigterm_to_the_ranks():
    it = at_work(1)
    assert it.handle(Interrupted(signal.SIGHUP), 1.0) == stop(0)
    assert it.signum == signal.SIGHUP


@pytest.mark.parametrize(
    ("history", "event"),
    [([], Returned(0)), ([Ready(0)], Ready(0)), ([Ready(0), Returned(0)], Returned(0)), ([Ready(0), Exited(0)], Exited(0))],
)
def test_what_cannot_be_is_an_error(history, event):
    it = machine(2)
    for happened in history:
        it.handle(happened, 0.0)
    with pytest.raises(IllegalEventError, match=type(event).__name__):
        it.handle(event, 1.0)


def test_ten_thousand_ranks_of_which_a_thousand_fail():
    began = time.process_time()
    it = at_work(10_000)
    actions = it.handle(Failed(0, is_secondary=True), 1.0)
    for rank in range(1, 999):
        actions += it.handle(Failed(rank, is_secondary=True), 1.0)
    actions += it.handle(Failed(999), 1.1)
    for rank in range(1000, 10_000):
        actions += it.handle(StackDumped(rank), 1.2)
    assert it.stage is RunStage.TERMINATING
    for rank in range(10_000):
        if rank % 10:
            actions += it.handle(Exited(rank), 2.0)
        assert it.deadline is not None
    actions += it.expire(1.2 + GRACE)
    for rank in range(0, 10_000, 10):
        actions += it.handle(Exited(rank), 12.0)
    assert it.stage is RunStage.FINISHED
    assert Counter(type(action) for action in actions) == {DumpStacks: 9000, RequestExit: 1000, SendSignal: 21_000}
    assert time.process_time() - began < 2.0

"""Whole histories of the state machine, without a process. Each takes microseconds."""

import signal
import time
from collections import Counter
from itertools import permutations

import pytest

from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.machine.transitions import (
    KILL_SECONDS,
    ROOT_CAUSE_WAIT_SECONDS,
    STACK_DUMP_SECONDS,
    AbandonRank,
    CallRank,
    CancelAttempt,
    DetailsReceived,
    DumpStacks,
    Exited,
    Failed,
    Failing,
    IllegalEventError,
    Interrupted,
    Lease,
    RankPhase,
    Ready,
    RequestCollectives,
    RequestExit,
    Restart,
    Returned,
    RunStage,
    SendSignal,
    Shutdown,
    StackDumped,
    StartCall,
    StartRank,
    StopReason,
)

GRACE = 10.0
START_TIMEOUT = 300.0


def make_machine(n=3, timeout=None, **more):
    return start_call(StateMachine(range(n), now=0.0, grace_period=GRACE, start_timeout=START_TIMEOUT, **more), timeout)


def start_call(machine, timeout=None):
    assert machine.handle(StartCall(started_at=0.0, timeout=timeout), 0.0) == []
    return machine


def running_machine(n=3, timeout=None, **more):
    machine = make_machine(n, timeout, **more)
    for rank in range(n):
        assert machine.handle(Ready(rank), 0.0) == [CallRank(rank)]
    return machine


def after_stack_dump(machine, event, now, *ranks):
    """Return the actions after these ranks have sent their stacks, which the event or the deadline makes them do.

    Ranks that have returned send their collectives.
    """
    phases = machine.phase_table.phases
    assert (machine.handle_deadline(now) if event is None else machine.handle(event, now)) == [
        RequestCollectives(rank) if phases[rank] is RankPhase.RETURNED else DumpStacks(rank) for rank in ranks
    ]
    assert machine.stage is RunStage.DUMPING_STACKS
    *others, last = ranks
    for rank in others:
        assert machine.handle(StackDumped(rank), now) == []
    return machine.handle(StackDumped(last), now)


def sigterm(*ranks):
    return [SendSignal(rank, number) for rank in ranks for number in (signal.SIGTERM, signal.SIGCONT)]


def test_all_return_and_are_asked_to_exit_together():
    machine = running_machine()
    assert machine.handle(Returned(2), 1.0) == []
    assert machine.handle(Returned(0), 1.0) == []
    assert machine.handle(Returned(1), 1.0) == [RequestExit(0), RequestExit(1), RequestExit(2)]
    assert machine.deadline == 1.0 + GRACE
    for rank in range(3):
        assert machine.handle(Exited(rank), 2.0) == []
    assert (machine.stage, machine.stop_reason, machine.deadline) == (RunStage.FINISHED, StopReason.SUCCEEDED, None)


def test_a_failure_stops_all_ranks_at_once():
    machine = running_machine()
    assert after_stack_dump(machine, Failed(1), 5.0, 0, 2) == [*sigterm(0), RequestExit(1), *sigterm(1), *sigterm(2)]
    assert (machine.stage, machine.stop_reason, machine.stopped_at, machine.deadline) == (
        RunStage.TERMINATING,
        StopReason.FAILED,
        5.0,
        5.0 + GRACE,
    )
    for rank in range(3):
        machine.handle(Exited(rank), 6.0)
    assert machine.stage is RunStage.FINISHED


def test_an_exit_without_an_answer_is_a_failure():
    machine = running_machine()
    assert after_stack_dump(machine, Exited(0), 5.0, 1, 2) == sigterm(1, 2)
    assert machine.stop_reason is StopReason.FAILED


def test_a_stack_dump_has_a_deadline():
    machine = running_machine()
    assert machine.handle(Failed(1), 1.0) == [DumpStacks(0), DumpStacks(2)]
    assert machine.deadline == 1.0 + STACK_DUMP_SECONDS
    assert machine.handle(StackDumped(2), 1.1) == []
    assert machine.handle_deadline(1.0 + STACK_DUMP_SECONDS) == [*sigterm(0), RequestExit(1), *sigterm(1), *sigterm(2)]
    assert machine.handle(StackDumped(0), 1.3) == []
    assert machine.stopped_at == 1.0  # what ranks do after the request for stacks may be a consequence of it


def test_a_rank_that_has_returned_is_stopped_when_it_has_answered_what_it_called():
    machine = running_machine()
    machine.handle(Returned(1), 0.5)
    assert machine.handle(Failed(0, is_secondary=True), 1.0) == []
    assert machine.handle(Failed(2, is_secondary=True), 1.0) == [RequestCollectives(1)]
    assert machine.deadline == 1.0 + STACK_DUMP_SECONDS
    assert machine.handle(StackDumped(1), 1.1)[3:6] == [RequestExit(1), *sigterm(1)]


def test_a_rank_that_returns_during_a_stack_dump_is_stopped_when_it_has_answered_what_it_called():
    machine = running_machine()
    machine.handle(Failed(1), 1.0)
    assert machine.handle(StackDumped(0), 1.0) == []
    assert machine.handle(Returned(0), 1.1) == [RequestCollectives(0)]
    assert machine.handle(StackDumped(2), 1.1) == []
    assert machine.handle(StackDumped(0), 1.1)[:3] == [RequestExit(0), *sigterm(0)]


def test_the_answer_of_a_rank_that_has_returned_has_a_deadline():
    machine = running_machine(2)
    machine.handle(Returned(1), 0.5)
    assert machine.handle(Failed(0), 1.0) == [RequestCollectives(1)]
    assert RequestExit(1) in machine.handle_deadline(1.0 + STACK_DUMP_SECONDS)


@pytest.mark.parametrize("event", [Failed, Exited, Failing])
def test_a_rank_that_reports_during_a_stack_dump_is_not_waited_for(event):
    machine = running_machine(2)
    machine.handle(Failed(1), 1.0)
    assert SendSignal(1, signal.SIGTERM) in machine.handle(event(0), 1.1)
    assert (machine.stage, machine.stop_reason) == (RunStage.TERMINATING, StopReason.FAILED)


@pytest.mark.parametrize(
    "events",
    [[Returned(0)], [Failed(0)], [Failed(0), DetailsReceived(0)]],
    ids=["returned", "failed", "failed with details"],
)
def test_the_stacks_of_a_rank_may_come_after_its_answer(events):
    machine = running_machine()
    assert machine.handle(Failed(1), 1.0) == [DumpStacks(0), DumpStacks(2)]
    for event in events:
        assert machine.handle(event, 1.1) == [RequestCollectives(0)] * isinstance(event, Returned)
    assert machine.handle(StackDumped(0), 1.1) == []
    assert SendSignal(2, signal.SIGTERM) in machine.handle(StackDumped(2), 1.1)


def test_a_rank_that_becomes_ready_during_a_stack_dump_is_not_called():
    machine = make_machine(3)
    machine.handle(Ready(0), 0.0)
    machine.handle(Ready(1), 0.0)
    assert machine.handle(Failed(1), 1.0) == [DumpStacks(0)]
    assert machine.handle(Ready(2), 1.1) == []
    assert machine.handle(StackDumped(0), 1.1) == [*sigterm(0), RequestExit(1), *sigterm(1), *sigterm(2)]


def test_ctrl_c_ends_a_stack_dump():
    machine = running_machine(2)
    machine.handle(Failed(1), 1.0)
    assert machine.handle(Interrupted(signal.SIGINT), 1.1)[0] == SendSignal(0, signal.SIGINT)
    assert (machine.stage, machine.stop_reason, machine.signum) == (RunStage.TERMINATING, StopReason.FAILED, signal.SIGINT)


def test_the_report_of_an_exception_is_waited_for_until_a_deadline():
    machine = running_machine(2)
    assert machine.handle(Failing(0), 1.0) == []
    assert machine.deadline == 1.0 + ROOT_CAUSE_WAIT_SECONDS
    assert after_stack_dump(machine, None, 1.0 + ROOT_CAUSE_WAIT_SECONDS, 0, 1) == sigterm(0, 1)
    assert machine.stop_reason is StopReason.FAILED


def test_an_exit_after_the_answer_is_no_failure():
    machine = running_machine()
    machine.handle(Returned(0), 1.0)
    assert machine.handle(Exited(0), 2.0) == []
    assert machine.handle(Returned(1), 3.0) == []
    assert machine.handle(Returned(2), 3.0) == [RequestExit(1), RequestExit(2)]
    machine.handle(Exited(1), 4.0)
    machine.handle(Exited(2), 4.0)
    assert machine.stop_reason is StopReason.SUCCEEDED


def test_the_only_rank_exits():
    machine = running_machine(1)
    assert machine.handle(Exited(0), 1.0) == []
    assert (machine.stage, machine.stop_reason) == (RunStage.FINISHED, StopReason.FAILED)


def test_ranks_are_terminated_killed_and_abandoned_once():
    machine = running_machine(2)
    after_stack_dump(machine, Failed(0), 1.0, 1)
    assert machine.handle_deadline(1.0 + GRACE - 0.001) == []
    assert machine.handle_deadline(1.0 + GRACE) == [SendSignal(0, signal.SIGKILL), SendSignal(1, signal.SIGKILL)]
    assert machine.deadline == 1.0 + GRACE + KILL_SECONDS
    machine.handle(Exited(0), 11.5)
    assert machine.handle_deadline(1.0 + GRACE + KILL_SECONDS) == [AbandonRank(1)]
    assert (machine.stage, machine.phase_table.phases[1], machine.deadline) == (RunStage.FINISHED, RankPhase.ABANDONED, None)


def test_a_secondary_failure_waits_for_its_root_cause():
    machine = running_machine()
    assert machine.handle(Failed(0, is_secondary=True), 1.0) == []
    assert (machine.stage, machine.deadline) == (RunStage.AWAITING_ROOT_CAUSE, 1.0 + ROOT_CAUSE_WAIT_SECONDS)
    assert machine.handle(Failed(2, is_secondary=True), 1.5) == []
    assert machine.deadline == 1.0 + ROOT_CAUSE_WAIT_SECONDS
    assert machine.handle(Failed(1), 1.6) == [
        RequestExit(0),
        *sigterm(0),
        RequestExit(1),
        *sigterm(1),
        RequestExit(2),
        *sigterm(2),
    ]
    assert machine.stop_reason is StopReason.FAILED


def test_a_secondary_failure_without_root_cause_ends_the_run_at_the_deadline():
    machine = running_machine()
    machine.handle(Failed(0, is_secondary=True), 1.0)
    assert after_stack_dump(machine, None, 1.0 + ROOT_CAUSE_WAIT_SECONDS, 1, 2) == [
        RequestExit(0),
        *sigterm(0),
        *sigterm(1, 2),
    ]
    assert machine.stop_reason is StopReason.FAILED


def test_a_secondary_failure_without_root_cause_ends_the_run_when_no_other_rank_runs():
    machine = running_machine(2)
    machine.handle(Returned(1), 0.5)
    assert machine.handle(Failed(0, is_secondary=True), 1.0) == [RequestCollectives(1)]
    assert machine.handle(StackDumped(1), 1.0) == [RequestExit(0), *sigterm(0), RequestExit(1), *sigterm(1)]


def test_a_rank_that_does_not_exit_in_time_is_stopped_and_the_run_has_succeeded():
    machine = running_machine(2)
    machine.handle(Returned(0), 1.0)
    machine.handle(Returned(1), 1.0)
    machine.handle(Exited(0), 1.1)
    assert machine.handle_deadline(1.0 + GRACE) == sigterm(1)
    machine.handle(Exited(1), 11.1)
    assert (machine.overdue_exits, machine.stop_reason) == ([1], StopReason.SUCCEEDED)


def test_the_timeout():
    machine = running_machine(timeout=3.0)
    machine.handle(Returned(0), 1.0)
    assert machine.deadline == 3.0
    assert after_stack_dump(machine, None, 3.0, 1, 2, 0) == [RequestExit(0), *sigterm(0), *sigterm(1, 2)]
    assert machine.stop_reason is StopReason.TIMED_OUT


def test_ranks_that_are_not_ready_in_time():
    machine = make_machine(2)
    machine.handle(Ready(0), 1.0)
    assert machine.deadline == START_TIMEOUT
    assert after_stack_dump(machine, None, START_TIMEOUT, 0) == sigterm(0, 1)
    assert (machine.never_ready, machine.stop_reason) == ([1], StopReason.FAILED)


def test_ctrl_c_is_sent_to_running_functions_only():
    machine = make_machine(3)
    machine.handle(Ready(0), 0.0)
    machine.handle(Ready(1), 0.0)
    machine.handle(Returned(1), 0.5)
    assert machine.handle(Interrupted(signal.SIGINT), 1.0) == [DumpStacks(0)]
    assert machine.stop_reason is StopReason.INTERRUPTED
    assert machine.handle(StackDumped(0), 1.1) == [
        SendSignal(0, signal.SIGINT),
        SendSignal(0, signal.SIGCONT),
        RequestExit(1),
        *sigterm(1, 2),
    ]
    assert machine.handle(Failed(0), 1.5) == [RequestExit(0)]
    assert machine.handle(Ready(2), 1.5) == [RequestExit(2)]


def test_ctrl_c_twice_kills():
    machine = running_machine(2)
    after_stack_dump(machine, Interrupted(signal.SIGINT), 1.0, 0, 1)
    kills = [SendSignal(0, signal.SIGKILL), SendSignal(1, signal.SIGKILL)]
    assert machine.handle(Interrupted(signal.SIGINT), 1.1) == kills
    assert machine.handle(Interrupted(signal.SIGINT), 1.2) == []
    assert machine.deadline == 1.1 + KILL_SECONDS


def test_ctrl_c_twice_does_not_wait_for_stacks():
    machine = running_machine(2)
    machine.handle(Interrupted(signal.SIGINT), 1.0)
    kills = [SendSignal(0, signal.SIGKILL), SendSignal(1, signal.SIGKILL)]
    assert machine.handle(Interrupted(signal.SIGINT), 1.1) == [*sigterm(0, 1), *kills]


def test_ctrl_c_reaches_ranks_that_write_no_stacks():
    machine = running_machine(2)
    machine.handle(Interrupted(signal.SIGINT), 1.0)
    assert machine.deadline == 1.0 + STACK_DUMP_SECONDS
    assert machine.handle_deadline(machine.deadline)[0] == SendSignal(0, signal.SIGINT)


@pytest.mark.parametrize("answers", [(Returned(0), Returned(1)), (Returned(0), Failed(1), DetailsReceived(1))])
def test_ranks_of_a_group_that_answer_while_stacks_are_dumped_stay(answers):
    machine = running_machine(2, keep_ranks=True)
    machine.handle(Interrupted(signal.SIGINT), 1.0)
    assert [action for answer in answers for action in machine.handle(answer, 1.1)] == []
    assert (machine.stage, machine.stop_reason) == (RunStage.IDLE, StopReason.INTERRUPTED)
    assert machine.handle(StackDumped(0), 1.2) == []  # late
    assert machine.handle(Shutdown(), 1.3) == [RequestExit(0), RequestExit(1)]
    assert machine.handle(StackDumped(1), 1.4) == []


def test_ranks_of_a_group_end_if_one_exits_while_stacks_are_dumped():
    machine = running_machine(2, keep_ranks=True)
    machine.handle(Interrupted(signal.SIGINT), 1.0)
    assert machine.handle(Exited(1), 1.1) == []
    assert machine.handle(StackDumped(0), 1.1) == [SendSignal(0, signal.SIGINT), SendSignal(0, signal.SIGCONT)]
    assert machine.stage is RunStage.TERMINATING


def test_ctrl_c_while_a_failed_run_is_stopped_kills():
    machine = running_machine(2)
    after_stack_dump(machine, Failed(0), 1.0, 1)
    kills = [SendSignal(0, signal.SIGKILL), SendSignal(1, signal.SIGKILL)]
    assert machine.handle(Interrupted(signal.SIGINT), 2.0) == kills
    assert (machine.stop_reason, machine.signum) == (StopReason.FAILED, signal.SIGINT)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_ranks_their_grace_period_if_other_nodes_have_stopped_them_a_moment_before(signum):
    machine = running_machine(1)
    assert after_stack_dump(machine, CancelAttempt(), 1.0, 0) == sigterm(0)
    assert machine.handle(Interrupted(signum), 1.1) == []
    assert (machine.stop_reason, machine.signum, machine.deadline) == (StopReason.CANCELLED_BY_JOB, signum, 1.0 + GRACE)
    assert machine.handle(Interrupted(signum), 1.2) == [SendSignal(0, signal.SIGKILL)]


def test_ctrl_c_after_all_have_returned_keeps_their_values():
    machine = running_machine(1)
    machine.handle(Returned(0), 0.5)
    assert machine.handle(Interrupted(signal.SIGINT), 1.0) == sigterm(0)
    assert (machine.stop_reason, machine.signum) == (StopReason.SUCCEEDED, signal.SIGINT)


def test_ctrl_c_together_with_the_last_exit_changes_nothing():
    machine = running_machine(1)
    machine.handle(Returned(0), 0.5)
    machine.handle(Exited(0), 1.0)
    assert machine.handle(Interrupted(signal.SIGINT), 1.0) == []
    assert (machine.stage, machine.stop_reason, machine.deadline) == (RunStage.FINISHED, StopReason.SUCCEEDED, None)


def test_sigterm_to_the_watcher_is_sigterm_to_the_ranks():
    machine = running_machine(1)
    assert after_stack_dump(machine, Interrupted(signal.SIGHUP), 1.0, 0) == sigterm(0)
    assert machine.signum == signal.SIGHUP


@pytest.mark.parametrize(
    ("history", "event"),
    [([], Returned(0)), ([Ready(0)], Ready(0)), ([Ready(0), Returned(0)], Returned(0)), ([Ready(0), Exited(0)], Exited(0))],
)
def test_an_illegal_event_is_an_error(history, event):
    machine = make_machine(2)
    for past_event in history:
        machine.handle(past_event, 0.0)
    with pytest.raises(IllegalEventError, match=type(event).__name__):
        machine.handle(event, 1.0)


def test_ten_thousand_ranks_of_which_a_thousand_fail():
    began = time.process_time()
    machine = running_machine(10_000)
    actions = machine.handle(Failed(0, is_secondary=True), 1.0)
    for rank in range(1, 999):
        actions += machine.handle(Failed(rank, is_secondary=True), 1.0)
    actions += machine.handle(Failed(999), 1.1)
    for rank in range(1000, 10_000):
        actions += machine.handle(StackDumped(rank), 1.2)
    assert machine.stage is RunStage.TERMINATING
    for rank in range(10_000):
        if rank % 10:
            actions += machine.handle(Exited(rank), 2.0)
        assert machine.deadline is not None
    actions += machine.handle_deadline(1.2 + GRACE)
    for rank in range(0, 10_000, 10):
        actions += machine.handle(Exited(rank), 12.0)
    assert machine.stage is RunStage.FINISHED
    assert Counter(type(action) for action in actions) == {DumpStacks: 9000, RequestExit: 1000, SendSignal: 21_000}
    assert time.process_time() - began < 2.0


def test_ranks_are_stopped_and_killed_at_the_times_of_the_lease():
    machine = running_machine(2)
    assert machine.handle(Lease(stop_at=5.0, kill_at=6.0), 1.0) == []
    assert machine.deadline == 5.0
    assert machine.handle_deadline(4.999) == []
    assert after_stack_dump(machine, None, 5.0, 0, 1) == sigterm(0, 1)
    assert (machine.stop_reason, machine.deadline) == (StopReason.CANCELLED_BY_JOB, 6.0)
    assert machine.handle_deadline(5.999) == []
    assert machine.handle_deadline(6.0) == [SendSignal(0, signal.SIGKILL), SendSignal(1, signal.SIGKILL)]
    assert machine.deadline == 6.0 + KILL_SECONDS


def test_a_renewed_lease_keeps_the_ranks():
    machine = running_machine(2)
    machine.handle(Lease(stop_at=5.0, kill_at=6.0), 1.0)
    machine.handle(Lease(stop_at=9.0, kill_at=10.0), 4.0)
    assert machine.handle_deadline(5.0) == []
    assert machine.deadline == 9.0
    assert after_stack_dump(machine, None, 9.0, 0, 1) == sigterm(0, 1)


def test_in_a_job_of_several_nodes_ranks_are_started_unless_the_end_comes_before():
    """Commands that come together are handled in their order. The actions are executed after that."""
    start, ends = Restart(0, ranks=(0, 1)), (Interrupted(signal.SIGTERM), Shutdown())
    for order in permutations([start, *ends, CancelAttempt(), Lease(5.0, 6.0)]):
        machine = start_call(StateMachine((), now=0.0, grace_period=GRACE, decide_after=[StopReason.CANCELLED_BY_JOB]))
        actions = [action for event in order for action in machine.handle(event, 0.0)]
        is_started = order.index(start) < min(map(order.index, ends))
        assert actions[:2] == ([StartRank(0), StartRank(1)] if is_started else [])
        assert machine.stage is (RunStage.TERMINATING if is_started else RunStage.FINISHED)

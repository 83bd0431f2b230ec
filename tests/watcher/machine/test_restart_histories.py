"""Restarts in histories of the state machine, without a process."""

import signal

import pytest

from mpwatch import WorkerState
from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.machine.transitions import (
    KILL_SECONDS,
    AbandonRank,
    Abort,
    CallRank,
    DoNotRestart,
    DumpStacks,
    Exited,
    Failed,
    Failing,
    HeartbeatRead,
    IllegalEventError,
    Interrupted,
    RankPhase,
    ReadHeartbeat,
    Ready,
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


def running_machine(n=2, timeout=None, **more):
    machine = StateMachine(
        range(n), now=0.0, grace_period=GRACE, start_timeout=START_TIMEOUT, decide_after=(StopReason.FAILED,), **more
    )
    assert machine.handle(StartCall(started_at=0.0, timeout=timeout), 0.0) == []
    make_all_ready(machine, 0.0)
    return machine


def make_all_ready(machine, now):
    for rank in list(machine.phase_table.phases):
        assert machine.handle(Ready(rank, generation=machine.generation), now) == [CallRank(rank)]


def exit_all(machine, now):
    for rank in (
        machine.phase_table.ranks_in(RankPhase.TERMINATING)
        + machine.phase_table.ranks_in(RankPhase.KILLED)
        + machine.phase_table.ranks_in(RankPhase.RUNNING)
    ):
        machine.handle(Exited(rank, generation=machine.generation), now)


def failed_machine(n=2, **more):
    """Return a machine whose ranks have all exited after rank 0 has failed."""
    machine = running_machine(n, **more)
    machine.handle(Exited(0), 1.0)
    for rank in range(1, n):
        machine.handle(StackDumped(rank), 1.0)
    assert machine.stage is (RunStage.TERMINATING if n > 1 else RunStage.AWAITING_DECISION)
    exit_all(machine, 1.1)
    assert (machine.stage, machine.stop_reason, machine.deadline) == (RunStage.AWAITING_DECISION, StopReason.FAILED, None)
    return machine


def restart(machine, now):
    generation = machine.generation
    assert machine.handle(Restart(0, generation=generation), now) == [StartRank(rank) for rank in machine.phase_table.phases]
    assert (machine.stage, machine.generation) == (RunStage.RUNNING, generation + 1)


def test_a_run_without_restarts_is_finished():
    machine = running_machine(1)
    machine._decide_after = ()
    machine.handle(Exited(0), 1.0)
    assert machine.stage is RunStage.FINISHED


def test_ranks_are_restarted_when_all_have_exited():
    machine = failed_machine()
    assert machine.state is WorkerState.UNHEALTHY
    assert machine.handle(Restart(0, generation=0), 6.0) == [StartRank(0), StartRank(1)]
    assert (machine.generation, machine.stage, machine.stop_reason, machine.stopped_at) == (1, RunStage.RUNNING, None, None)
    assert (machine.state, machine.deadline) == (WorkerState.INIT, 6.0 + START_TIMEOUT)
    make_all_ready(machine, 7.0)
    assert (machine.state, machine.deadline) == (WorkerState.HEALTHY, None)
    machine.handle(Returned(0, generation=1), 8.0)
    assert machine.handle(Returned(1, generation=1), 8.0) == [RequestExit(0), RequestExit(1)]


def test_events_of_an_earlier_generation_change_nothing():
    machine = failed_machine()
    restart(machine, 2.0)
    events = (
        Ready(0),
        Returned(0),
        Failed(1),
        Failing(1),
        StackDumped(0),
        Exited(1),
        HeartbeatRead(0, beat_at=1.0),
        DoNotRestart(0),
    )
    for old_event in (*events, Restart(0)):
        assert machine.handle(old_event, 2.0) == []
    assert set(machine.phase_table.phases.values()) == {RankPhase.STARTING}
    assert machine.stage is RunStage.RUNNING


def test_a_run_is_finished_if_it_is_not_restarted():
    machine = failed_machine()
    assert machine.handle(DoNotRestart(0), 2.0) == []
    assert (machine.stage, machine.stop_reason, machine.deadline) == (RunStage.FINISHED, StopReason.FAILED, None)


def test_a_second_failure_while_the_others_are_being_stopped_belongs_to_the_same_attempt():
    machine = running_machine(3)
    machine.handle(Failed(0), 1.0)
    machine.handle(StackDumped(1), 1.0)
    machine.handle(StackDumped(2), 1.0)
    assert machine.handle(Failed(1), 1.1) == [RequestExit(1)]
    machine.handle(Exited(2), 1.1)
    assert machine.stage is RunStage.TERMINATING
    machine.handle(Exited(0), 1.2)
    machine.handle(Exited(1), 1.2)
    assert machine.stage is RunStage.AWAITING_DECISION


def test_ranks_that_exit_while_they_are_restarted_have_failed_again():
    machine = failed_machine()
    restart(machine, 2.0)
    machine.handle(Ready(0, generation=1), 2.5)
    machine.handle(Exited(1, generation=1), 2.6)
    machine.handle(StackDumped(0, generation=1), 2.6)
    machine.handle(Exited(0, generation=1), 2.7)
    assert (machine.stage, machine.stop_reason) == (RunStage.AWAITING_DECISION, StopReason.FAILED)
    restart(machine, 3.0)


def test_restarted_ranks_that_are_not_ready_in_time_have_failed():
    machine = failed_machine()
    restart(machine, 2.0)
    machine.handle(Ready(0, generation=1), 2.5)
    assert machine.handle_deadline(2.0 + START_TIMEOUT) == [DumpStacks(0)]
    assert machine.never_ready == [1]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_run_that_awaits_a_decision(signum):
    machine = failed_machine()
    assert machine.handle(Interrupted(signum), 3.0) == []
    assert (machine.stage, machine.stop_reason, machine.signum, machine.deadline) == (
        RunStage.FINISHED,
        StopReason.FAILED,
        signum,
        None,
    )
    assert machine.handle(Restart(0), 4.0) == []  # the caller had posted it before the interrupt
    assert machine.handle(DoNotRestart(0), 4.0) == []
    assert machine.stage is RunStage.FINISHED


def test_after_an_interrupt_no_rank_is_restarted():
    machine = running_machine(1)
    machine.handle(Interrupted(signal.SIGTERM), 1.0)
    machine.handle(Exited(0), 1.1)
    assert machine.stage is RunStage.FINISHED


def test_an_interrupt_while_failed_ranks_are_being_stopped_leaves_no_restart():
    machine = running_machine(2)
    machine.handle(Exited(0), 1.0)
    machine.handle(StackDumped(1), 1.0)
    machine.handle(Interrupted(signal.SIGINT), 1.1)
    exit_all(machine, 1.2)
    assert (machine.stage, machine.stop_reason) == (RunStage.FINISHED, StopReason.FAILED)


def test_the_timeout_goes_on_through_restarts():
    machine = failed_machine(1, timeout=20.0)
    restart(machine, 7.0)
    make_all_ready(machine, 8.0)
    assert machine.deadline == 20.0
    assert machine.handle_deadline(20.0) == [DumpStacks(0)]
    machine.handle(StackDumped(0, generation=1), 20.0)
    exit_all(machine, 20.1)
    assert (machine.stage, machine.stop_reason) == (RunStage.FINISHED, StopReason.TIMED_OUT)


def test_abandoned_ranks_are_not_restarted():
    machine = running_machine(2)
    machine.handle(Exited(0), 1.0)
    machine.handle(StackDumped(1), 1.0)
    machine.handle_deadline(1.0 + GRACE)
    assert machine.handle_deadline(1.0 + GRACE + KILL_SECONDS) == [AbandonRank(1)]
    assert machine.stage is RunStage.FINISHED


def test_a_new_generation_begins_without_the_findings_of_the_last_one():
    machine = failed_machine(1, heartbeat_timeout=10.0)
    restart(machine, 7.0)
    assert (
        machine.heartbeats.silent_ranks,
        machine.heartbeats.late_ranks,
        machine.never_ready,
        machine.overdue_exits,
        machine.deadline,
    ) == ({}, {}, [], [], 12.0)
    make_all_ready(machine, 8.0)
    assert machine.handle_deadline(12.0) == [ReadHeartbeat(0)]


def test_running_ranks_are_stopped_when_another_group_is_not_restarted():
    machine = running_machine(1)
    assert machine.handle(Abort(), 1.0) == [DumpStacks(0)]
    assert machine.handle(StackDumped(0), 1.1) == [SendSignal(0, signal.SIGTERM), SendSignal(0, signal.SIGCONT)]
    machine.handle(Exited(0), 1.2)
    assert (machine.stage, machine.stop_reason) == (RunStage.FINISHED, StopReason.INTERRUPTED)


def test_a_rank_that_has_returned_may_exit_when_another_group_is_not_restarted():
    machine = running_machine(1)
    machine.handle(Returned(0), 1.0)
    assert machine.handle(Abort(), 1.1) == []
    machine.handle(Exited(0), 1.2)
    assert (machine.stage, machine.stop_reason) == (RunStage.FINISHED, StopReason.SUCCEEDED)


@pytest.mark.parametrize("event", [Abort(), Shutdown()])
def test_ranks_that_await_a_decision_are_finished_by_abort_and_shutdown(event):
    machine = failed_machine(1)
    assert machine.handle(event, 3.0) == []
    assert (machine.stage, machine.stop_reason) == (RunStage.FINISHED, StopReason.FAILED)


def test_failed_ranks_are_not_restarted_after_an_abort():
    machine = running_machine(1)
    assert machine.handle(Failed(0), 1.0)
    assert machine.handle(Abort(), 1.1) == []
    machine.handle(Exited(0), 1.2)
    assert machine.stage is RunStage.AWAITING_DECISION
    assert machine.handle(Restart(0), 1.3) == []
    assert (machine.stage, machine.stop_reason) == (RunStage.FINISHED, StopReason.FAILED)


def test_a_decision_about_running_ranks_is_an_error():
    machine = running_machine(1)
    with pytest.raises(IllegalEventError, match=r"DoNotRestart.* in stage RUNNING"):
        machine.handle(DoNotRestart(0), 1.0)


def test_a_rank_that_does_not_exit_in_time_after_a_success_leaves_the_state_healthy():
    machine = running_machine(1)
    machine.handle(Returned(0), 1.0)
    states = [machine.state]
    machine.handle_deadline(1.0 + GRACE)
    states.append(machine.state)
    machine.handle(Exited(0), 12.0)
    assert [*states, machine.state] == [WorkerState.HEALTHY] * 3


def test_two_hundred_restarts():
    machine = running_machine(8)
    for n in range(200):
        machine.handle(Exited(3, generation=n), float(n))
        for rank in machine.phase_table.ranks_in(RankPhase.RUNNING):
            machine.handle(StackDumped(rank, generation=n), float(n))
        exit_all(machine, float(n))
        restart(machine, float(n))
        make_all_ready(machine, float(n))
    assert machine.generation == 200

"""Limits in histories of the state machine if the ranks were suspended together with the watcher."""

import signal

import pytest

from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.machine.transitions import (
    KILL_SECONDS,
    ROOT_CAUSE_WAIT_SECONDS,
    STACK_DUMP_SECONDS,
    AbandonRank,
    CancelAttempt,
    DumpStacks,
    Exited,
    Failed,
    HeartbeatRead,
    Interrupted,
    Lease,
    ReadHeartbeat,
    Ready,
    Resumed,
    ResumeLimits,
    Returned,
    RunStage,
    SendSignal,
    StackDumped,
    StartCall,
    StopReason,
    SuspendLimits,
)

GRACE, START_TIMEOUT = 10.0, 30.0
BOTH = (0, 1)


def make_machine(*, timeout=None, ready=2, **more):
    machine = StateMachine(BOTH, now=0.0, grace_period=GRACE, start_timeout=START_TIMEOUT, **more)
    machine.handle(StartCall(started_at=0.0, timeout=timeout), 0.0)
    for rank in range(ready):
        machine.handle(Ready(rank), 0.0)
    return machine


def resume(machine, suspended_at, now):
    assert machine.handle(Resumed(suspended_at), now) == []


def be_silent(machine):
    """Let the machine read the same heartbeat of all ranks until it acts. Return the time."""
    while machine.stage is RunStage.RUNNING:
        now = machine.deadline
        for action in machine.handle_deadline(now):
            machine.handle(HeartbeatRead(action.rank, beat_at=0.5), now)
    return now


def test_the_timeout_does_not_count_the_suspension():
    machine = make_machine(timeout=5.0)
    resume(machine, 2.0, 100.0)
    assert machine.handle_deadline(100.0) == []
    assert machine.deadline == 103.0
    assert machine.handle_deadline(103.0) == [DumpStacks(0), DumpStacks(1)]
    assert machine.stop_reason is StopReason.TIMED_OUT


def test_a_deadline_that_had_passed_before_stays_passed():
    machine = make_machine(timeout=5.0)
    resume(machine, 6.0, 100.0)
    assert machine.handle_deadline(100.0) == [DumpStacks(0), DumpStacks(1)]


def test_each_of_several_suspensions_counts():
    machine = make_machine(timeout=5.0)
    for second in range(1, 5):
        resume(machine, 100.0 * second + second - 100.0, 100.0 * second + second)
    assert machine.deadline == 405.0


def test_the_start_timeout_does_not_count_the_suspension():
    machine = make_machine(ready=1)
    resume(machine, 10.0, 100.0)
    assert machine.deadline == 120.0
    assert machine.handle_deadline(120.0) == [DumpStacks(0)]
    assert machine.never_ready == [1]


def test_the_start_timeout_of_a_group_does_not_count_the_suspension():
    machine = StateMachine(BOTH, now=0.0, grace_period=GRACE, start_timeout=START_TIMEOUT, keep_ranks=True)
    resume(machine, 10.0, 100.0)
    assert (machine.stage, machine.deadline) == (RunStage.IDLE, 120.0)


def test_silence_counts_from_the_end_of_the_suspension():
    machine = make_machine(heartbeat_timeout=10.0)
    assert machine.handle_deadline(5.0) == [ReadHeartbeat(0), ReadHeartbeat(1)]
    resume(machine, 5.0, 100.0)
    assert machine.deadline == 105.0
    assert 110.0 <= be_silent(machine) <= 111.0
    assert set(machine.heartbeats.silent_ranks) == set(BOTH)


def test_ranks_that_were_silent_stay_known_while_they_are_stopped():
    machine = make_machine(heartbeat_timeout=10.0)
    now = be_silent(machine)
    assert machine.stage is RunStage.DUMPING_STACKS
    resume(machine, now, 100.0)
    assert set(machine.heartbeats.silent_ranks) == set(BOTH)


def test_the_wait_for_the_root_cause_does_not_count_the_suspension():
    machine = make_machine()
    machine.handle(Failed(0, is_secondary=True), 1.0)
    assert machine.deadline == 1.0 + ROOT_CAUSE_WAIT_SECONDS
    resume(machine, 1.0, 100.0)
    assert (machine.stage, machine.deadline) == (RunStage.AWAITING_ROOT_CAUSE, 100.0 + ROOT_CAUSE_WAIT_SECONDS)


def test_no_deadline_of_the_end_counts_the_suspension():
    """From the request for stacks, over SIGTERM and SIGKILL, to a rank that SIGKILL does not end."""
    machine = make_machine()
    machine.handle(Interrupted(signal.SIGINT), 1.0)
    resume(machine, 1.0, 101.0)
    assert (machine.stage, machine.deadline) == (RunStage.DUMPING_STACKS, 101.0 + STACK_DUMP_SECONDS)
    for rank in BOTH:
        machine.handle(StackDumped(rank), 101.0)
    resume(machine, 101.0, 201.0)
    assert (machine.stage, machine.deadline) == (RunStage.TERMINATING, 201.0 + GRACE)
    assert machine.handle_deadline(201.0 + GRACE) == [SendSignal(rank, signal.SIGKILL) for rank in BOTH]
    resume(machine, 211.0, 311.0)
    assert machine.handle_deadline(311.0) == []
    assert machine.handle_deadline(311.0 + KILL_SECONDS) == [AbandonRank(0), AbandonRank(1)]


def test_the_time_to_exit_does_not_count_the_suspension():
    machine = make_machine()
    for rank in BOTH:
        machine.handle(Returned(rank), 1.0)
    resume(machine, 1.0, 100.0)
    assert (machine.stage, machine.deadline) == (RunStage.SHUTTING_DOWN, 100.0 + GRACE)


def test_a_machine_without_a_deadline_gets_none():
    machine = make_machine(decide_after=(StopReason.FAILED,))
    resume(machine, 1.0, 100.0)
    assert machine.deadline is None
    machine.handle(Failed(0), 100.0)
    machine.handle(StackDumped(1), 100.0)
    for rank in BOTH:
        machine.handle(Exited(rank), 100.0)
    resume(machine, 100.0, 200.0)
    assert (machine.stage, machine.deadline) == (RunStage.AWAITING_DECISION, None)


def test_the_lease_counts_the_suspension():
    """The other nodes go on without this one."""
    machine = make_machine()
    machine.handle(Lease(stop_at=10.0, kill_at=20.0), 1.0)
    resume(machine, 2.0, 15.0)
    assert machine.handle_deadline(15.0) == [DumpStacks(0), DumpStacks(1)]
    assert machine.stop_reason is StopReason.CANCELLED_BY_JOB
    resume(machine, 15.0, 100.0)
    actions = machine.handle_deadline(100.0)
    assert [action.signum for action in actions if action.rank == 0] == [signal.SIGTERM, signal.SIGCONT, signal.SIGKILL]


@pytest.mark.parametrize("event", [CancelAttempt(), Interrupted(signal.SIGTERM)], ids=repr)
def test_what_came_meanwhile_is_handled_afterwards(event):
    machine = make_machine(timeout=5.0)
    resume(machine, 1.0, 100.0)
    assert machine.handle(event, 100.0) != []
    assert machine.deadline > 100.0


@pytest.mark.parametrize(("opened_at", "closed_at"), [(2.0, 60.0), (0.0, 10.0)])
def test_time_at_a_prompt_and_in_a_suspension_counts_once(opened_at, closed_at):
    machine = make_machine(timeout=5.0)
    machine.handle(SuspendLimits(), opened_at)
    resume(machine, 4.0, 9.0)
    assert machine.deadline is None
    machine.handle(ResumeLimits(), closed_at)
    assert machine.deadline == 5.0 + closed_at - opened_at

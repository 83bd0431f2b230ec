"""Requests to stop in histories of the state machine: the ranks are asked to return, and have a limited time for that."""

import signal

import pytest

from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.machine.transitions import (
    STACK_DUMP_SECONDS,
    DoNotRestart,
    DumpStacks,
    Exited,
    Failed,
    InterruptCause,
    Interrupted,
    Ready,
    RequestExit,
    Restart,
    Resumed,
    ResumeLimits,
    Returned,
    RunStage,
    SendSignal,
    StackDumped,
    StartCall,
    StopReason,
    StopRequested,
    SuspendLimits,
)

BY_SIGNAL = StopRequested("SIGUSR1", signal.SIGUSR1)
BY_CALLER = StopRequested("request_stop()")
LIMIT = 60.0


def running_machine(*, stop_timeout=LIMIT, **more):
    machine = StateMachine(range(2), now=0.0, grace_period=10.0, stop_timeout=stop_timeout, **more)
    machine.handle(StartCall(started_at=0.0), 0.0)
    for rank in range(2):
        machine.handle(Ready(rank), 0.0)
    return machine


@pytest.mark.parametrize("request_", [BY_SIGNAL, BY_CALLER])
def test_ranks_that_return_have_succeeded(request_):
    machine = running_machine()
    assert machine.handle(request_, 1.0) == []
    assert (machine.stop_request, machine.deadline) == (request_, 1.0 + LIMIT)
    assert machine.handle(Returned(0), 2.0) == []
    assert machine.handle(Returned(1), 3.0) == [RequestExit(0), RequestExit(1)]
    assert machine.stop_reason is StopReason.SUCCEEDED
    assert machine.signum is None


def test_there_may_be_no_limit():
    machine = running_machine(stop_timeout=None)
    machine.handle(BY_SIGNAL, 1.0)
    assert machine.deadline is None


def test_the_first_request_counts():
    machine = running_machine()
    machine.handle(BY_SIGNAL, 1.0)
    machine.handle(BY_CALLER, 5.0)
    assert (machine.stop_request, machine.deadline) == (BY_SIGNAL, 1.0 + LIMIT)


def test_ranks_that_are_late_are_stopped_as_by_the_signal():
    machine = running_machine()
    machine.handle(BY_SIGNAL, 1.0)
    assert machine.handle_deadline(1.0 + LIMIT) == [DumpStacks(0), DumpStacks(1)]
    machine.handle(StackDumped(0), 61.1)
    assert SendSignal(0, signal.SIGTERM) in machine.handle(StackDumped(1), 61.1)
    assert (machine.stop_reason, machine.signum) == (StopReason.INTERRUPTED, signal.SIGUSR1)
    assert machine.interrupt_cause is InterruptCause.STOP_TIMEOUT
    assert machine.is_stop_overdue


def test_ranks_that_are_late_have_exceeded_a_timeout_if_there_was_no_signal():
    machine = running_machine()
    machine.handle(BY_CALLER, 1.0)
    machine.handle_deadline(1.0 + LIMIT)
    assert (machine.stop_reason, machine.signum, machine.is_stop_overdue) == (StopReason.TIMED_OUT, None, True)


def test_a_signal_that_is_not_a_request_stops_the_ranks_at_once():
    machine = running_machine()
    machine.handle(BY_SIGNAL, 1.0)
    machine.handle(Interrupted(signal.SIGTERM), 2.0)
    assert SendSignal(0, signal.SIGTERM) in machine.handle_deadline(2.0 + STACK_DUMP_SECONDS)


def fail(machine, now):
    machine.handle(Failed(0), now)
    machine.handle(StackDumped(1), now)
    for rank in range(2):
        machine.handle(Exited(rank), now)
    assert machine.stage is RunStage.AWAITING_DECISION


def test_a_request_after_a_failure_is_the_end():
    machine = running_machine(decide_after=(StopReason.FAILED,))
    fail(machine, 1.0)
    assert machine.handle(BY_SIGNAL, 2.0) == []
    assert (machine.stage, machine.stop_reason) == (RunStage.FINISHED, StopReason.FAILED)
    assert machine.interrupt_cause is InterruptCause.STOP_REQUEST
    assert machine.handle(Restart(0), 3.0) == []


def test_a_request_of_the_job_after_a_failure_ends_nothing():
    """On several nodes the leader decides."""
    machine = running_machine(decide_after=(StopReason.FAILED,))
    fail(machine, 1.0)
    machine.handle(StopRequested("SIGUSR1", is_from_job=True), 2.0)
    assert machine.stage is RunStage.AWAITING_DECISION
    machine.handle(DoNotRestart(0), 3.0)
    assert machine.stage is RunStage.FINISHED


def test_an_idle_group_ignores_a_request():
    machine = StateMachine(range(2), now=0.0, grace_period=10.0, stop_timeout=LIMIT, keep_ranks=True)
    for rank in range(2):
        machine.handle(Ready(rank), 0.0)
    machine.handle(BY_CALLER, 1.0)
    assert (machine.stop_request, machine.deadline) == (None, None)


def test_the_next_call_knows_nothing_of_the_request():
    machine = running_machine(keep_ranks=True)
    machine.handle(BY_CALLER, 1.0)
    for rank in range(2):
        machine.handle(Returned(rank), 2.0)
    machine.handle(StartCall(started_at=3.0), 3.0)
    assert (machine.stop_request, machine.deadline) == (None, None)


def test_a_prompt_of_the_debugger_extends_the_limit():
    machine = running_machine()
    machine.handle(BY_CALLER, 1.0)
    machine.handle(SuspendLimits(), 2.0)
    assert machine.deadline is None
    machine.handle(ResumeLimits(), 102.0)
    assert machine.deadline == 101.0 + LIMIT


def test_a_suspension_extends_the_limit():
    machine = running_machine()
    machine.handle(BY_CALLER, 1.0)
    machine.handle(Resumed(suspended_at=2.0), 102.0)
    assert machine.deadline == 101.0 + LIMIT

"""Limits in histories of the state machine while a prompt of a debugger is open."""

import signal

from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.machine.transitions import (
    STACK_DUMP_SECONDS,
    CollectivesMismatched,
    DumpStacks,
    Failed,
    HeartbeatRead,
    Interrupted,
    ReadHeartbeat,
    Ready,
    ResumeLimits,
    Returned,
    RunStage,
    SendSignal,
    StartCall,
    StopReason,
    SuspendLimits,
)


def machine_with_limits(*, timeout=None, heartbeat_timeout=None, keep_ranks=False, ready=2):
    machine = StateMachine(
        range(2), now=0.0, grace_period=10.0, start_timeout=30.0, heartbeat_timeout=heartbeat_timeout, keep_ranks=keep_ranks
    )
    machine.handle(StartCall(started_at=0.0, timeout=timeout), 0.0)
    for rank in range(ready):
        machine.handle(Ready(rank), 0.0)
    return machine


def test_the_timeout_goes_on_by_what_was_left_of_it():
    machine = machine_with_limits(timeout=5.0)
    machine.handle(SuspendLimits(), 2.0)
    assert machine.deadline is None
    assert machine.handle_deadline(100.0) == []
    machine.handle(ResumeLimits(), 100.0)
    assert machine.deadline == 103.0
    assert machine.handle_deadline(103.0) == [DumpStacks(0), DumpStacks(1)]


def test_a_mismatch_of_collectives_ends_the_call():
    machine = machine_with_limits()
    assert machine.handle(CollectivesMismatched(), 1.0) == [DumpStacks(0), DumpStacks(1)]
    assert machine.stop_reason is StopReason.FAILED
    assert machine.handle(CollectivesMismatched(), 1.1) == []


def test_a_mismatch_does_not_close_a_prompt():
    machine = machine_with_limits()
    machine.handle(SuspendLimits(), 1.0)
    assert machine.handle(CollectivesMismatched(), 2.0) == []
    machine.handle(ResumeLimits(), 3.0)
    assert machine.handle(CollectivesMismatched(), 4.0) == [DumpStacks(0), DumpStacks(1)]


def test_a_second_prompt_before_the_first_is_closed_changes_nothing():
    machine = machine_with_limits(timeout=5.0)
    machine.handle(SuspendLimits(), 2.0)
    machine.handle(SuspendLimits(), 50.0)
    machine.handle(ResumeLimits(), 100.0)
    machine.handle(ResumeLimits(), 101.0)
    assert machine.deadline == 103.0


def test_the_start_timeout_stands_still():
    machine = machine_with_limits(ready=1)
    machine.handle(SuspendLimits(), 10.0)
    assert machine.deadline is None
    machine.handle(ResumeLimits(), 100.0)
    assert machine.deadline == 120.0


def test_silence_counts_from_the_end_of_the_prompt():
    machine = machine_with_limits(heartbeat_timeout=10.0)
    machine.handle(SuspendLimits(), 1.0)
    machine.handle(ResumeLimits(), 100.0)
    assert machine.deadline == 105.0
    assert machine.handle_deadline(105.0) == [ReadHeartbeat(0), ReadHeartbeat(1)]
    for rank in range(2):
        machine.handle(HeartbeatRead(rank, beat_at=0.5), 105.0)
    assert machine.heartbeats.silent_ranks == {}
    assert machine.deadline == 106.0
    assert machine.stage is RunStage.RUNNING


def test_a_heartbeat_that_is_read_while_a_prompt_is_open_blames_nobody():
    machine = machine_with_limits(heartbeat_timeout=10.0)
    assert machine.handle_deadline(5.0) == [ReadHeartbeat(0), ReadHeartbeat(1)]
    machine.handle(SuspendLimits(), 5.0)
    for rank in range(2):
        assert machine.handle(HeartbeatRead(rank, beat_at=0.5), 60.0) == []
    assert machine.heartbeats.silent_ranks == {}


def test_the_wait_for_the_root_cause_stands_still():
    machine = machine_with_limits(keep_ranks=True)
    machine.handle(SuspendLimits(), 1.0)
    machine.handle(Failed(0), 1.0)
    assert (machine.stage, machine.deadline) == (RunStage.AWAITING_ROOT_CAUSE, None)
    machine.handle(ResumeLimits(), 100.0)
    assert machine.deadline == 101.0


def test_ranks_that_are_stopped_have_only_their_grace_period():
    machine = machine_with_limits(timeout=5.0)
    machine.handle(SuspendLimits(), 1.0)
    machine.handle(Interrupted(signal.SIGTERM), 2.0)
    assert machine.deadline == 2.0 + STACK_DUMP_SECONDS
    assert SendSignal(0, signal.SIGTERM) in machine.handle_deadline(2.2)
    assert machine.deadline == 12.2


def test_a_call_that_starts_while_a_prompt_is_open_has_its_whole_timeout():
    machine = machine_with_limits(keep_ranks=True)
    machine.handle(SuspendLimits(), 1.0)
    for rank in range(2):
        machine.handle(Returned(rank), 2.0)
    machine.handle(StartCall(started_at=50.0, timeout=5.0), 50.0)
    machine.handle(ResumeLimits(), 60.0)
    assert machine.deadline == 65.0

"""Heartbeats in histories of the state machine: ranks that are late, silent, or were only suspended."""

from mpwatch import WorkerState
from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.machine.transitions import (
    ROOT_CAUSE_WAIT_SECONDS,
    SUSPENDED_SECONDS,
    DumpStacks,
    Failing,
    HeartbeatRead,
    ReadHeartbeat,
    Ready,
    RequestCollectives,
    Returned,
    StartCall,
    StopReason,
)

GRACE = 10.0
LIMIT = 10.0


def read_heartbeats(machine, now, heartbeats):
    """Let the machine read these heartbeats. Return the actions that follow."""
    assert machine.handle_deadline(now) == [ReadHeartbeat(rank) for rank in heartbeats]
    *_, actions = [machine.handle(HeartbeatRead(rank, beat_at=beat_at), now) for rank, beat_at in heartbeats.items()]
    return actions


def running_machine(n=2):
    machine = StateMachine(range(n), now=0.0, grace_period=GRACE, heartbeat_timeout=LIMIT)
    assert machine.handle(StartCall(started_at=0.0), 0.0) == []
    for rank in range(n):
        machine.handle(Ready(rank), 0.0)
    return machine


def test_heartbeats_are_read_when_a_rank_may_have_been_silent_for_half_of_the_limit():
    machine = running_machine()
    assert machine.deadline == 5.0
    assert read_heartbeats(machine, 5.0, {0: 3.0, 1: 4.0}) == []
    assert (machine.deadline, machine.heartbeats.late_ranks) == (8.0, {})
    assert read_heartbeats(machine, 8.0, {0: 7.5, 1: 7.9}) == []
    assert machine.deadline == 12.5


def test_a_late_rank_makes_the_group_unhealthy_until_its_next_heartbeat():
    machine = running_machine()
    assert machine.state is WorkerState.HEALTHY
    assert read_heartbeats(machine, 5.0, {0: 0.0, 1: 4.0}) == []
    assert (machine.heartbeats.late_ranks, machine.state) == ({0: 0.0}, WorkerState.UNHEALTHY)
    assert machine.deadline == 6.0  # all are read more often now
    assert read_heartbeats(machine, 6.0, {0: 0.0, 1: 5.9}) == []
    assert machine.state is WorkerState.UNHEALTHY
    assert read_heartbeats(machine, 7.0, {0: 6.5, 1: 6.9}) == []
    assert (machine.heartbeats.late_ranks, machine.state, machine.deadline) == ({}, WorkerState.HEALTHY, 11.5)


def test_a_late_rank_that_returns_is_no_longer_late():
    machine = running_machine()
    read_heartbeats(machine, 5.0, {0: 0.0, 1: 4.0})
    machine.handle(Returned(0), 5.5)
    assert (machine.heartbeats.late_ranks, machine.state) == ({}, WorkerState.HEALTHY)


def test_the_heartbeat_of_a_late_rank_is_read_again_when_the_limit_is_over():
    machine = running_machine()
    assert read_heartbeats(machine, 5.0, {0: -4.5, 1: 4.0}) == []
    assert machine.deadline == 5.5


def test_silence_is_a_failure_after_two_readings():
    machine = running_machine()
    assert read_heartbeats(machine, 5.0, {0: 0.0, 1: 0.1}) == []
    machine.heartbeats.due_at = 10.1  # as if they had been read until then
    assert read_heartbeats(machine, 10.1, {0: 0.0, 1: 0.1}) == []
    assert machine.deadline == 11.1
    assert read_heartbeats(machine, 11.1, {0: 0.0, 1: 0.1}) == [DumpStacks(0), DumpStacks(1)]
    assert (machine.heartbeats.silent_ranks, machine.stop_reason, machine.stopped_at) == (
        {0: 0.0, 1: 0.1},
        StopReason.FAILED,
        11.1,
    )
    assert machine.state is WorkerState.UNHEALTHY


def test_a_rank_with_a_new_heartbeat_was_not_silent():
    machine = running_machine()
    assert read_heartbeats(machine, 5.0, {0: -5.0, 1: 4.0}) == []
    assert machine.deadline == 6.0
    assert read_heartbeats(machine, 6.0, {0: 5.2, 1: 5.2}) == []
    assert (machine.heartbeats.silent_ranks, machine.deadline) == ({}, 10.2)


def test_a_rank_without_a_first_heartbeat_has_no_limit():
    machine = running_machine()
    assert read_heartbeats(machine, 5.0, {0: None, 1: None}) == []
    assert machine.deadline == 10.0
    assert read_heartbeats(machine, 10.0, {0: None, 1: 9.0}) == []
    assert machine.deadline == 14.0


def test_only_heartbeats_of_running_ranks_are_read():
    machine = running_machine(3)
    machine.handle(Returned(0), 1.0)
    assert read_heartbeats(machine, 5.0, {1: 4.0, 2: 4.0}) == []
    machine.handle(Failing(1), 6.0)
    assert machine.deadline == 6.0 + ROOT_CAUSE_WAIT_SECONDS


def test_the_silence_of_a_rank_that_has_returned_is_no_first_reading_of_another_rank():
    machine = StateMachine(range(2), now=0.0, grace_period=GRACE, heartbeat_timeout=LIMIT)
    machine.handle(StartCall(started_at=0.0), 0.0)
    machine.handle(Ready(0), 0.0)
    assert read_heartbeats(machine, 5.0, {0: -5.0}) == []
    machine.handle(Returned(0), 5.2)
    assert machine.handle_deadline(6.0) == []
    machine.handle(Ready(1), 6.0)
    assert machine.deadline == 11.0
    assert read_heartbeats(machine, 11.0, {1: 1.0}) == []
    assert read_heartbeats(machine, 12.0, {1: 1.0}) == [DumpStacks(1), RequestCollectives(0)]


def test_a_machine_that_was_suspended_blames_no_rank():
    machine = running_machine()
    late = 5.0 + SUSPENDED_SECONDS + 0.1
    assert machine.handle_deadline(late) == []
    assert machine.deadline == late + LIMIT
    assert read_heartbeats(machine, late + LIMIT, {0: late + 9.0, 1: 0.0}) == []
    assert read_heartbeats(machine, late + LIMIT + 1, {0: late + 9.0, 1: 0.0}) == [DumpStacks(0), DumpStacks(1)]


def test_readings_that_are_always_late_excuse_a_silent_rank_for_a_limited_time_only():
    """A busy program reads late all the time, although its ranks run."""
    machine, now, actions = running_machine(1), 0.0, []
    while not actions and now < 6 * LIMIT:
        now = machine.deadline + 5 * SUSPENDED_SECONDS
        actions = [machine.handle(HeartbeatRead(read.rank, beat_at=0.0), now) for read in machine.handle_deadline(now)]
        actions = [action for found in actions for action in found]
    assert (actions, machine.stop_reason) == ([DumpStacks(0)], StopReason.FAILED)


def test_a_heartbeat_renews_the_patience_with_readings_that_are_late():
    machine = running_machine(1)
    for _ in range(10):
        late = machine.deadline + 1.1 * SUSPENDED_SECONDS
        assert machine.handle_deadline(late) == []
        assert machine.deadline == late + LIMIT
        assert read_heartbeats(machine, late + LIMIT, {0: late + LIMIT - 0.1}) == []

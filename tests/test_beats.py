"""Heartbeats as the pure machine hears them: who is late, who is silent, and who was only suspended."""

from mpwatch import WorkerState
from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.machine.transitions import (
    LAST_CALL_SECONDS,
    LATE_SECONDS,
    DumpStacks,
    Failing,
    HeartbeatRead,
    ReadHeartbeat,
    Ready,
    Returned,
    StartCall,
    StopReason,
)

GRACE = 10.0
LIMIT = 10.0


def feel(it, now, heartbeats):
    """The pulses of these ranks are felt, and what is done then."""
    assert it.expire(now) == [ReadHeartbeat(rank) for rank in heartbeats]
    *_, actions = [it.handle(HeartbeatRead(rank, beat_at=beat), now) for rank, beat in heartbeats.items()]
    return actions


def with_pulses(n=2):
    it = StateMachine(range(n), now=0.0, grace_period=GRACE, heartbeat_timeout=LIMIT)
    assert it.handle(StartCall(started_at=0.0), 0.0) == []
    for rank in range(n):
        it.handle(Ready(rank), 0.0)
    return it


def test_pulses_are_felt_when_somebody_may_have_been_silent_for_half_of_the_limit():
    it = with_pulses()
    assert it.deadline == 5.0
    assert feel(it, 5.0, {0: 3.0, 1: 4.0}) == []
    assert (it.deadline, it.heartbeats.late) == (8.0, {})
    assert feel(it, 8.0, {0: 7.5, 1: 7.9}) == []
    assert it.deadline == 12.5


def test_a_rank_that_is_late_makes_the_group_unhealthy_until_it_beats_again():
    it = with_pulses()
    assert it.state is WorkerState.HEALTHY
    assert feel(it, 5.0, {0: 0.0, 1: 4.0}) == []
    assert (it.heartbeats.late, it.state) == ({0: 0.0}, WorkerState.UNHEALTHY)
    assert it.deadline == 6.0  # all are felt oftener now
    assert feel(it, 6.0, {0: 0.0, 1: 5.9}) == []
    assert it.state is WorkerState.UNHEALTHY
    assert feel(it, 7.0, {0: 6.5, 1: 6.9}) == []
    assert (it.heartbeats.late, it.state, it.deadline) == ({}, WorkerState.HEALTHY, 11.5)


def test_a_late_rank_that_returns_is_late_no_more():
    it = with_pulses()
    feel(it, 5.0, {0: 0.0, 1: 4.0})
    it.handle(Returned(0), 5.5)
    assert (it.heartbeats.late, it.state) == ({}, WorkerState.HEALTHY)


def test_a_late_rank_is_felt_again_no_later_than_it_is_silent():
    it = with_pulses()
    assert feel(it, 5.0, {0: -4.5, 1: 4.0}) == []
    assert it.deadline == 5.5


def test_silence_is_a_failure_when_it_has_been_seen_twice_and_all_are_looked_at():
    it = with_pulses()
    assert feel(it, 5.0, {0: 0.0, 1: 0.1}) == []
    it.heartbeats.due_at = 10.1  # as if they had been felt until then
    assert feel(it, 10.1, {0: 0.0, 1: 0.1}) == []
    assert it.deadline == 11.1
    assert feel(it, 11.1, {0: 0.0, 1: 0.1}) == [DumpStacks(0), DumpStacks(1)]
    assert (it.heartbeats.silent, it.verdict, it.stopped_at) == ({0: 0.0, 1: 0.1}, StopReason.FAILED, 11.1)
    assert it.state is WorkerState.UNHEALTHY


def test_a_rank_that_beats_again_was_not_silent():
    it = with_pulses()
    assert feel(it, 5.0, {0: -5.0, 1: 4.0}) == []
    assert it.deadline == 6.0
    assert feel(it, 6.0, {0: 5.2, 1: 5.2}) == []
    assert (it.heartbeats.silent, it.deadline) == ({}, 10.2)


def test_a_rank_that_has_never_beaten_is_felt_again_and_has_no_limit():
    it = with_pulses()
    assert feel(it, 5.0, {0: None, 1: None}) == []
    assert it.deadline == 10.0
    assert feel(it, 10.0, {0: None, 1: 9.0}) == []
    assert it.deadline == 14.0


def test_only_ranks_at_work_have_a_pulse():
    it = with_pulses(3)
    it.handle(Returned(0), 1.0)
    assert feel(it, 5.0, {1: 4.0, 2: 4.0}) == []
    it.handle(Failing(1), 6.0)
    assert it.deadline == 6.0 + LAST_CALL_SECONDS


def test_a_silence_that_ended_with_its_rank_s_work_is_no_first_look_at_another_s():
    it = StateMachine(range(2), now=0.0, grace_period=GRACE, heartbeat_timeout=LIMIT)
    it.handle(StartCall(started_at=0.0), 0.0)
    it.handle(Ready(0), 0.0)
    assert feel(it, 5.0, {0: -5.0}) == []
    it.handle(Returned(0), 5.2)
    assert it.expire(6.0) == []
    it.handle(Ready(1), 6.0)
    assert it.deadline == 11.0
    assert feel(it, 11.0, {1: 1.0}) == []
    assert feel(it, 12.0, {1: 1.0}) == [DumpStacks(1)]


def test_a_machine_that_was_not_called_in_time_blames_nobody():
    it = with_pulses()
    late = 5.0 + LATE_SECONDS + 0.1
    assert it.expire(late) == []
    assert it.deadline == late + LIMIT
    assert feel(it, late + LIMIT, {0: late + 9.0, 1: 0.0}) == []
    assert feel(it, late + LIMIT + 1, {0: late + 9.0, 1: 0.0}) == [DumpStacks(0), DumpStacks(1)]

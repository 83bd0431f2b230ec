"""Ranks that are started again, as the pure machine has it: histories, without a process."""

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
PATIENCE = 300.0


def at_work(n=2, timeout=None, **more):
    it = StateMachine(range(n), now=0.0, grace_period=GRACE, start_timeout=PATIENCE, judged=(StopReason.FAILED,), **more)
    assert it.handle(StartCall(started_at=0.0, timeout=timeout), 0.0) == []
    become_ready(it, 0.0)
    return it


def become_ready(it, now):
    for rank in list(it.phase_table.phases):
        assert it.handle(Ready(rank, generation=it.generation), now) == [CallRank(rank)]


def die(it, now):
    for rank in (
        it.phase_table.those(RankPhase.TERMINATING)
        + it.phase_table.those(RankPhase.KILLED)
        + it.phase_table.those(RankPhase.RUNNING)
    ):
        it.handle(Exited(rank, generation=it.generation), now)


def failed(n=2, **more):
    """All are gone, since rank 0 has failed."""
    it = at_work(n, **more)
    it.handle(Exited(0), 1.0)
    for rank in range(1, n):
        it.handle(StackDumped(rank), 1.0)
    assert it.stage is (RunStage.TERMINATING if n > 1 else RunStage.AWAITING_DECISION)
    die(it, 1.1)
    assert (it.stage, it.verdict, it.deadline) == (RunStage.AWAITING_DECISION, StopReason.FAILED, None)
    return it


def started_again(it, now):
    generation = it.generation
    assert it.handle(Restart(0, generation=generation), now) == [StartRank(rank) for rank in it.phase_table.phases]
    assert (it.stage, it.generation) == (RunStage.RUNNING, generation + 1)


def test_a_run_that_may_not_be_restarted_is_over():
    it = at_work(1)
    it._judged_after = ()
    it.handle(Exited(0), 1.0)
    assert it.stage is RunStage.FINISHED


def test_ranks_are_started_again_when_all_are_gone():
    it = failed()
    assert it.state is WorkerState.UNHEALTHY
    assert it.handle(Restart(0, generation=0), 6.0) == [StartRank(0), StartRank(1)]
    assert (it.generation, it.stage, it.verdict, it.stopped_at) == (1, RunStage.RUNNING, None, None)
    assert (it.state, it.deadline) == (WorkerState.INIT, 6.0 + PATIENCE)
    become_ready(it, 7.0)
    assert (it.state, it.deadline) == (WorkerState.HEALTHY, None)
    it.handle(Returned(0, generation=1), 8.0)
    assert it.handle(Returned(1, generation=1), 8.0) == [RequestExit(0), RequestExit(1)]


def test_what_comes_of_an_earlier_life_changes_nothing():
    it = failed()
    started_again(it, 2.0)
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
    for late in (*events, Restart(0)):
        assert it.handle(late, 2.0) == []
    assert set(it.phase_table.phases.values()) == {RankPhase.STARTING}
    assert it.stage is RunStage.RUNNING


def test_ranks_that_are_not_worth_another_try_are_over():
    it = failed()
    assert it.handle(DoNotRestart(0), 2.0) == []
    assert (it.stage, it.verdict, it.deadline) == (RunStage.FINISHED, StopReason.FAILED, None)


def test_a_second_failure_while_the_others_are_being_stopped_belongs_to_the_same_attempt():
    it = at_work(3)
    it.handle(Failed(0), 1.0)
    it.handle(StackDumped(1), 1.0)
    it.handle(StackDumped(2), 1.0)
    assert it.handle(Failed(1), 1.1) == [RequestExit(1)]
    it.handle(Exited(2), 1.1)
    assert it.stage is RunStage.TERMINATING
    it.handle(Exited(0), 1.2)
    it.handle(Exited(1), 1.2)
    assert it.stage is RunStage.AWAITING_DECISION


def test_ranks_that_die_while_they_are_started_again_have_failed_again():
    it = failed()
    started_again(it, 2.0)
    it.handle(Ready(0, generation=1), 2.5)
    it.handle(Exited(1, generation=1), 2.6)
    it.handle(StackDumped(0, generation=1), 2.6)
    it.handle(Exited(0, generation=1), 2.7)
    assert (it.stage, it.verdict) == (RunStage.AWAITING_DECISION, StopReason.FAILED)
    started_again(it, 3.0)


def test_ranks_that_do_not_come_up_again_have_failed():
    it = failed()
    started_again(it, 2.0)
    it.handle(Ready(0, generation=1), 2.5)
    assert it.expire(2.0 + PATIENCE) == [DumpStacks(0)]
    assert it.never_ready == [1]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_run_that_nobody_is_left_of(signum):
    it = failed()
    assert it.handle(Interrupted(signum), 3.0) == []
    assert (it.stage, it.verdict, it.signum, it.deadline) == (RunStage.FINISHED, StopReason.FAILED, signum, None)
    assert it.handle(Restart(0), 4.0) == []  # which was on its way
    assert it.handle(DoNotRestart(0), 4.0) == []
    assert it.stage is RunStage.FINISHED


def test_after_an_interrupt_nothing_is_started_again():
    it = at_work(1)
    it.handle(Interrupted(signal.SIGTERM), 1.0)
    it.handle(Exited(0), 1.1)
    assert it.stage is RunStage.FINISHED


def test_an_interrupt_while_failed_ranks_are_being_stopped_leaves_no_restart():
    it = at_work(2)
    it.handle(Exited(0), 1.0)
    it.handle(StackDumped(1), 1.0)
    it.handle(Interrupted(signal.SIGINT), 1.1)
    die(it, 1.2)
    assert (it.stage, it.verdict) == (RunStage.FINISHED, StopReason.FAILED)


def test_the_timeout_goes_on_through_restarts():
    it = failed(1, timeout=20.0)
    started_again(it, 7.0)
    become_ready(it, 8.0)
    assert it.deadline == 20.0
    assert it.expire(20.0) == [DumpStacks(0)]
    it.handle(StackDumped(0, generation=1), 20.0)
    die(it, 20.1)
    assert (it.stage, it.verdict) == (RunStage.FINISHED, StopReason.TIMED_OUT)


def test_ranks_that_cannot_be_killed_are_not_started_again():
    it = at_work(2)
    it.handle(Exited(0), 1.0)
    it.handle(StackDumped(1), 1.0)
    it.expire(1.0 + GRACE)
    assert it.expire(1.0 + GRACE + KILL_SECONDS) == [AbandonRank(1)]
    assert it.stage is RunStage.FINISHED


def test_a_new_generation_has_done_nothing_wrong_yet():
    it = failed(1, heartbeat_timeout=10.0)
    started_again(it, 7.0)
    assert (it.heartbeats.silent, it.heartbeats.late, it.never_ready, it.lingering, it.deadline) == ({}, {}, [], [], 12.0)
    become_ready(it, 8.0)
    assert it.expire(12.0) == [ReadHeartbeat(0)]


def test_ranks_are_looked_at_and_stopped_when_others_have_failed_for_good():
    it = at_work(1)
    assert it.handle(Abort(), 1.0) == [DumpStacks(0)]
    assert it.handle(StackDumped(0), 1.1) == [SendSignal(0, signal.SIGTERM), SendSignal(0, signal.SIGCONT)]
    it.handle(Exited(0), 1.2)
    assert (it.stage, it.verdict) == (RunStage.FINISHED, StopReason.INTERRUPTED)


def test_a_rank_that_has_returned_may_end_when_others_have_failed_for_good():
    it = at_work(1)
    it.handle(Returned(0), 1.0)
    assert it.handle(Abort(), 1.1) == []
    it.handle(Exited(0), 1.2)
    assert (it.stage, it.verdict) == (RunStage.FINISHED, StopReason.SUCCEEDED)


@pytest.mark.parametrize("event", [Abort(), Shutdown()])
def test_ranks_that_wait_to_be_started_again_are_over_when_nobody_wants_them(event):
    it = failed(1)
    assert it.handle(event, 3.0) == []
    assert (it.stage, it.verdict) == (RunStage.FINISHED, StopReason.FAILED)


def test_ranks_that_were_ending_when_others_had_failed_for_good_are_not_started_again():
    it = at_work(1)
    assert it.handle(Failed(0), 1.0)
    assert it.handle(Abort(), 1.1) == []
    it.handle(Exited(0), 1.2)
    assert it.stage is RunStage.AWAITING_DECISION
    assert it.handle(Restart(0), 1.3) == []
    assert (it.stage, it.verdict) == (RunStage.FINISHED, StopReason.FAILED)


def test_ranks_at_work_are_not_to_be_judged():
    it = at_work(1)
    with pytest.raises(IllegalEventError, match=r"DoNotRestart.* in stage RUNNING"):
        it.handle(DoNotRestart(0), 1.0)


def test_a_rank_that_lingers_after_a_success_makes_nobody_unhealthy():
    it = at_work(1)
    it.handle(Returned(0), 1.0)
    states = [it.state]
    it.expire(1.0 + GRACE)
    states.append(it.state)
    it.handle(Exited(0), 12.0)
    assert [*states, it.state] == [WorkerState.HEALTHY] * 3


def test_two_hundred_restarts():
    it = at_work(8)
    for n in range(200):
        it.handle(Exited(3, generation=n), float(n))
        for rank in it.phase_table.those(RankPhase.RUNNING):
            it.handle(StackDumped(rank, generation=n), float(n))
        die(it, float(n))
        started_again(it, float(n))
        become_ready(it, float(n))
    assert it.generation == 200

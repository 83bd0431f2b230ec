"""Written histories of the state machine: who is stopped by what, in which order, and by when. Each takes microseconds."""

import signal
import time
from collections import Counter
from itertools import permutations

import pytest

from mpwatch import WorkerState
from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.machine.transitions import (
    KILL_SECONDS,
    ROOT_CAUSE_WAIT_SECONDS,
    STACK_DUMP_SECONDS,
    SUSPENDED_SECONDS,
    AbandonRank,
    Abort,
    CallRank,
    CancelAttempt,
    CollectivesMismatched,
    DetailsReceived,
    DoNotRestart,
    DumpStacks,
    Exited,
    Failed,
    Failing,
    HeartbeatRead,
    IllegalEventError,
    InterruptCause,
    Interrupted,
    Lease,
    ReadHeartbeat,
    Ready,
    RequestCollectives,
    RequestExit,
    Restart,
    Resumed,
    ResumeLimits,
    Returned,
    RunStage,
    SendSignal,
    Shutdown,
    StackDumped,
    StartCall,
    StartRank,
    StopReason,
    StopRequested,
    SuspendLimits,
)

GRACE, START_TIMEOUT, LIMIT = 10.0, 30.0, 10.0
CTRL_C, TERM = Interrupted(signal.SIGINT), Interrupted(signal.SIGTERM)
BY_SIGNAL, BY_CALLER = StopRequested("SIGUSR1", signal.SIGUSR1), StopRequested("request_stop()")
RESTARTABLE = {"decide_after": (StopReason.FAILED,)}


def running_machine(n=2, *, timeout=None, ready=None, **options):
    """Return a machine with a call. So many of its ranks are ready; all of them by default."""
    machine = StateMachine(range(n), now=0.0, grace_period=GRACE, start_timeout=START_TIMEOUT, **options)
    assert machine.handle(StartCall(0.0, timeout), 0.0) == []
    for rank in range(n if ready is None else ready):
        assert machine.handle(Ready(rank), 0.0) == [CallRank(rank)]
    return machine


def handle(machine, now, *events):
    """Return all actions that follow from the events, or from the deadline if there are none."""
    if not events:
        return machine.handle_deadline(now)
    return [action for event in events for action in machine.handle(event, now)]


def after(now, *events, **options):
    machine = running_machine(**options)
    handle(machine, now, *events)
    return machine


def terminate(*ranks):
    return [SendSignal(rank, number) for rank in ranks for number in (signal.SIGTERM, signal.SIGCONT)]


def kill(*ranks):
    return [SendSignal(rank, signal.SIGKILL) for rank in ranks]


# --- success and failure


def test_ranks_that_have_returned_are_asked_to_exit_together():
    machine = running_machine(3)
    assert handle(machine, 1.0, Returned(2), Exited(2), Returned(0)) == []
    assert handle(machine, 1.0, Returned(1)) == [RequestExit(0), RequestExit(1)]
    handle(machine, 2.0, Exited(0), Exited(1))
    assert (machine.stage, machine.stop_reason, machine.deadline) == (RunStage.FINISHED, StopReason.SUCCEEDED, None)


def test_a_rank_that_does_not_exit_after_all_have_returned_is_stopped_and_the_run_has_succeeded():
    machine = after(1.0, Returned(0), Returned(1), Exited(0))
    assert handle(machine, 1.0 + GRACE) == terminate(1)
    handle(machine, 11.1, Exited(1))
    assert (machine.overdue_exits, machine.stop_reason, machine.state) == ([1], StopReason.SUCCEEDED, WorkerState.HEALTHY)


def test_a_failure_stops_all_ranks_when_they_have_said_where_they_are():
    machine = after(0.5, Returned(2), n=3)
    assert handle(machine, 1.0, Failed(1)) == [DumpStacks(0), RequestCollectives(2)]
    assert handle(machine, 1.1, StackDumped(0)) == []
    assert handle(machine, 1.1, StackDumped(2)) == [
        *terminate(0),
        *(RequestExit(1), *terminate(1)),
        *(RequestExit(2), *terminate(2)),
    ]
    assert machine.stopped_at == 1.0  # what ranks do after the request for stacks may be a consequence of it
    handle(machine, 2.0, *map(Exited, range(3)))
    assert (machine.stage, machine.stop_reason) == (RunStage.FINISHED, StopReason.FAILED)


@pytest.mark.parametrize(
    ("now", "events"),
    [
        (1.1, [StackDumped(0)]),
        (1.1, [Failed(0)]),
        (1.1, [Failing(0)]),
        (1.1, [Exited(0)]),
        (1.1, [Returned(0), StackDumped(0)]),  # what a rank that has returned called is asked separately
        (1.0 + STACK_DUMP_SECONDS, []),
    ],
)
def test_the_stacks_of_a_rank_are_waited_for_until_it_reports_or_a_deadline(now, events):
    machine = after(1.0, Failed(1))
    assert handle(machine, 1.05, *events[:-1]) == [RequestCollectives(0)] * (len(events) - 1 if events else 0)
    assert SendSignal(1, signal.SIGTERM) in handle(machine, now, *events[-1:])
    assert handle(machine, now, *([StackDumped(0)] if not events else [])) == []  # stacks that come too late


def test_ranks_are_terminated_killed_and_abandoned_once():
    machine = after(1.0, Failed(0), StackDumped(1))
    assert handle(machine, 1.0 + GRACE - 0.001) == []
    assert handle(machine, 1.0 + GRACE) == kill(0, 1)
    handle(machine, 11.5, Exited(0))
    assert handle(machine, 1.0 + GRACE + KILL_SECONDS) == [AbandonRank(1)]
    assert (machine.stage, machine.deadline) == (RunStage.FINISHED, None)


@pytest.mark.parametrize("first", [Failed(0, is_secondary=True), Failing(0)], ids=["secondary", "not reported yet"])
def test_the_root_cause_is_waited_for_until_a_deadline(first):
    machine = after(1.0, first)
    assert (machine.stage, machine.deadline) == (RunStage.AWAITING_ROOT_CAUSE, 1.0 + ROOT_CAUSE_WAIT_SECONDS)
    assert DumpStacks(1) in handle(machine, 1.0 + ROOT_CAUSE_WAIT_SECONDS)
    assert machine.stop_reason is StopReason.FAILED


def test_the_root_cause_or_the_last_answer_ends_the_wait_for_it():
    machine = after(1.0, Failed(0, is_secondary=True), n=3)
    assert handle(machine, 1.5, Failed(2, is_secondary=True)) == []
    assert handle(machine, 1.6, Failed(1)) == [
        action for rank in range(3) for action in (RequestExit(rank), *terminate(rank))
    ]
    machine = after(0.5, Returned(1))
    assert handle(machine, 1.0, Failed(0, is_secondary=True)) == [RequestCollectives(1)]


def test_a_mismatch_of_collectives_ends_the_call_unless_a_prompt_is_open():
    machine = after(1.0, SuspendLimits())
    assert handle(machine, 2.0, CollectivesMismatched(), ResumeLimits()) == []
    assert handle(machine, 3.0, CollectivesMismatched(), CollectivesMismatched()) == [DumpStacks(0), DumpStacks(1)]
    assert machine.stop_reason is StopReason.FAILED


# --- signals to the watcher


def test_ctrl_c_reaches_only_functions_that_run():
    machine = running_machine(3, ready=2)
    handle(machine, 0.5, Returned(1))
    assert handle(machine, 1.0, CTRL_C) == [DumpStacks(0)]
    to_function = [SendSignal(0, signal.SIGINT), SendSignal(0, signal.SIGCONT)]
    assert handle(machine, 1.1, StackDumped(0)) == [*to_function, RequestExit(1), *terminate(1, 2)]
    assert handle(machine, 1.5, Failed(0), Ready(2)) == [RequestExit(0), RequestExit(2)]
    assert (machine.stop_reason, machine.signum) == (StopReason.INTERRUPTED, signal.SIGINT)


@pytest.mark.parametrize(
    ("history", "event", "actions", "stop_reason"),
    [
        ([CTRL_C], CTRL_C, [*terminate(0, 1), *kill(0, 1)], StopReason.INTERRUPTED),
        ([CTRL_C, StackDumped(0), StackDumped(1)], CTRL_C, kill(0, 1), StopReason.INTERRUPTED),
        ([TERM, StackDumped(0)], StackDumped(1), terminate(0, 1), StopReason.INTERRUPTED),
        ([Failed(0), StackDumped(1)], CTRL_C, kill(0, 1), StopReason.FAILED),
        ([CancelAttempt(), StackDumped(0), StackDumped(1)], TERM, [], StopReason.CANCELLED_BY_JOB),
        ([CancelAttempt(), StackDumped(0), StackDumped(1), TERM], TERM, kill(0, 1), StopReason.CANCELLED_BY_JOB),
        ([Returned(0), Returned(1)], CTRL_C, terminate(0, 1), StopReason.SUCCEEDED),
        ([Returned(0), Returned(1), Exited(0), Exited(1)], CTRL_C, [], StopReason.SUCCEEDED),
    ],
)
def test_a_signal_stops_ranks_once_and_then_kills_them(history, event, actions, stop_reason):
    machine = after(1.0, *history)
    assert handle(machine, 1.1, event) == actions
    assert machine.stop_reason is stop_reason


@pytest.mark.parametrize("answers", [(Returned(0), Returned(1)), (Returned(0), Failed(1), DetailsReceived(1))])
def test_ranks_of_a_group_that_answer_to_ctrl_c_stay(answers):
    machine = after(1.0, CTRL_C, *answers, keep_ranks=True)
    assert (machine.stage, machine.stop_reason) == (RunStage.IDLE, StopReason.INTERRUPTED)
    assert handle(machine, 1.2, StackDumped(0), CTRL_C) == []  # late stacks, and a signal without a call
    assert handle(machine, 1.3, Shutdown()) == [RequestExit(0), RequestExit(1)]


# --- limits. Each is reached at a time after second 1.

LIMITS = {
    "timeout": (lambda: running_machine(timeout=5.0), 5.0, StopReason.TIMED_OUT),
    "start_timeout": (lambda: running_machine(ready=1), START_TIMEOUT, StopReason.FAILED),
    "stop_timeout": (lambda: after(1.0, BY_CALLER, stop_timeout=5.0), 6.0, StopReason.TIMED_OUT),
    "root cause": (lambda: after(1.0, Failed(0, is_secondary=True)), 1.0 + ROOT_CAUSE_WAIT_SECONDS, StopReason.FAILED),
}
LIMITS_OF_THE_END = {
    "stacks": (lambda: after(1.0, TERM), 1.0 + STACK_DUMP_SECONDS, StopReason.INTERRUPTED),
    "grace_period": (lambda: after(1.0, TERM, *map(StackDumped, range(2))), 1.0 + GRACE, StopReason.INTERRUPTED),
    "kill": (lambda: after(1.0, CTRL_C, CTRL_C), 1.0 + KILL_SECONDS, StopReason.INTERRUPTED),
    "exit": (lambda: after(1.0, Returned(0), Returned(1)), 1.0 + GRACE, StopReason.SUCCEEDED),
}


@pytest.mark.parametrize(("make", "limit", "stop_reason"), [*LIMITS.values(), *LIMITS_OF_THE_END.values()])
def test_a_limit_that_is_reached_has_a_consequence(make, limit, stop_reason):
    machine = make()
    assert machine.deadline == limit
    assert handle(machine, limit - 0.001) == []
    assert handle(machine, limit) != []
    assert machine.stop_reason is stop_reason


@pytest.mark.parametrize(("make", "limit", "_"), [*LIMITS.values(), *LIMITS_OF_THE_END.values()])
def test_no_limit_counts_the_time_in_which_the_program_was_suspended(make, limit, _):
    machine = make()
    for number in (1, 2):
        suspended_at, now = 100.0 * number - 99.0, 100.0 * number + 1.0
        assert handle(machine, now, Resumed(suspended_at)) == handle(machine, now) == []
        assert machine.deadline == limit + 100.0 * number


@pytest.mark.parametrize(("make", "limit", "_"), LIMITS.values(), ids=LIMITS)
def test_no_limit_of_a_call_counts_the_time_of_a_prompt(make, limit, _):
    machine = make()
    handle(machine, 1.0, SuspendLimits(), SuspendLimits())
    assert machine.deadline is None
    assert handle(machine, 50.0) == []
    handle(machine, 101.0, ResumeLimits(), ResumeLimits())
    assert machine.deadline == limit + 100.0


@pytest.mark.parametrize(("make", "limit", "_"), LIMITS_OF_THE_END.values(), ids=LIMITS_OF_THE_END)
def test_ranks_that_are_stopped_have_no_more_time_because_of_a_prompt(make, limit, _):
    machine = make()
    handle(machine, 1.0, SuspendLimits())
    assert machine.deadline == limit


def test_a_limit_that_was_reached_before_the_suspension_stays_reached():
    machine = running_machine(timeout=5.0)
    assert handle(machine, 100.0, Resumed(6.0)) == []
    assert handle(machine, 100.0) == [DumpStacks(0), DumpStacks(1)]


@pytest.mark.parametrize(("opened_at", "closed_at"), [(2.0, 60.0), (0.0, 10.0)])
def test_time_at_a_prompt_and_in_a_suspension_counts_once(opened_at, closed_at):
    machine = after(opened_at, SuspendLimits(), timeout=5.0)
    handle(machine, 9.0, Resumed(4.0))
    handle(machine, closed_at, ResumeLimits())
    assert machine.deadline == 5.0 + closed_at - opened_at


def test_a_call_that_starts_while_a_prompt_is_open_has_its_whole_timeout():
    machine = after(2.0, SuspendLimits(), Returned(0), Returned(1), keep_ranks=True)
    handle(machine, 50.0, StartCall(50.0, timeout=5.0))
    handle(machine, 60.0, ResumeLimits())
    assert machine.deadline == 65.0


# --- heartbeats


def read_heartbeats(machine, now, **beats):
    """Let the machine read these heartbeats, of `rank0` and so on. Return the actions that follow."""
    ranks = [int(name.removeprefix("rank")) for name in beats]
    assert machine.handle_deadline(now) == [ReadHeartbeat(rank) for rank in ranks]
    return handle(machine, now, *(HeartbeatRead(rank, beat_at=at) for rank, at in zip(ranks, beats.values(), strict=True)))


def test_a_late_rank_makes_the_group_unhealthy_until_its_next_heartbeat():
    machine = running_machine(heartbeat_timeout=LIMIT)
    assert (machine.deadline, machine.state) == (5.0, WorkerState.HEALTHY)
    read_heartbeats(machine, 5.0, rank0=0.0, rank1=4.0)
    assert (machine.heartbeats.late_ranks, machine.state) == ({0: 0.0}, WorkerState.UNHEALTHY)
    read_heartbeats(machine, 6.0, rank0=5.9, rank1=5.9)  # all are read more often while one is late
    assert (machine.heartbeats.late_ranks, machine.state, machine.deadline) == ({}, WorkerState.HEALTHY, 10.9)


def test_a_rank_has_failed_if_it_is_silent_at_two_readings():
    machine = running_machine(3, heartbeat_timeout=LIMIT)
    handle(machine, 1.0, Returned(2))
    assert read_heartbeats(machine, 5.0, rank0=-5.0, rank1=None) == []  # without a first heartbeat there is no limit
    assert read_heartbeats(machine, 6.0, rank0=-5.0, rank1=None) == [DumpStacks(0), DumpStacks(1), RequestCollectives(2)]
    assert (machine.heartbeats.silent_ranks, machine.stop_reason) == ({0: -5.0}, StopReason.FAILED)
    handle(machine, 6.0, Resumed(6.0))
    assert machine.heartbeats.silent_ranks == {0: -5.0}


def test_a_rank_that_sends_a_heartbeat_before_the_second_reading_was_only_suspended():
    machine = running_machine(heartbeat_timeout=LIMIT)
    assert read_heartbeats(machine, 5.0, rank0=-5.0, rank1=4.0) == read_heartbeats(machine, 6.0, rank0=5.2, rank1=5.2) == []
    assert (machine.heartbeats.silent_ranks, machine.stage) == ({}, RunStage.RUNNING)


@pytest.mark.parametrize("pause", [[SuspendLimits(), ResumeLimits()], [Resumed(1.0)]], ids=["prompt", "suspension"])
def test_silence_counts_from_the_end_of_a_prompt_or_a_suspension(pause):
    machine = running_machine(heartbeat_timeout=LIMIT)
    handle(machine, 1.0, *pause[:-1])
    handle(machine, 100.0, pause[-1])
    for now in (105.0, 106.0, 107.0, 108.0, 109.0, 110.0):
        assert read_heartbeats(machine, now, rank0=0.5, rank1=0.5) == []
    assert read_heartbeats(machine, 111.0, rank0=0.5, rank1=0.5) == [DumpStacks(0), DumpStacks(1)]


def test_readings_that_are_always_late_excuse_a_silent_rank_for_a_limited_time_only():
    """A busy program reads late all the time, although its ranks run."""
    machine, now, actions = running_machine(1, heartbeat_timeout=LIMIT), 0.0, []
    assert handle(machine, 5.0 + 2 * SUSPENDED_SECONDS) == []  # the whole computer may have been suspended
    while not actions and now < 6 * LIMIT:
        now = machine.deadline + 5 * SUSPENDED_SECONDS
        actions = handle(machine, now, *(HeartbeatRead(read.rank, beat_at=0.0) for read in handle(machine, now)))
    assert (actions, machine.stop_reason) == ([DumpStacks(0)], StopReason.FAILED)


# --- restarts


def test_restarted_ranks_begin_anew_but_their_timeout_goes_on():
    machine = after(1.0, Failed(0), StackDumped(1), timeout=20.0, heartbeat_timeout=LIMIT, **RESTARTABLE)
    assert handle(machine, 1.1, Exited(0)) == []
    assert (machine.stage, machine.state) == (RunStage.TERMINATING, WorkerState.UNHEALTHY)
    handle(machine, 1.1, Exited(1))
    assert (machine.stage, machine.stop_reason, machine.deadline) == (RunStage.AWAITING_DECISION, StopReason.FAILED, None)
    assert handle(machine, 14.0, Restart(0)) == [StartRank(0), StartRank(1)]
    assert (machine.generation, machine.stop_reason, machine.state) == (1, None, WorkerState.INIT)
    handle(machine, 15.0, *(Ready(rank, generation=1) for rank in range(2)))
    assert (machine.deadline, machine.state) == (19.0, WorkerState.HEALTHY)  # then heartbeats are read
    assert handle(machine, 20.0) == [DumpStacks(0), DumpStacks(1)]
    assert machine.stop_reason is StopReason.TIMED_OUT


def failed_machine():
    return after(1.0, Failed(0), Exited(0), n=1, **RESTARTABLE)


@pytest.mark.parametrize(
    ("event", "signum", "cause"),
    [
        (DoNotRestart(0), None, None),
        (Shutdown(), None, None),
        (Abort(), None, None),
        (CTRL_C, signal.SIGINT, InterruptCause.SIGNAL),
        (BY_SIGNAL, signal.SIGUSR1, InterruptCause.STOP_REQUEST),
        (BY_CALLER, signal.SIGTERM, InterruptCause.STOP_REQUEST),
    ],
)
def test_what_comes_before_the_decision_may_be_the_end(event, signum, cause):
    machine = failed_machine()
    assert handle(machine, 2.0, event, Restart(0)) == []
    assert (machine.stage, machine.stop_reason) == (RunStage.FINISHED, StopReason.FAILED)
    assert machine.signum == signum
    assert signum is None or machine.interrupt_cause is cause


def test_a_request_of_the_job_to_stop_leaves_the_decision_to_the_job():
    machine = failed_machine()
    handle(machine, 2.0, StopRequested("SIGUSR1", is_from_job=True))
    assert handle(machine, 3.0, Restart(0)) == [StartRank(0)]


@pytest.mark.parametrize(
    ("history", "stage"),
    [
        ([TERM, StackDumped(0), Exited(0)], RunStage.FINISHED),
        ([Exited(0), CTRL_C], RunStage.FINISHED),
        ([Abort(), StackDumped(0), Exited(0)], RunStage.FINISHED),
        ([Failed(0), Abort(), Exited(0), Restart(0)], RunStage.FINISHED),
        ([Returned(0), Abort(), Exited(0)], RunStage.FINISHED),
        ([Failed(0), CTRL_C, CTRL_C, Exited(0)], RunStage.FINISHED),
        ([Exited(0)], RunStage.AWAITING_DECISION),
    ],
)
def test_interrupted_and_aborted_ranks_are_not_restarted(history, stage):
    assert after(1.0, *history, n=1, **RESTARTABLE).stage is stage


# --- requests to stop


@pytest.mark.parametrize("request_", [BY_SIGNAL, BY_CALLER])
def test_ranks_that_return_after_a_request_have_succeeded(request_):
    machine = after(1.0, request_, keep_ranks=True, stop_timeout=5.0)
    assert (machine.stop_request, machine.deadline) == (request_, 6.0)
    handle(machine, 2.0, BY_CALLER, Returned(0), Returned(1))
    assert (machine.stop_request, machine.stop_reason, machine.signum) == (request_, StopReason.SUCCEEDED, None)
    handle(machine, 3.0, BY_CALLER, StartCall(started_at=3.0))  # without a call nobody is asked
    assert (machine.stop_request, machine.deadline) == (None, None)


@pytest.mark.parametrize(
    ("request_", "stop_reason", "signum"),
    [(BY_SIGNAL, StopReason.INTERRUPTED, signal.SIGUSR1), (BY_CALLER, StopReason.TIMED_OUT, None)],
)
def test_ranks_that_do_not_return_in_time_after_a_request_are_stopped(request_, stop_reason, signum):
    machine = after(1.0, request_, stop_timeout=5.0)
    assert handle(machine, 6.0) == [DumpStacks(0), DumpStacks(1)]
    assert handle(machine, 6.1, StackDumped(0), StackDumped(1)) == terminate(0, 1)
    assert (machine.stop_reason, machine.signum, machine.is_stop_overdue) == (stop_reason, signum, True)
    assert signum is None or machine.interrupt_cause is InterruptCause.STOP_TIMEOUT


def test_a_signal_after_a_request_stops_the_ranks_at_once():
    machine = after(1.0, BY_SIGNAL)
    assert handle(machine, 2.0, TERM, StackDumped(0), StackDumped(1))[2:] == terminate(0, 1)


# --- several nodes


def test_ranks_are_stopped_and_killed_at_the_times_of_the_last_lease():
    machine = after(1.0, Lease(stop_at=2.0, kill_at=3.0), Lease(stop_at=5.0, kill_at=6.0))
    handle(machine, 4.0, Resumed(2.0))  # the other nodes go on without this one
    assert handle(machine, 4.999) == []
    assert handle(machine, 5.0) == [DumpStacks(0), DumpStacks(1)]
    assert handle(machine, 5.0, StackDumped(0), StackDumped(1)) == terminate(0, 1)
    assert (machine.stop_reason, machine.deadline) == (StopReason.CANCELLED_BY_JOB, 6.0)
    assert handle(machine, 6.0) == kill(0, 1)
    assert machine.deadline == 6.0 + KILL_SECONDS


def test_in_a_job_of_several_nodes_ranks_are_started_unless_the_end_comes_before():
    """Commands that come together are handled in their order. The actions are executed after that."""
    start, ends = Restart(0, ranks=(0, 1)), (TERM, Shutdown())
    for order in permutations([start, *ends, CancelAttempt(), Lease(5.0, 6.0)]):
        machine = StateMachine((), now=0.0, grace_period=GRACE, decide_after=[StopReason.CANCELLED_BY_JOB])
        actions = handle(machine, 0.0, StartCall(0.0), *order)
        is_started = order.index(start) < min(map(order.index, ends))
        assert actions[:2] == ([StartRank(0), StartRank(1)] if is_started else [])
        assert machine.stage is (RunStage.TERMINATING if is_started else RunStage.FINISHED)


# --- illegal events, and many ranks


@pytest.mark.parametrize(
    ("history", "event"),
    [([], Returned(1)), ([], Ready(0)), ([Returned(0)], Returned(0)), ([Exited(0)], Exited(0)), ([], DoNotRestart(0))],
)
def test_an_event_that_cannot_come_is_an_error(history, event):
    machine = after(0.0, *history, ready=1)
    with pytest.raises(IllegalEventError, match=type(event).__name__):
        machine.handle(event, 1.0)


def test_ten_thousand_ranks_of_which_a_thousand_fail():
    began = time.process_time()
    machine = running_machine(10_000)
    actions = handle(machine, 1.0, *(Failed(rank, is_secondary=True) for rank in range(999)), Failed(999))
    actions += handle(machine, 1.1, *map(StackDumped, range(1000, 10_000)))
    for rank in range(9000):
        actions += machine.handle(Exited(rank), 2.0)
        assert machine.deadline is not None
    actions += handle(machine, 1.1 + GRACE)
    handle(machine, 12.0, *map(Exited, range(9000, 10_000)))
    assert machine.stage is RunStage.FINISHED
    assert Counter(type(action) for action in actions) == {DumpStacks: 9000, RequestExit: 1000, SendSignal: 21_000}
    assert time.process_time() - began < 2.0

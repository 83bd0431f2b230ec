"""Written histories of the machine of a call: who is stopped by what, in which order, and by when."""

import math
import signal

import pytest

from mpwatch.watcher.machine import transitions as m
from mpwatch.watcher.machine.call_machine import CallMachine

GRACE, START_TIMEOUT, LIMIT = 10.0, 30.0, 10.0
CTRL_C, TERM = m.Interrupted(signal.SIGINT), m.Interrupted(signal.SIGTERM)
ABORT, CANCEL = m.EndCall(m.StopReason.INTERRUPTED), m.EndCall(m.StopReason.CANCELLED_BY_JOB)
MISMATCH = m.EndCall(m.StopReason.FAILED)
BY_SIGNAL, BY_CALLER = m.StopRequested("SIGUSR1", signal.SIGUSR1), m.StopRequested("request_stop()")


def running_machine(n=2, *, timeout=math.inf, ready=None, **options):
    """Return the machine of a call. So many of its ranks are ready; all of them by default."""
    phases = dict.fromkeys(range(n), m.RankPhase.STARTING)
    machine = CallMachine(phases, now=0.0, grace_period=GRACE, start_deadline=START_TIMEOUT, timeout_at=timeout, **options)
    assert machine.begin() == []
    for rank in range(n if ready is None else ready):
        assert machine.handle(m.Ready(rank), 0.0) == [m.CallRank(rank)]
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


def idle_machine(*phases):
    return CallMachine(dict(enumerate(phases)), now=0.0, grace_period=GRACE, keep_ranks=True)


def terminate(*ranks):
    return [m.SendSignal(rank, number) for rank in ranks for number in (signal.SIGTERM, signal.SIGCONT)]


def kill(*ranks):
    return [m.SendSignal(rank, signal.SIGKILL) for rank in ranks]


# --- success and failure


def test_ranks_that_have_returned_are_asked_to_exit_together():
    machine = running_machine(3)
    assert handle(machine, 1.0, m.Returned(2), m.Exited(2), m.Returned(0)) == []
    assert handle(machine, 1.0, m.Returned(1)) == [m.RequestExit(0), m.RequestExit(1)]
    handle(machine, 2.0, m.Exited(0), m.Exited(1))
    assert (machine.stage, machine.stop_reason, machine.deadline) == (m.CallStage.FINISHED, m.StopReason.SUCCEEDED, math.inf)


def test_a_failure_stops_all_ranks_when_they_have_said_where_they_are():
    machine = after(0.5, m.Returned(2), n=3)
    assert handle(machine, 1.0, m.Failed(1)) == [m.DumpStacks(0), m.DumpStacks(2)]
    assert handle(machine, 1.1, m.StackDumped(0)) == []
    stops = [*terminate(0), *terminate(1), m.RequestExit(1), *terminate(2), m.RequestExit(2)]
    assert handle(machine, 1.1, m.StackDumped(2)) == stops
    assert machine.stopped_at == 1.0  # what ranks do after the request for stacks may be a consequence of it
    assert machine.stop_reason is m.StopReason.FAILED


@pytest.mark.parametrize("event", [m.Failed(0), m.Failing(0), m.Exited(0)])
def test_the_stacks_of_a_rank_that_reports_are_not_waited_for(event):
    assert m.SendSignal(1, signal.SIGTERM) in handle(after(1.0, m.Failed(1)), 1.1, event)


def test_a_rank_that_returns_instead_is_asked_for_what_it_has_called():
    machine = after(1.0, m.Failed(1))
    assert handle(machine, 1.1, m.Returned(0)) == [m.DumpStacks(0)]
    assert m.SendSignal(1, signal.SIGTERM) in handle(machine, 1.1, m.StackDumped(0))


def test_ranks_are_terminated_killed_and_abandoned_once():
    machine = after(1.0, m.Failed(0), m.StackDumped(1))
    assert handle(machine, 1.0, m.StackDumped(1)) == []  # stacks that come too late
    assert handle(machine, 1.0 + GRACE) == kill(0, 1)
    handle(machine, 11.5, m.Exited(0))
    assert handle(machine, 1.0 + GRACE + m.KILL_SECONDS) == [m.AbandonRank(1)]
    assert (machine.stage, machine.deadline) == (m.CallStage.FINISHED, math.inf)


def test_the_root_cause_or_the_last_answer_ends_the_wait_for_it():
    machine = after(1.0, m.Failed(0, is_secondary=True), n=3)
    assert handle(machine, 1.5, m.Failed(2, is_secondary=True)) == []
    assert handle(machine, 1.6, m.Failed(1)) == [each for n in range(3) for each in (*terminate(n), m.RequestExit(n))]
    machine = after(0.5, m.Returned(1))
    assert handle(machine, 1.0, m.Failed(0, is_secondary=True)) == [m.DumpStacks(1)]


def test_a_node_of_a_job_whose_ranks_are_all_victims_waits_for_the_cause_on_another_node():
    machine = after(1.0, m.Lease(stop_at=50.0, kill_at=60.0))
    assert handle(machine, 2.0, m.Failed(0, is_secondary=True), m.Failed(1, is_secondary=True)) == []
    assert machine.is_running()
    assert machine.deadline == 2.0 + m.ROOT_CAUSE_WAIT_SECONDS
    assert machine.handle_deadline(machine.deadline) == [*terminate(0), m.RequestExit(0), *terminate(1), m.RequestExit(1)]
    assert machine.stop_reason is m.StopReason.FAILED


def test_a_mismatch_of_collectives_ends_the_call_unless_a_prompt_is_open():
    machine = after(1.0, m.SuspendLimits())
    assert handle(machine, 2.0, MISMATCH, m.SuspendLimits(False)) == []
    assert handle(machine, 3.0, MISMATCH, MISMATCH) == [m.DumpStacks(0), m.DumpStacks(1)]
    assert machine.stop_reason is m.StopReason.FAILED


# --- signals to the watcher


def test_ctrl_c_reaches_only_functions_that_run():
    machine = running_machine(3, ready=2)
    handle(machine, 0.5, m.Returned(1))
    assert handle(machine, 1.0, CTRL_C) == [m.DumpStacks(0)]
    to_function = [m.SendSignal(0, signal.SIGINT), m.SendSignal(0, signal.SIGCONT)]
    assert handle(machine, 1.1, m.StackDumped(0)) == [*to_function, *terminate(1), m.RequestExit(1), *terminate(2)]
    assert handle(machine, 1.5, m.Failed(0), m.Ready(2)) == [m.RequestExit(0), m.RequestExit(2)]
    assert (machine.stop_reason, machine.signum) == (m.StopReason.INTERRUPTED, signal.SIGINT)


@pytest.mark.parametrize(
    ("history", "event", "actions", "stop_reason"),
    [
        ([CTRL_C], CTRL_C, [*terminate(0, 1), *kill(0, 1)], m.StopReason.INTERRUPTED),
        ([CTRL_C, m.StackDumped(0), m.StackDumped(1)], CTRL_C, kill(0, 1), m.StopReason.INTERRUPTED),
        ([m.Failed(0), m.StackDumped(1)], CTRL_C, kill(0, 1), m.StopReason.FAILED),
        ([CANCEL, m.StackDumped(0), m.StackDumped(1)], TERM, [], m.StopReason.CANCELLED_BY_JOB),
        ([CANCEL, m.StackDumped(0), m.StackDumped(1), TERM], TERM, kill(0, 1), m.StopReason.CANCELLED_BY_JOB),
        ([m.Returned(0), m.Returned(1)], CTRL_C, terminate(0, 1), m.StopReason.SUCCEEDED),
        ([m.Returned(0), m.Returned(1), m.Exited(0), m.Exited(1)], CTRL_C, [], m.StopReason.SUCCEEDED),
    ],
)
def test_a_signal_stops_ranks_once_and_then_kills_them(history, event, actions, stop_reason):
    machine = after(1.0, *history)
    assert handle(machine, 1.1, event) == actions
    assert machine.stop_reason is stop_reason


# --- limits. Each is reached at a time after second 1.

LIMITS = {
    "timeout": (lambda: running_machine(timeout=5.0), 5.0, m.StopReason.TIMED_OUT),
    "start_timeout": (lambda: running_machine(ready=1), START_TIMEOUT, m.StopReason.FAILED),
    "stop_timeout": (lambda: after(1.0, BY_CALLER, stop_timeout=5.0), 6.0, m.StopReason.TIMED_OUT),
    "stop_timeout of a signal": (lambda: after(1.0, BY_SIGNAL, stop_timeout=5.0), 6.0, m.StopReason.INTERRUPTED),
    "root cause": (lambda: after(1.0, m.Failed(0, is_secondary=True)), 1.0 + m.ROOT_CAUSE_WAIT_SECONDS, m.StopReason.FAILED),
    "report": (lambda: after(1.0, m.Failing(0)), 1.0 + m.ROOT_CAUSE_WAIT_SECONDS, m.StopReason.FAILED),
}
LIMITS_OF_THE_END = {
    "stacks": (lambda: after(1.0, TERM), 1.0 + m.STACK_DUMP_SECONDS, m.StopReason.INTERRUPTED),
    "grace_period": (lambda: after(1.0, TERM, *map(m.StackDumped, range(2))), 1.0 + GRACE, m.StopReason.INTERRUPTED),
    "kill": (lambda: after(1.0, CTRL_C, CTRL_C), 1.0 + m.KILL_SECONDS, m.StopReason.INTERRUPTED),
    "exit": (lambda: after(1.0, m.Returned(0), m.Returned(1)), 1.0 + GRACE, m.StopReason.SUCCEEDED),
}


@pytest.mark.parametrize(("make", "limit", "stop_reason"), [*LIMITS.values(), *LIMITS_OF_THE_END.values()])
def test_a_limit_that_is_reached_has_a_consequence_but_the_time_of_a_suspension_does_not_count(make, limit, stop_reason):
    machine = make()
    assert machine.deadline == limit
    for suspended_at, now in ((1.0, 101.0), (101.0, 201.0)):
        assert handle(machine, now, m.Resumed(suspended_at)) == handle(machine, now) == []
    assert machine.deadline == limit + 200.0
    assert handle(machine, limit + 200.0 - 0.001) == []
    assert handle(machine, limit + 200.0) != []
    assert machine.stop_reason is stop_reason


@pytest.mark.parametrize("name", LIMITS | LIMITS_OF_THE_END)
def test_a_prompt_stops_the_limits_of_a_call_and_gives_ranks_that_are_stopped_no_more_time(name):
    make, limit, _ = (LIMITS | LIMITS_OF_THE_END)[name]
    machine = make()
    handle(machine, 1.0, m.SuspendLimits(), m.SuspendLimits())
    assert machine.deadline == (math.inf if name in LIMITS else limit)
    if name in LIMITS:
        assert handle(machine, 50.0) == handle(machine, 101.0, m.SuspendLimits(False), m.SuspendLimits(False)) == []
        assert machine.deadline == limit + 100.0


# --- heartbeats


def read_heartbeats(machine, now, **beats):
    """Let the machine read these heartbeats, of `rank0` and so on. Return the actions that follow."""
    ranks = tuple(int(name.removeprefix("rank")) for name in beats)
    assert machine.handle_deadline(now) == [m.ReadHeartbeats(ranks)]
    return handle(machine, now, m.HeartbeatsRead(dict(zip(ranks, beats.values(), strict=True))))


def test_a_rank_has_failed_if_it_is_silent_at_two_readings():
    machine = running_machine(3, heartbeat_timeout=LIMIT)
    handle(machine, 1.0, m.Returned(2))
    assert read_heartbeats(machine, 5.0, rank0=-5.0, rank1=None) == []  # without a first heartbeat there is no limit
    asked = [m.DumpStacks(0), m.DumpStacks(1), m.DumpStacks(2)]
    assert read_heartbeats(machine, 6.0, rank0=-5.0, rank1=None) == asked
    assert (machine.heartbeats.silent_ranks, machine.stop_reason) == ({0: -5.0}, m.StopReason.FAILED)


def test_a_rank_that_sends_a_heartbeat_before_the_second_reading_was_only_suspended():
    machine = running_machine(heartbeat_timeout=LIMIT)
    assert read_heartbeats(machine, 5.0, rank0=-5.0, rank1=4.0) == read_heartbeats(machine, 6.0, rank0=5.2, rank1=5.2) == []
    assert machine.stage is m.CallStage.RUNNING


@pytest.mark.parametrize("pause", [[m.SuspendLimits(), m.SuspendLimits(False)], [m.Resumed(1.0)]])
def test_silence_counts_from_the_end_of_a_prompt_or_a_suspension(pause):
    machine = running_machine(heartbeat_timeout=LIMIT)
    handle(machine, 1.0, *pause[:-1])
    handle(machine, 100.0, pause[-1])
    for now in (105.0, 106.0, 107.0, 108.0, 109.0, 110.0):
        assert read_heartbeats(machine, now, rank0=0.5, rank1=0.5) == []
    assert read_heartbeats(machine, 111.0, rank0=0.5, rank1=0.5) == [m.DumpStacks(0), m.DumpStacks(1)]


def test_readings_that_are_always_late_excuse_a_silent_rank_for_a_limited_time_only():
    """A busy program reads late all the time, although its ranks run."""
    machine, now, actions = running_machine(1, heartbeat_timeout=LIMIT), 0.0, []
    assert handle(machine, 5.0 + 2 * m.SUSPENDED_SECONDS) == []  # the whole computer may have been suspended
    while not actions and now < 6 * LIMIT:
        now = machine.deadline + 5 * m.SUSPENDED_SECONDS
        actions = handle(machine, now, *(m.HeartbeatsRead({0: 0.0}) for _ in handle(machine, now)))
    assert (actions, machine.stop_reason) == ([m.DumpStacks(0)], m.StopReason.FAILED)


# --- ranks of a WorkerGroup


def test_idle_ranks_are_called_at_once_and_are_idle_again_when_all_have_answered():
    machine = idle_machine(m.RankPhase.READY, m.RankPhase.READY)
    assert machine.begin() == [m.CallRank(0), m.CallRank(1)]
    assert handle(machine, 1.0, m.Failed(0), m.Returned(1), m.DetailsReceived(0)) == []
    assert (machine.stage, machine.stop_reason, machine.deadline) == (m.CallStage.KEPT, m.StopReason.FAILED, math.inf)
    assert handle(machine, 2.0, TERM, BY_CALLER, ABORT, m.Shutdown()) == []


@pytest.mark.parametrize(
    ("phase", "actions"),
    [(m.RankPhase.READY, [m.RequestExit(0), m.RequestExit(1)]), (m.RankPhase.STARTING, terminate(0, 1))],
)
def test_idle_ranks_are_asked_to_exit_and_ranks_that_start_are_stopped(phase, actions):
    machine = idle_machine(phase, m.RankPhase.READY)
    assert machine.end_idle_ranks(1.0) == actions
    handle(machine, 2.0, m.Exited(0), m.Exited(1))
    assert machine.stage is m.CallStage.FINISHED


# --- several nodes


def test_ranks_are_stopped_and_killed_at_the_times_of_the_last_lease():
    machine = after(1.0, m.Lease(stop_at=2.0, kill_at=3.0), m.Lease(stop_at=5.0, kill_at=6.0))
    handle(machine, 4.0, m.Resumed(2.0))  # the other nodes go on without this one
    assert handle(machine, 4.999) == []
    assert handle(machine, 5.0) == [m.DumpStacks(0), m.DumpStacks(1)]
    assert handle(machine, 5.0, m.StackDumped(0), m.StackDumped(1)) == terminate(0, 1)
    assert (machine.stop_reason, machine.deadline) == (m.StopReason.CANCELLED_BY_JOB, 6.0)
    assert handle(machine, 6.0) == kill(0, 1)
    assert machine.deadline == 6.0 + m.KILL_SECONDS


# --- illegal events


IMPOSSIBLE = [([], m.Returned(1)), ([], m.Ready(0)), ([m.Returned(0)], m.Returned(0)), ([m.Exited(0)], m.Exited(0))]


@pytest.mark.parametrize(("history", "event"), IMPOSSIBLE)
def test_an_event_that_cannot_come_is_an_error(history, event):
    machine = after(0.0, *history, ready=1)
    with pytest.raises(m.IllegalEventError, match=type(event).__name__):
        machine.handle(event, 1.0)

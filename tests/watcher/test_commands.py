"""Commands that come together, because the watcher thread is late: it takes them in one batch. The ranks are real."""

import threading
from contextlib import closing
from multiprocessing.connection import wait

import pytest

import mpwatch
from mpwatch import Rendezvous, WorkerSpec
from mpwatch.options.spec import GroupSpec
from mpwatch.watcher.commands import DelayedAction, RestartCommand, StatusRequest, TerminalRestore
from mpwatch.watcher.machine.transitions import (
    CancelAttempt,
    DoNotRestart,
    Interrupted,
    Lease,
    Restart,
    Shutdown,
    StopReason,
)
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.pack_call import pack_call
from mpwatch.watcher.pending_call import PendingCall
from mpwatch.watcher.watcher_thread import WatcherThread
from mpwatch.wire.pickling.call_payload import Call

RANKS = (0, 1)
LAST_GENERATION = 10
SUCCEEDED, INTERRUPTED = StopReason.SUCCEEDED, StopReason.INTERRUPTED


@pytest.fixture
def watcher_thread():
    """The thread of one node of a job, whose ranks are not known until a RestartCommand comes."""
    spec = WorkerSpec(fn=int, nprocs=len(RANKS), rendezvous=Rendezvous("localhost:1", "job", 1))
    with closing(WatcherThread(spec, EventBus("job", spec, keep_events=False), keep_ranks=False)) as thread:
        yield thread


@pytest.fixture
def group_thread():
    """The thread of a WorkerGroup."""
    spec = GroupSpec(nprocs=len(RANKS))
    with closing(WatcherThread(spec, EventBus("group", spec, keep_events=False), keep_ranks=True)) as thread:
        thread.prepare()
        yield thread


@pytest.fixture
def call():
    with closing(pack_call(Call(int, (), {}, None))) as payload:
        yield PendingCall(payload, 0.0, None)


def start(watcher_thread):
    return RestartCommand(Restart(0, ranks=RANKS), watcher_thread.prepare_restart(RANKS, 0))


def run_all(watcher_thread, call, *commands):
    """Run the thread, which finds all commands at once. Return why the ranks ended, and which ranks there were.

    Return None if the call came too late.
    """
    for command in commands:
        watcher_thread.commands.post(command)
    watcher_thread.start()
    wait_until(watcher_thread, lambda: watcher_thread.is_finished)
    watcher_thread.join()
    assert watcher_thread.error is None
    return next(((observed.stop_reason, tuple(observed.ranks)) for observed in call.observations), None)


def wait_until(watcher_thread, condition):
    """Do what the caller's thread does, until the condition is true: wait for the watcher thread, and restart no rank."""
    wakeup = watcher_thread.commands.acquire_caller_wakeup(watcher_thread)
    while not condition():
        wait([wakeup.fileno()])
        wakeup.drain()
        for _ in watcher_thread.commands.take_decision_requests():
            watcher_thread.commands.post(DoNotRestart(0, generation=LAST_GENERATION))


HARMLESS = [Lease(), StatusRequest(), TerminalRestore(None), DelayedAction(0.0, int)]


@pytest.mark.parametrize("other", [None, *HARMLESS, CancelAttempt()], ids=lambda other: type(other).__name__)
def test_ranks_start_if_their_call_and_their_places_come_together(watcher_thread, call, other):
    """A CancelAttempt before the start is one for earlier ranks, which have ended meanwhile."""
    commands = (call, other, start(watcher_thread)) if other else (call, start(watcher_thread))
    assert run_all(watcher_thread, call, *commands) == (SUCCEEDED, RANKS)


@pytest.mark.parametrize("other", HARMLESS, ids=lambda other: type(other).__name__)
def test_what_comes_with_the_start_of_ranks_does_not_disturb_it(watcher_thread, call, other):
    assert run_all(watcher_thread, call, call, start(watcher_thread), other) == (SUCCEEDED, RANKS)


def test_the_lease_may_come_before_the_call(watcher_thread, call):
    assert run_all(watcher_thread, call, Lease(), call, start(watcher_thread)) == (SUCCEEDED, RANKS)


@pytest.mark.parametrize(
    ("other", "stop_reason"),
    [
        (CancelAttempt(), StopReason.CANCELLED_BY_JOB),
        (Interrupted(15), INTERRUPTED),
        (Interrupted(2), INTERRUPTED),
        (Shutdown(), INTERRUPTED),
        (Lease(stop_at=0.0, kill_at=0.0), StopReason.CANCELLED_BY_JOB),
    ],
    ids=repr,
)
def test_ranks_stop_if_their_end_comes_together_with_their_start(watcher_thread, call, other, stop_reason):
    assert run_all(watcher_thread, call, call, start(watcher_thread), other) == (stop_reason, RANKS)


@pytest.mark.parametrize("other", [Interrupted(15), Interrupted(2), Shutdown(), DoNotRestart(0)], ids=repr)
def test_no_ranks_start_if_the_end_of_the_run_comes_before(watcher_thread, call, other):
    assert run_all(watcher_thread, call, call, other, start(watcher_thread)) == (None, ())


@pytest.mark.parametrize("other", [Interrupted(15), Interrupted(2), Shutdown()], ids=repr)
def test_a_group_ends_if_its_end_comes_together_with_a_call(group_thread, call, other):
    assert run_all(group_thread, call, call, other) == (INTERRUPTED, RANKS)


@pytest.mark.parametrize("other", [Interrupted(15), Shutdown()], ids=repr)
def test_a_call_is_too_late_if_the_end_of_the_group_comes_before(group_thread, call, other):
    assert run_all(group_thread, call, other, call) is None


def test_statuses_that_are_requested_together_with_a_call_are_those_of_this_call(group_thread, call):
    """Otherwise the view of a call begins with the steps that the call before it reported."""
    commands, request = group_thread.commands, StatusRequest()
    with closing(pack_call(Call(mpwatch.report, (), {"step": 1}, None))) as payload:
        earlier_call = PendingCall(payload, 0.0, None)
        commands.post(earlier_call)
        group_thread.start()
        wait_until(group_thread, lambda: earlier_call.is_done)
    is_late, may_go_on = threading.Event(), threading.Event()
    commands.post(DelayedAction(0.0, lambda: (is_late.set(), may_go_on.wait())))
    is_late.wait()
    commands.post(call)
    commands.post(request)
    may_go_on.set()
    wait_until(group_thread, lambda: request.statuses is not None and call.is_done)
    commands.post(Shutdown())
    group_thread.join()
    assert [status.report for status in request.statuses] == [None, None]

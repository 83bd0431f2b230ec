"""`WorkerGroup(scope="worker")`: a lost rank ends its own call, and the next call that needs it restarts it."""

import os
import signal

import pytest

import mpwatch
from mpwatch import FailureKind, RunFailedError, WorkerGroup, WorkerState
from support import failing
from support.process_state import SPAWN


def wait_for(event):
    assert event.wait(60)
    return os.getpid()


def restart_counts(group):
    return [worker.restart_count for worker in group.workers]


@pytest.fixture
def group():
    with WorkerGroup(3, scope="worker") as group:
        yield group


def pids_of(group):
    return group.run(os.getpid).return_values


def list_new(before, after):
    return {rank for rank in before if before[rank] != after[rank]}


def test_a_lost_rank_ends_its_own_call_only_and_is_restarted_by_the_next_one_that_needs_it(group, caplog, eventually):
    pids = pids_of(group)
    event = SPAWN.Event()
    other = group.submit(wait_for, args=(event,), ranks=1)
    with pytest.raises(RunFailedError, match=r"\n  the next call starts rank 0 again; its state is lost$") as caught:
        group.run(failing.is_killed, ranks=0)
    assert caught.value.root_cause.kind is FailureKind.SIGNAL
    assert list(caught.value.result.failures) == [0]
    event.set()
    assert other.result(60).return_values == {1: pids[1]}
    assert group.run(os.getpid, ranks=2).return_values == {2: pids[2]}
    assert (group.state, restart_counts(group)) == (WorkerState.UNHEALTHY, [0, 0, 0])
    assert sorted(group.stacks()) == [1, 2]
    assert list_new(pids, pids_of(group)) == {0}
    assert (group.state, restart_counts(group)) == (WorkerState.HEALTHY, [1, 0, 0])
    (text,) = [text for text in caplog.messages if "restarted" in text]
    assert text.startswith("rank 0 is restarted: rank 0 was killed by SIGKILL (not sent by mpwatch: ")
    os.kill(pids[1], signal.SIGKILL)  # while it has no call
    eventually(lambda: group.state is WorkerState.UNHEALTHY)
    assert list_new(pids, pids_of(group)) == {0, 1}
    assert any(text.endswith("while it had no call; the next call restarts it") for text in caplog.messages)
    assert "rank 1 is restarted: it was lost while it had no call" in caplog.messages


def test_all_ranks_of_a_call_end_with_a_lost_one_and_a_call_restarts_those_that_it_needs(group, caplog):
    pids = pids_of(group)
    with pytest.raises(RunFailedError) as caught:
        group.run(failing.call_on_rank_1, (failing.is_killed, SPAWN.Barrier(2)), ranks=[1, 2])
    assert caught.value.root_cause.rank == 1
    assert group.run(os.getpid, ranks=2)[2] != pids[2]
    assert restart_counts(group) == [0, 0, 1]
    (text,) = [text for text in caplog.messages if "restarted" in text]
    assert text.startswith("rank 2 is restarted: rank ")
    assert list_new(pids, pids_of(group)) == {1, 2}


def test_observers_see_each_restart_with_its_rank():
    seen = []
    with WorkerGroup(2, scope="worker", on_event=seen.append) as group:
        with pytest.raises(RunFailedError):
            group.run(failing.is_killed, ranks=1)
        group.run(os.getpid)
    started = [(event.ranks, event.attempt) for event in seen if isinstance(event, mpwatch.events.WorkerStarted)]
    assert started == [((0,), 0), ((1,), 0), ((1,), 1)]
    ended = next(event for event in seen if isinstance(event, mpwatch.events.RunEnded))
    assert ended.restarts == 1

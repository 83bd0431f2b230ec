"""`WorkerGroup(scope="worker")`: a lost rank ends its own call, and the next call that needs it restarts it."""

import os
import signal
import threading

import pytest

import mpwatch
from mpwatch import FailureKind, RunFailedError, WorkerGroup, WorkerState
from support.process_state import SPAWN, is_alive
from support.programs import call


def kill_own_process():
    os.kill(os.getpid(), signal.SIGKILL)


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


def test_a_lost_rank_ends_its_own_call_only(group):
    pids = pids_of(group)
    event = SPAWN.Event()
    other = group.submit(wait_for, args=(event,), ranks=1)
    with pytest.raises(RunFailedError) as caught:
        group.run(kill_own_process, ranks=0)
    assert caught.value.root_cause.kind is FailureKind.SIGNAL
    assert list(caught.value.result.failures) == [0]
    event.set()
    assert other.result(60).return_values == {1: pids[1]}
    assert group.run(os.getpid, ranks=2).return_values == {2: pids[2]}
    assert restart_counts(group) == [0, 0, 0]


def test_the_next_call_that_needs_a_lost_rank_restarts_it(group, caplog):
    pids = pids_of(group)
    with pytest.raises(RunFailedError, match=r"\n  the next call starts rank 0 again; its state is lost$"):
        group.run(kill_own_process, ranks=0)
    assert group.state is WorkerState.UNHEALTHY
    assert sorted(group.stacks()) == [1, 2]
    later = pids_of(group)
    assert {rank for rank in pids if pids[rank] != later[rank]} == {0}
    assert restart_counts(group) == [1, 0, 0]
    (text,) = [record.getMessage() for record in caplog.records if "restarted" in record.getMessage()]
    assert text.startswith("rank 0 is restarted: rank 0 was killed by SIGKILL (not sent by mpwatch: ")
    assert group.state is WorkerState.HEALTHY


def test_a_rank_that_dies_without_a_call_is_restarted_alone(group, caplog):
    pids = pids_of(group)
    os.kill(pids[1], signal.SIGKILL)
    while is_alive(pids[1]):
        threading.Event().wait(0.001)
    later = pids_of(group)
    assert {rank for rank in pids if pids[rank] != later[rank]} == {1}
    messages = [record.getMessage() for record in caplog.records]
    assert any(text.endswith("while it had no call; the next call restarts it") for text in messages)
    assert "rank 1 is restarted: it was lost while it had no call" in messages


def test_all_ranks_of_a_call_end_with_a_lost_one(group):
    def die_or_wait():
        if mpwatch.current_worker().rank == 2:
            kill_own_process()
        signal.pause()

    pids = pids_of(group)
    with pytest.raises(RunFailedError) as caught:
        group.run(die_or_wait, ranks=[1, 2])
    assert caught.value.root_cause.rank == 2
    later = pids_of(group)
    assert {rank for rank in pids if pids[rank] != later[rank]} == {1, 2}
    assert restart_counts(group) == [0, 1, 1]


def test_if_all_ranks_are_lost_all_are_restarted(group, caplog):
    pids = pids_of(group)
    with pytest.raises(RunFailedError):
        group.run(kill_own_process)
    later = group.run(os.getpid, ranks=1).return_values
    assert later[1] != pids[1]
    assert restart_counts(group) == [1, 1, 1]
    restarts = [record.getMessage() for record in caplog.records if "are restarted" in record.getMessage()]
    assert len(restarts) == 1
    assert restarts[0].startswith("all ranks are restarted: not all of them survived the last call: rank ")


def test_a_call_restarts_no_rank_if_another_call_has_restarted_all(group):
    """The first call has found a lost rank, and then all ranks are lost. The second call closes the watcher thread."""
    pids_of(group)
    closed = group._ranks._watcher_thread
    with pytest.raises(RunFailedError):
        group.run(kill_own_process)
    later = pids_of(group)
    group._ranks._restart_lost_ranks(closed, [0])
    assert pids_of(group) == later
    assert restart_counts(group) == [1, 1, 1]


def test_a_rank_that_raises_stays_alive_and_so_do_the_others(group):
    pids = pids_of(group)
    with pytest.raises(RunFailedError) as caught:
        group.run(int, args=("x",), ranks=1)
    assert isinstance(caught.value.__cause__, ValueError)
    assert pids_of(group) == pids


def test_a_hanging_rank_ends_with_its_call(group):
    pids = pids_of(group)
    with pytest.raises(mpwatch.RunTimeoutError):
        group.run(signal.pause, ranks=0, timeout=0.2)
    assert group.run(os.getpid, ranks=[1, 2]).return_values == {1: pids[1], 2: pids[2]}
    assert pids_of(group)[0] != pids[0]


def test_many_ranks_are_lost_while_others_are_called():
    """Each thread kills its rank in every second call. All other calls return."""
    outcomes = {rank: [] for rank in range(3)}

    def drive(group, rank):
        for number in range(10):
            try:
                outcomes[rank].append(group.run(kill_own_process if number % 2 else os.getpid, ranks=rank)[rank])
            except RunFailedError as error:
                outcomes[rank].append(error.root_cause.kind)

    with WorkerGroup(3, scope="worker") as group:
        threads = [threading.Thread(target=drive, args=(group, rank)) for rank in outcomes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for values in outcomes.values():
        assert values[1::2] == [FailureKind.SIGNAL] * 5
        assert len(set(values[::2])) == 5


def test_observers_see_each_restart_with_its_rank():
    seen = []
    with WorkerGroup(2, scope="worker", on_event=seen.append) as group:
        with pytest.raises(RunFailedError):
            group.run(kill_own_process, ranks=1)
        group.run(os.getpid)
    started = [(event.ranks, event.attempt) for event in seen if isinstance(event, mpwatch.events.WorkerStarted)]
    assert started == [((0,), 0), ((1,), 0), ((1,), 1)]
    ended = next(event for event in seen if isinstance(event, mpwatch.events.RunEnded))
    assert ended.restarts == 1


def end_with_a_lost_rank():
    group = WorkerGroup(2, scope="worker")
    group.run(os.getpid)
    event = SPAWN.Event()
    group.submit(wait_for, args=(event,), ranks=1)
    try:
        group.run(kill_own_process, ranks=0)
    except RunFailedError:
        print("lost")


def test_a_program_ends_while_a_rank_is_lost_and_another_one_is_called():
    assert call(end_with_a_lost_rank).stdout == "lost\n"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"scope": "ranks"}, ValueError, "scope must be 'group' or 'worker', not 'ranks'"),
        ({"scope": "worker", "backend": "gloo"}, ValueError, "scope='worker' is for ranks that do not communicate, but"),
    ],
)
def test_bad_scopes(options, error, text):
    with pytest.raises(error, match=text):
        WorkerGroup(2, **options)

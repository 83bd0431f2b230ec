"""Restarts of single ranks (scope="worker"), with real processes. The other ranks go on."""

import pytest

import mpwatch
from mpwatch import RestartPolicy, WorkerState
from mpwatch.events import Restarting, StateChanged, WorkerExited, WorkerStarted
from support.process_state import SPAWN
from watcher.restarts import attempt_functions

LONG = 1000.0  # seconds; no test waits so long


def restart_single(max_restarts=3, **more):
    return RestartPolicy(max_restarts, scope="worker", **more)


def of_kind(kind, events):
    return [event for event in events if isinstance(event, kind)]


def at_first(kind, do, **fields):
    """Return an observer that calls `do` at the first such event."""
    left = [do]

    def observe(event):
        if isinstance(event, kind) and left and all(getattr(event, name) == value for name, value in fields.items()):
            left.pop()()

    return observe


@pytest.mark.parametrize("nprocs", [3])
def test_only_the_failed_rank_is_restarted_and_the_group_is_unhealthy_until_then(nprocs, barrier):
    end = SPAWN.Event()
    result = mpwatch.run(
        attempt_functions.runs_until_one_was_restarted,
        nprocs,
        args=(barrier, end),
        max_restarts=restart_single(),
        on_event=at_first(StateChanged, end.set, before=WorkerState.UNHEALTHY, after=WorkerState.HEALTHY),
    )
    assert [attempt for attempt, *_ in result] == [0, 1, 0]
    assert len({port for _, port, *_ in result}) == 1
    assert [variables["TORCHELASTIC_RESTART_COUNT"] for _, _, variables, _ in result] == ["0", "1", "0"]
    assert [worker.restart_count for worker in result.workers] == [0, 1, 0]
    starts = [(event.ranks, event.attempt, event.pid) for event in of_kind(WorkerStarted, result.events)]
    assert sorted(start[:2] for start in starts) == [((0,), 0), ((1,), 0), ((1,), 1), ((2,), 0)]
    last = {ranks[0]: pid for ranks, _, pid in starts}
    assert [pid for *_, pid in result] == [last[rank] for rank in range(nprocs)]
    ends = of_kind(WorkerExited, result.events)
    assert {event.ranks for event in ends if event.exit_code == 0} == {(0,), (1,), (2,)}
    states = [event.after.name for event in of_kind(StateChanged, result.events)]
    assert states == ["INIT", "HEALTHY", "UNHEALTHY", "HEALTHY", "SUCCEEDED"]
    assert (result.restarts, result.failures, result.root_cause) == (1, {}, None)
    first = result.attempts[0]
    assert (first.number, first.ranks, first.state, set(first.failures)) == (0, (1,), WorkerState.FAILED, {1})
    assert sorted((attempt.number, attempt.ranks) for attempt in result.attempts[1:]) == [(0, (0,)), (0, (2,)), (1, (1,))]


def test_each_rank_has_its_own_restarts():
    calls = []

    def env(worker):
        calls.append((worker.rank, worker.restart_count))
        return {}

    result = mpwatch.run(attempt_functions.raises_by_itself, 3, args=(0,), max_restarts=restart_single(), env=env)
    assert list(result) == [0, 1, 2]
    assert (result.restarts, len(result.attempts)) == (3, 6)
    left = {(event.ranks[0], event.attempt): event.restarts_left for event in of_kind(Restarting, result.events)}
    assert left == {(1, 0): 2, (2, 0): 2, (2, 1): 1}
    assert sorted(calls) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]


def test_a_rank_that_has_used_up_its_restarts_ends_the_run():
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(attempt_functions.fails, 2, args=(99, 1), max_restarts=restart_single(2))
    error, result = caught.value, caught.value.result
    lines = str(error).splitlines()
    assert lines[0].startswith("rank 1 failed first: ValueError: attempt 2 ")
    assert "  restarted 2 times" in lines
    assert "  not restarted again: all restarts are used up (max_restarts=2)" in lines
    attempts = [line for line in lines if line.startswith("    ")]  # not that of the other rank, which was stopped
    assert len(attempts) == 3
    assert all("rank 1 failed first: ValueError: attempt " in line for line in attempts)
    assert repr(error.__cause__) == "ValueError('attempt 2')"
    assert (set(result.failures), result.return_values, result.state) == ({1}, {}, WorkerState.FAILED)
    assert result.worker_states == {0: WorkerState.STOPPED, 1: WorkerState.FAILED}
    states = sorted((attempt.ranks, attempt.number, attempt.state.name) for attempt in result.attempts)
    assert states == [((0,), 0, "STOPPED"), *(((1,), number, "FAILED") for number in range(3))]


def test_a_rank_that_is_not_restarted_ends_the_run_while_another_awaits_its_restart():
    has_failed = SPAWN.Event()
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(
            attempt_functions.fails_while_another_awaits_its_restart,
            3,
            args=(has_failed,),
            max_restarts=restart_single(delay=LONG, max_delay=LONG, retry_if=ValueError),
            on_event=at_first(Restarting, has_failed.set, ranks=(0,)),
        )
    error, result = caught.value, caught.value.result
    assert str(error).startswith("rank 1 failed first: KeyError: 'no restart'")
    assert type(error.__cause__) is KeyError
    assert set(result.failures) == {0, 1}
    assert (result.restarts, result.worker_states[2]) == (0, WorkerState.STOPPED)
    assert result.notes == ("not restarted: `retry_if` does not allow a restart after this failure",)


def test_a_requested_stop_does_not_wait_for_the_restart_of_a_rank():
    result = mpwatch.run(
        attempt_functions.fails_while_another_awaits_a_stop,
        2,
        max_restarts=restart_single(delay=LONG, max_delay=LONG),
        on_event=at_first(Restarting, mpwatch.request_stop),
        check=False,
    )
    assert result.worker_states == {0: WorkerState.FAILED, 1: WorkerState.SUCCEEDED}
    assert result.notes == ("not restarted: a stop was requested (request_stop())",)

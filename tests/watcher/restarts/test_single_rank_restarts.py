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


def test_only_the_failed_rank_is_restarted_and_the_group_is_unhealthy_until_then(barrier):
    end = SPAWN.Event()
    on_event = at_first(StateChanged, end.set, before=WorkerState.UNHEALTHY, after=WorkerState.HEALTHY)
    fn, options = attempt_functions.runs_until_one_was_restarted, {"max_restarts": restart_single(), "on_event": on_event}
    result = mpwatch.run(fn, 3, args=(barrier, end), **options)
    assert [attempt for attempt, *_ in result] == [0, 1, 0]
    assert len({port for _, port, *_ in result}) == 1
    assert [variables["TORCHELASTIC_RESTART_COUNT"] for _, _, variables, _ in result] == ["0", "1", "0"]
    assert [worker.restart_count for worker in result.workers] == [0, 1, 0]
    starts = {(event.ranks[0], event.attempt): event.pid for event in of_kind(WorkerStarted, result.events)}
    assert sorted(starts) == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert [pid for *_, pid in result] == [starts[0, 0], starts[1, 1], starts[2, 0]]
    assert {event.ranks for event in of_kind(WorkerExited, result.events) if event.exit_code == 0} == {(0,), (1,), (2,)}
    states = [event.after.name for event in of_kind(StateChanged, result.events)]
    assert states == ["INIT", "HEALTHY", "UNHEALTHY", "HEALTHY", "SUCCEEDED"]
    assert (result.restarts, result.failures, result.root_cause) == (1, {}, None)
    first, *others = result.attempts
    assert (first.number, first.ranks, first.state, set(first.failures)) == (0, (1,), WorkerState.FAILED, {1})
    assert sorted((attempt.number, attempt.ranks) for attempt in others) == [(0, (0,)), (0, (2,)), (1, (1,))]


def test_each_rank_has_its_own_restarts():
    calls = []
    options = {
        "max_restarts": restart_single(),
        "env": lambda worker: calls.append((worker.rank, worker.restart_count)) or {},
    }
    result = mpwatch.run(attempt_functions.raises_by_itself, 3, args=(0,), **options)
    assert (list(result), result.restarts, len(result.attempts)) == ([0, 1, 2], 3, 6)
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
    assert ["rank 1 failed first: ValueError: attempt " in line for line in attempts] == [True] * 3
    assert repr(error.__cause__) == "ValueError('attempt 2')"
    assert (set(result.failures), result.return_values, result.state) == ({1}, {}, WorkerState.FAILED)
    assert result.worker_states == {0: WorkerState.STOPPED, 1: WorkerState.FAILED}
    states = sorted((attempt.ranks, attempt.number, attempt.state.name) for attempt in result.attempts)
    assert states == [((0,), 0, "STOPPED"), *(((1,), number, "FAILED") for number in range(3))]


def test_a_rank_that_is_not_restarted_ends_the_run_while_another_awaits_its_restart():
    has_failed = SPAWN.Event()
    policy = restart_single(delay=LONG, max_delay=LONG, retry_if=ValueError)
    options = {"max_restarts": policy, "on_event": at_first(Restarting, has_failed.set, ranks=(0,))}
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(attempt_functions.fails_while_another_awaits_its_restart, 3, args=(has_failed,), **options)
    error, result = caught.value, caught.value.result
    assert str(error).startswith("rank 1 failed first: KeyError: 'no restart'")
    assert type(error.__cause__) is KeyError
    assert set(result.failures) == {0, 1}
    assert (result.restarts, result.worker_states[2]) == (0, WorkerState.STOPPED)
    assert result.notes == ("not restarted: `retry_if` does not allow a restart after this failure",)

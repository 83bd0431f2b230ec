"""Ranks that are replaced one by one (scope="worker"), in processes of their own: the others go on."""

import signal

import pytest
import reborn
from conftest import SPAWN

import mpwatch
from mpwatch import RestartPolicy, WorkerState
from mpwatch.events import Restarting, StateChanged, WorkerExited, WorkerReady, WorkerStarted

LONG = 1000.0  # seconds that no test waits for


def alone(max_restarts=3, **more):
    return RestartPolicy(max_restarts, scope="worker", **more)


def of_kind(kind, events):
    return [event for event in events if isinstance(event, kind)]


def when(kind, do, **fields):
    """An observer that does something at the first such event."""
    left = [do]

    def look(event):
        if isinstance(event, kind) and left and all(getattr(event, name) == value for name, value in fields.items()):
            left.pop()()

    return look


@pytest.mark.parametrize("nprocs", [3])
def test_only_the_rank_that_failed_is_started_again(nprocs, barrier):
    end = SPAWN.Event()
    again = when(WorkerReady, end.set, ranks=(1,), attempt=1)
    result = mpwatch.run(reborn.goes_on, nprocs, args=(barrier, end), restart_policy=alone(), on_event=again)
    assert [life for life, *_ in result] == [0, 1, 0]
    assert len({port for _, port, *_ in result}) == 1
    assert [variables["TORCHELASTIC_RESTART_COUNT"] for _, _, variables, _ in result] == ["0", "1", "0"]
    assert [worker.restart_count for worker in result.workers] == [0, 1, 0]
    starts = [(event.ranks, event.attempt, event.pid) for event in of_kind(WorkerStarted, result.events)]
    assert sorted(start[:2] for start in starts) == [((0,), 0), ((1,), 0), ((1,), 1), ((2,), 0)]
    last = {ranks[0]: pid for ranks, _, pid in starts}
    assert [pid for *_, pid in result] == [last[rank] for rank in range(nprocs)]
    ends = of_kind(WorkerExited, result.events)
    assert {event.ranks for event in ends if event.exit_code == 0} == {(0,), (1,), (2,)}
    assert (result.state, result.restarts, result.failures, result.root_cause) == (WorkerState.SUCCEEDED, 1, {}, None)
    first = result.attempts[0]
    assert (first.number, first.ranks, first.state, set(first.failures)) == (0, (1,), WorkerState.FAILED, {1})
    assert sorted((attempt.number, attempt.ranks) for attempt in result.attempts[1:]) == [(0, (0,)), (0, (2,)), (1, (1,))]


@pytest.mark.parametrize("nprocs", [3])
def test_while_a_rank_is_replaced_the_group_is_unhealthy(nprocs, barrier):
    end = SPAWN.Event()
    again = when(StateChanged, end.set, before=WorkerState.UNHEALTHY, after=WorkerState.HEALTHY)
    result = mpwatch.run(reborn.goes_on, nprocs, args=(barrier, end), restart_policy=alone(), on_event=again)
    states = [event.after.name for event in of_kind(StateChanged, result.events)]
    assert states == ["INIT", "HEALTHY", "UNHEALTHY", "HEALTHY", "SUCCEEDED"]


def test_each_rank_has_its_own_restarts():
    result = mpwatch.run(reborn.raises_by_itself, 4, args=(1,), restart_policy=alone(4))
    assert list(result) == [1, 2, 3, 4]
    assert (result.restarts, len(result.attempts)) == (10, 14)
    left = {(event.ranks[0], event.attempt): event.restarts_left for event in of_kind(Restarting, result.events)}
    assert left == {(rank, attempt): 3 - attempt for rank in range(4) for attempt in range(rank + 1)}


def test_a_rank_that_has_used_up_its_restarts_ends_the_run():
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(reborn.fails, 3, args=(99, 1), restart_policy=alone(2))
    error, result = caught.value, caught.value.result
    assert str(error).startswith("rank 1 failed first: ValueError: life 2 ")
    assert "  started again 2 times, and then no more: all restarts are used up (max_restarts=2)" in str(error)
    assert repr(error.__cause__) == "ValueError('life 2')"
    assert (set(error.failures), result.return_values, result.state) == ({1}, {}, WorkerState.FAILED)
    assert result.worker_states == {0: WorkerState.STOPPED, 1: WorkerState.FAILED, 2: WorkerState.STOPPED}
    assert sorted((attempt.ranks, attempt.number, attempt.state.name) for attempt in result.attempts) == [
        ((0,), 0, "STOPPED"),
        ((1,), 0, "FAILED"),
        ((1,), 1, "FAILED"),
        ((1,), 2, "FAILED"),
        ((2,), 0, "STOPPED"),
    ]


def test_env_is_asked_about_the_new_worker_alone():
    asked = []

    def env(worker):
        asked.append((worker.rank, worker.restart_count))
        return {}

    mpwatch.run(reborn.raises_by_itself, 2, args=(0,), restart_policy=alone(), env=env)
    assert asked == [(0, 0), (1, 0), (1, 1)]


def test_who_fails_for_good_ends_the_run_though_another_waits_to_be_started_again():
    has_failed = SPAWN.Event()
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(
            reborn.fails_for_good_beside_one_that_waits,
            3,
            args=(has_failed,),
            restart_policy=alone(delay=LONG, max_delay=LONG, retry_if=ValueError),
            on_event=when(Restarting, has_failed.set, ranks=(0,)),
        )
    error, result = caught.value, caught.value.result
    assert str(error).startswith("rank 1 failed first: KeyError: 'not again'")
    assert type(error.__cause__) is KeyError
    assert set(error.failures) == {0, 1}
    assert (result.restarts, result.worker_states[2]) == (0, WorkerState.STOPPED)
    assert result.not_restarted == "it is no failure that `retry_if` wants to be tried again"


def test_the_time_is_that_of_all_ranks_however_often_they_were_replaced():
    with pytest.raises(mpwatch.RunTimeoutError) as caught:
        mpwatch.run(reborn.waits_the_second_time_if_rank_1, 2, timeout=1.5, restart_policy=alone())
    error = caught.value
    assert str(error).startswith("the run did not end within timeout=1.5 s: ranks 0-1 had not returned")
    assert (error.root_cause, set(error.failures), error.exit_code) == (None, {0, 1}, 124)
    assert error.result.restarts == 1


def test_ctrl_c_while_one_waits_to_be_started_again_and_others_work():
    with pytest.raises(KeyboardInterrupt) as caught:
        mpwatch.run(
            reborn.fails,
            3,
            args=(1, 1),
            restart_policy=alone(delay=LONG, max_delay=LONG),
            on_event=when(Restarting, lambda: signal.raise_signal(signal.SIGINT)),
        )
    failed = caught.value.__cause__
    assert repr(failed.root_cause.exception) == "ValueError('life 0')"
    assert failed.result.not_restarted == "a signal to this process came before"
    assert failed.result.worker_states == {0: WorkerState.STOPPED, 1: WorkerState.FAILED, 2: WorkerState.STOPPED}


def test_ctrl_c_when_a_rank_was_replaced_stops_all():
    def look(event):
        if isinstance(event, WorkerReady) and event.attempt == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        mpwatch.run(reborn.waits_the_second_time_if_rank_1, 3, restart_policy=alone(), on_event=look)
    assert caught.value.__cause__ is None


def test_a_group_of_one_gets_a_new_port():
    ports = []
    mpwatch.run(
        reborn.fails, 1, args=(2, 0), restart_policy=alone(), env=lambda worker: ports.append(worker.master_port) or {}
    )
    assert len(set(ports)) == 3

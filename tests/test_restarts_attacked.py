"""Restarts where several things happen at once, and what is said of them. In processes of their own."""

import signal

import pytest
import reborn
from conftest import SPAWN

import mpwatch
from mpwatch import RestartPolicy, WorkerState
from mpwatch.events import Restarting, RunEnded, WorkerFailed, WorkerReady
from mpwatch.watcher.observers.event_bus import EventBus


def of_kind(kind, events):
    return [event for event in events if isinstance(event, kind)]


def test_a_rank_that_is_being_stopped_when_another_fails_for_good_is_not_started_again():
    """It failed earlier, and would have been: what ended the run is the other."""
    is_telling, may_end = SPAWN.Event(), SPAWN.Event()

    def look(event):
        if isinstance(event, WorkerFailed) and event.ranks == (0,):
            may_end.set()

    def env(worker):
        assert worker.restart_count == 0
        return {}

    policy = RestartPolicy(1, scope="worker", retry_if=ValueError)
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(
            reborn.fails_for_good_while_another_ends,
            2,
            args=(is_telling, may_end),
            restart_policy=policy,
            on_event=look,
            env=env,
        )
    error, result = caught.value, caught.value.result
    assert str(error).startswith("rank 0 failed first: KeyError: 'for good'")
    assert (set(error.failures), result.restarts, of_kind(Restarting, result.events)) == ({0, 1}, 0, [])
    assert result.not_restarted == "it is no failure that `retry_if` wants to be tried again"
    assert [(attempt.ranks, attempt.state) for attempt in result.attempts] == [
        ((0,), WorkerState.FAILED),
        ((1,), WorkerState.FAILED),
    ]


def test_the_attempts_of_ranks_that_were_stopped_have_no_cause_to_be_named():
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(reborn.fails, 3, args=(99, 1), restart_policy=RestartPolicy(1, scope="worker"))
    assert [attempt.state for attempt in caught.value.result.attempts].count(WorkerState.STOPPED) == 2
    lines = [line for line in str(caught.value).splitlines() if line.startswith("    ")]
    assert len(lines) == 2
    assert all("rank 1 failed first: ValueError: life " in line for line in lines)


def test_who_interrupts_while_failed_ranks_are_stopped_hears_why_they_are_not_started_again():
    with pytest.raises(KeyboardInterrupt) as caught:
        mpwatch.run(
            reborn.interrupts_its_parent_when_it_is_stopped, 2, args=(SPAWN.Barrier(2),), max_restarts=3, grace_period=1
        )
    failed = caught.value.__cause__
    assert repr(failed.root_cause.exception) == "ValueError('the first')"
    assert failed.result.not_restarted == "a signal to this process came before"


def test_an_observer_that_is_equal_to_anything_is_dropped_alone(caplog):
    class Observer:
        def __eq__(self, other):
            return True

        __hash__ = None

        def __call__(self, event):
            raise LookupError("not here")

    told = []
    result = mpwatch.run(max, 1, args=(1, 2), on_event=[told.append, Observer()])
    assert told == list(result.events)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("scope", "expected"), [("group", 2), ("worker", 3)])
def test_a_run_that_is_struck_in_a_later_life_has_been_restarted(scope, expected):
    """Rank 1 is in its third life then, and each for itself rank 0 in its second."""

    def strike(*_):
        raise LookupError("of the host's")

    def look(event):
        told.append(event)
        if isinstance(event, WorkerReady):
            ready.discard((*event.ranks, event.attempt))
            if not ready:
                signal.raise_signal(signal.SIGUSR1)

    told, ready = [], {(1, 2), (0, 2 if scope == "group" else 1)}
    lives = (2, 2) if scope == "group" else (1, 2)
    handler = signal.signal(signal.SIGUSR1, strike)
    try:
        with pytest.raises(LookupError, match="of the host's"):
            mpwatch.run(reborn.raises_then_waits, 2, args=lives, restart_policy=RestartPolicy(9, scope=scope), on_event=look)
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert isinstance(told[-1], RunEnded)
    assert told[-1].restarts == expected
    assert told[-2].attempt == 2


@pytest.mark.parametrize("name", ["worker_ready", "restarting", "run_ended"])
def test_an_observer_that_ends_the_program_keeps_nothing_from_the_others(name):
    def leave(event):
        if event.name == name:
            raise SystemExit(3)

    first, last = [], []
    with pytest.raises(SystemExit):
        mpwatch.run(reborn.fails, 2, args=(1, 1), max_restarts=1, on_event=[first.append, leave, last.append])
    assert first == last
    assert [event.name for event in last].count("run_ended") == 1
    assert last[-1].name == "run_ended"


def test_who_is_struck_as_the_end_is_told_tells_it_all_the_same(monkeypatch):
    """By what a handler of the host's raises, which has its signals back by then."""
    told, tell = [], EventBus.tell

    def strike(event_bus):
        if event_bus.state is WorkerState.SUCCEEDED:
            monkeypatch.setattr(EventBus, "tell", tell)
            raise KeyboardInterrupt
        tell(event_bus)

    monkeypatch.setattr(EventBus, "tell", strike)
    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(max, 1, args=(1, 2), on_event=told.append)
    assert [event.name for event in told[-2:]] == ["state_changed", "run_ended"]

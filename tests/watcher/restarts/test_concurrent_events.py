"""Restarts where several things happen at once, and their reports. With real processes."""

import signal
import threading

import pytest

import mpwatch
from mpwatch import LaunchError, RestartPolicy, WorkerState
from mpwatch.events import Restarting, RunEnded, WorkerFailed, WorkerReady
from mpwatch.watcher.observers.event_bus import EventBus
from support import functions
from support.process_state import SPAWN
from watcher.restarts import attempt_functions


def of_kind(kind, events):
    return [event for event in events if isinstance(event, kind)]


def test_a_rank_that_is_being_stopped_when_another_ends_the_run_is_not_restarted():
    """It failed first, and would have been restarted. The other rank ended the run."""
    is_pickling, may_exit = SPAWN.Event(), SPAWN.Event()

    def observe(event):
        if isinstance(event, WorkerFailed) and event.ranks == (0,):
            may_exit.set()

    def env(worker):
        assert worker.restart_count == 0
        return {}

    policy = RestartPolicy(1, scope="worker", retry_if=ValueError)
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(
            attempt_functions.fails_while_another_is_stopped,
            2,
            args=(is_pickling, may_exit),
            max_restarts=policy,
            on_event=observe,
            env=env,
        )
    error, result = caught.value, caught.value.result
    assert str(error).startswith("rank 0 failed first: KeyError: 'no restart'")
    assert (set(error.result.failures), result.restarts, of_kind(Restarting, result.events)) == ({0, 1}, 0, [])
    assert result.notes == ("not restarted: `retry_if` does not allow a restart after this failure",)
    assert [(attempt.ranks, attempt.state) for attempt in result.attempts] == [
        ((0,), WorkerState.FAILED),
        ((1,), WorkerState.FAILED),
    ]


def test_attempts_of_stopped_ranks_are_not_in_the_report():
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(attempt_functions.fails, 3, args=(99, 1), max_restarts=RestartPolicy(1, scope="worker"))
    assert [attempt.state for attempt in caught.value.result.attempts].count(WorkerState.STOPPED) == 2
    lines = [line for line in str(caught.value).splitlines() if line.startswith("    ")]
    assert len(lines) == 2
    assert all("rank 1 failed first: ValueError: attempt " in line for line in lines)


def test_an_interrupt_while_failed_ranks_are_stopped_is_the_reason_for_no_restart():
    with pytest.raises(KeyboardInterrupt) as caught:
        mpwatch.run(
            attempt_functions.interrupts_its_parent_when_stopped, 2, args=(SPAWN.Barrier(2),), max_restarts=3, grace_period=1
        )
    failed = caught.value.__cause__
    assert repr(failed.root_cause.exception) == "ValueError('the first')"
    assert failed.result.notes == ("not restarted: this process received a signal",)


def test_an_observer_that_is_equal_to_anything_is_dropped_alone(caplog):
    class Observer:
        def __eq__(self, other):
            return True

        __hash__ = None

        def __call__(self, event):
            raise LookupError("not here")

    events = []
    result = mpwatch.run(max, 1, args=(1, 2), on_event=[events.append, Observer()])
    assert events == list(result.events)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("scope", "expected"), [("group", 2), ("worker", 3)])
def test_an_exception_in_the_caller_during_a_later_attempt_counts_the_restarts(scope, expected):
    """Then rank 1 is in its third attempt. With scope="worker" rank 0 is in its second."""

    def interrupt_caller(*_):
        raise LookupError("of the host's")

    def observe(event):
        events.append(event)
        if isinstance(event, WorkerReady):
            ready.discard((*event.ranks, event.attempt))
            if not ready:
                signal.raise_signal(signal.SIGUSR1)

    events, ready = [], {(1, 2), (0, 2 if scope == "group" else 1)}
    failures = (2, 2) if scope == "group" else (1, 2)
    handler = signal.signal(signal.SIGUSR1, interrupt_caller)
    try:
        with pytest.raises(LookupError, match="of the host's"):
            mpwatch.run(
                attempt_functions.raises_then_waits,
                2,
                args=failures,
                max_restarts=RestartPolicy(9, scope=scope),
                on_event=observe,
            )
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].restarts == expected
    assert events[-2].attempt == 2


def test_an_exception_during_the_last_dispatch_loses_no_event(monkeypatch):
    """The exception comes from a handler of the host, which gets its signals back before that."""
    events, dispatch = [], EventBus.dispatch

    def interrupt_caller(event_bus):
        if event_bus.state is WorkerState.SUCCEEDED:
            monkeypatch.setattr(EventBus, "dispatch", dispatch)
            raise KeyboardInterrupt
        dispatch(event_bus)

    monkeypatch.setattr(EventBus, "dispatch", interrupt_caller)
    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(max, 1, args=(1, 2), on_event=events.append)
    assert [event.name for event in events[-2:]] == ["state_changed", "run_ended"]


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_a_slow_observer_does_not_hold_up_a_restart(delay):
    """The restart is due while the caller's thread is in the observer."""
    has_restarted, waits = SPAWN.Event(), []

    def observe(event):
        if isinstance(event, Restarting):
            waits.append(has_restarted.wait(60))

    policy = RestartPolicy(1, delay=delay, jitter=0)
    mpwatch.run(attempt_functions.raises_then_sets, 1, args=(has_restarted,), max_restarts=policy, on_event=observe)
    assert waits == [True]


def test_a_delay_of_a_year_can_be_interrupted():
    """It is longer than poll(2) can wait."""
    interrupt = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])

    def observe(event):
        if isinstance(event, Restarting):
            interrupt.start()

    policy = RestartPolicy(1, delay=3e7, max_delay=3e7)
    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(attempt_functions.always_raises, 1, max_restarts=policy, on_event=observe)
    interrupt.join()


def test_a_run_that_may_restart_needs_a_thread_of_its_own(monkeypatch):
    """Decisions about restarts run in the caller's thread, so the event loop cannot run there."""
    start = threading.Thread.start

    def refuse_watcher_thread(self):
        if self.name == "mpwatch":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse_watcher_thread)
    with pytest.raises(
        LaunchError, match="cannot be watched: RuntimeError: can't start new thread; raise the limit of processes"
    ):
        mpwatch.run(functions.rank, 1, max_restarts=1)
    assert list(mpwatch.run(functions.rank, 2)) == [0, 1]

"""The events that observers receive in real runs, their order, and observers that raise."""

import gc
import json
import logging
import os
import pickle
import signal
import threading
from asyncio import CancelledError
from contextlib import ExitStack

import pytest

import mpwatch
from mpwatch import RestartPolicy, WorkerState
from mpwatch.events import JsonLines, Restarting, RunEnded, RunStarted, WorkerExited, WorkerFailed, WorkerStarted
from mpwatch.watcher.observers.deferred_log import DeferredLog
from support import functions
from support.process_state import SPAWN
from watcher.restarts import attempt_functions

START = ["run_started", "worker_started", "worker_started", "UNKNOWN > INIT", "call_started"]
READY = ["worker_ready", "worker_ready", "INIT > HEALTHY"]
RETURN = ["worker_succeeded", "worker_succeeded", "worker_exited", "worker_exited"]
# Rank 1 raises, and rank 0 is stopped
FAIL = ["HEALTHY > UNHEALTHY", "worker_exited", "worker_exited", "worker_failed", "worker_stopped"]
AGAIN = ["restarting", "worker_started", "worker_started", "UNHEALTHY > INIT"]


def names_of(events):
    return [f"{event.before.name} > {event.after.name}" if event.name == "state_changed" else event.name for event in events]


def of_kind(kind, events):
    return [event for event in events if isinstance(event, kind)]


def make_barriers(attempts):
    return [SPAWN.Barrier(2) for _ in range(attempts)]


def test_a_success():
    seen = []
    result = mpwatch.run(attempt_functions.fails, 2, args=(0, 1, make_barriers(1)), on_event=seen.append)
    assert tuple(seen) == result.events
    assert names_of(seen) == [*START, *READY, *RETURN, "HEALTHY > SUCCEEDED", "run_ended"]
    first, last = seen[0], seen[-1]
    assert isinstance(first, RunStarted)
    assert (first.fn, first.role, first.nprocs, first.max_restarts) == ("fails", "default", 2, 0)
    assert isinstance(last, RunEnded)
    assert (last.state, last.restarts, last.reason) == (WorkerState.SUCCEEDED, 0, "")
    assert {event.run_id for event in seen} == {result.workers[0].run_id}
    assert {event.attempt for event in seen} == {0}
    assert last.elapsed == pytest.approx(last.monotonic - first.monotonic, abs=0.01)
    assert max(event.time - event.monotonic for event in seen) - min(event.time - event.monotonic for event in seen) < 1e-3


def test_a_restart():
    seen = []
    result = mpwatch.run(attempt_functions.fails, 2, args=(1, 1, make_barriers(2)), max_restarts=1, on_event=seen.append)
    assert tuple(seen) == result.events
    assert names_of(seen) == [*START, *READY, *FAIL, *AGAIN, *READY, *RETURN, "HEALTHY > SUCCEEDED", "run_ended"]
    (restarting,) = of_kind(Restarting, seen)
    assert (restarting.ranks, restarting.attempt, restarting.delay, restarting.restarts_left) == ((0, 1), 0, 0.0, 0)
    (failed,) = of_kind(WorkerFailed, seen)
    assert restarting.cause is failed.failure is result.attempts[0].root_cause
    assert (failed.ranks, failed.attempt, failed.is_root_cause) == ((1,), 0, True)
    assert (seen[-1].restarts, seen[-1].state) == (1, WorkerState.SUCCEEDED)
    at = seen.index(restarting)
    assert {event.attempt for event in seen[: at + 1]} == {0}
    assert {event.attempt for event in seen[at + 1 : -1]} == {1}
    pids = {(event.ranks, event.attempt): event.pid for event in of_kind(WorkerStarted, seen)}
    assert {(event.ranks, event.attempt): event.pid for event in of_kind(WorkerExited, seen)} == pids


def test_a_failure():
    seen = []
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(attempt_functions.fails, 2, args=(9, 1, make_barriers(1)), on_event=seen.append)
    assert tuple(seen) == caught.value.result.events
    assert names_of(seen) == [*START, *READY, *FAIL, "UNHEALTHY > FAILED", "run_ended"]
    assert seen[-1].reason == str(caught.value).splitlines()[0]
    ends = {event.ranks[0]: event for event in of_kind(WorkerExited, seen)}
    assert (ends[0].was_stopped, ends[0].exit_code) == (True, -signal.SIGTERM)


def test_an_interrupt():
    seen = []

    def observe(event):
        seen.append(event)
        if names_of([event]) == ["INIT > HEALTHY"]:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(attempt_functions.wait_to_be_stopped, 2, on_event=observe)
    fate = ["HEALTHY > UNHEALTHY", "worker_exited", "worker_exited", "worker_stopped", "worker_stopped"]
    assert names_of(seen) == [*START, *READY, *fate, "UNHEALTHY > STOPPED", "run_ended"]
    assert (seen[-1].state, seen[-1].reason) == (WorkerState.STOPPED, "the run was stopped: this process received SIGINT")


def test_ranks_that_could_not_be_started():
    seen = []
    with pytest.raises(mpwatch.LaunchError) as caught:
        mpwatch.run(functions.rank, 2, env=lambda worker: {"X": "x" * (worker.rank << 20)}, on_event=seen.append)
    assert names_of(seen) == ["run_started", "worker_started", "UNKNOWN > FAILED", "run_ended"]
    assert (seen[-1].state, seen[-1].reason) == (WorkerState.FAILED, f"LaunchError: {caught.value}")


def test_a_run_that_never_started_has_no_events():
    seen = []
    with pytest.raises(mpwatch.LaunchError):
        mpwatch.run(functions.double, 1, args=(threading.Lock(),), on_event=seen.append)
    with pytest.raises(ZeroDivisionError):
        mpwatch.run(functions.rank, 2, env=lambda worker: 1 / 0, on_event=seen.append)
    assert seen == []


def test_observers_are_called_in_the_callers_thread_one_after_another():
    called = []
    observers = [lambda event, n=n: called.append((n, event.name, threading.current_thread())) for n in range(2)]
    result = mpwatch.run(functions.rank, 2, on_event=observers)
    here = threading.current_thread()
    assert called == [(n, event.name, here) for event in result.events for n in range(2)]


# --- observers that raise


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, GeneratorExit, CancelledError, pytest.fail.Exception])
def test_an_observer_that_raises_is_logged_once_and_dropped(caplog, error):
    """Also SystemExit and others that are no `Exception`."""
    received, seen = [], []

    def raises(event):
        received.append(event.name)
        if len(received) == 3:
            raise error("in the observer")

    result = mpwatch.run(attempt_functions.fails, 2, args=(1, 1), max_restarts=1, on_event=[raises, seen.append])
    assert len(received) == 3
    assert tuple(seen) == result.events
    (record,) = [record for record in caplog.records if "observer" in record.message]
    assert (record.levelno, record.exc_info[0]) == (logging.ERROR, error)
    assert "raises" in record.message
    assert f"failed at the event '{received[-1]}'; it receives no more events" in record.message


@pytest.fixture
def add_handler():
    """Return a function that adds a logging handler, which calls another function with each message."""
    with ExitStack() as stack:

        def add(handle):
            handler, log = logging.Handler(), logging.getLogger("mpwatch")
            handler.handle = lambda record: handle(record.getMessage())
            log.addHandler(handler)
            stack.callback(log.removeHandler, handler)

        yield add


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_logging_handler_that_raises_does_not_affect_the_run(add_handler, error):
    """Neither for events, nor for the report about an observer that raises."""
    seen = []

    def raises(_):
        raise error

    add_handler(raises)
    result = mpwatch.run(attempt_functions.fails, 2, args=(1, 1), max_restarts=1, on_event=[raises, seen.append])
    assert tuple(seen) == result.events


def test_a_logging_handler_that_raises_receives_all_records_of_the_watcher_thread(add_handler):
    errors, received = [ZeroDivisionError, SystemExit, KeyboardInterrupt, ValueError], []

    def handle(message):
        received.append(message)
        raise errors[len(received) - 1]

    add_handler(handle)
    log = DeferredLog(lambda: None)
    for n in range(4):
        log.warning("record %d", n)
    with pytest.raises(KeyboardInterrupt):
        log.emit()
    log.emit()
    assert received == ["record 0", "record 1", "record 2", "record 3"]


EVENTS_OF_A_RESTART = [*START, *READY, *FAIL, *AGAIN, *READY, *RETURN, "HEALTHY > SUCCEEDED", "run_ended"]


@pytest.mark.parametrize("n", range(len(EVENTS_OF_A_RESTART)))
def test_a_keyboard_interrupt_in_an_observer_is_raised_by_the_run(n):
    """All other observers receive all events, also the one during which it came."""
    seen = []

    def interrupts(event):
        seen.append(event)
        if len(seen) == n + 1:
            raise KeyboardInterrupt(f"at event {n}")

    more = []
    with pytest.raises(KeyboardInterrupt, match=f"^at event {n}$"):
        mpwatch.run(
            attempt_functions.fails,
            2,
            args=(1, 1, make_barriers(2)),
            max_restarts=1,
            on_event=[interrupts, more.append],
            grace_period=5,
        )
    assert names_of(seen)[: n + 1] == EVENTS_OF_A_RESTART[: n + 1]
    if n < len(EVENTS_OF_A_RESTART) - 2:
        assert (more[-1].name, more[-1].state, more[-1].reason) == (
            "run_ended",
            WorkerState.STOPPED,
            f"KeyboardInterrupt: at event {n}",
        )
    assert more == seen
    assert names_of(more).count("run_ended") == 1


def test_an_observer_may_call_run():
    values = []

    def observe(event):
        if isinstance(event, Restarting):
            values.append(list(mpwatch.run(functions.rank, 2)))

    assert len(mpwatch.run(attempt_functions.fails, 2, args=(1, 1), max_restarts=1, on_event=observe)) == 2
    assert values == [[0, 1]]


def test_a_result_with_its_events_can_be_pickled():
    result = mpwatch.run(attempt_functions.raises_by_itself, 2, args=(1,), max_restarts=RestartPolicy(scope="worker"))
    again = pickle.loads(pickle.dumps(result))
    assert names_of(again.events) == names_of(result.events)
    assert [attempt.ranks for attempt in again.attempts] == [attempt.ranks for attempt in result.attempts]
    assert again.return_values == result.return_values


def test_events_keep_no_large_values_alive():
    class Large:
        """Counted."""

    result = mpwatch.run(Large, 1)
    gc.collect()
    (value,) = result
    assert len(gc.get_referrers(value)) <= 2


# --- observers of the package


def test_the_timeline_of_a_real_run(tmp_path):
    result = mpwatch.run(attempt_functions.fails, 2, args=(1, 1, make_barriers(2)), max_restarts=1)
    result.to_chrome_trace(tmp_path / "trace.json")
    lines = json.loads((tmp_path / "trace.json").read_text())
    lines = lines["traceEvents"] if isinstance(lines, dict) else lines
    names = [line.get("name", "") for line in lines]
    assert names.count("fails") >= 4
    pids = {str(event.pid) for event in of_kind(WorkerStarted, result.events)}
    text = (tmp_path / "trace.json").read_text()
    assert all(pid in text for pid in pids)


def test_the_lines_of_a_real_run(tmp_path):
    path = tmp_path / "events.jsonl"
    result = mpwatch.run(attempt_functions.raises_by_itself, 2, args=(1,), max_restarts=2, on_event=JsonLines(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == [event.name for event in result.events]
    assert lines == [json.loads(json.dumps(event.to_dict())) for event in result.events]
    failed = [line["failure"] for line in lines if line["event"] == "worker_failed"]
    assert {failure["exception"] for failure in failed} == {"ValueError"}


def test_json_lines_that_cannot_be_written_do_not_end_the_run(tmp_path, caplog):
    (tmp_path / "folder").mkdir()
    observer = JsonLines(tmp_path / "folder" / "events.jsonl")

    def remove(event):
        if event.name == "worker_ready" and (tmp_path / "folder").exists():
            os.remove(tmp_path / "folder" / "events.jsonl")
            os.rmdir(tmp_path / "folder")

    assert list(mpwatch.run(functions.rank, 2, on_event=[remove, observer])) == [0, 1]
    assert "the observer JsonLines(" in caplog.text


# --- a group


def test_a_group_of_ranks_that_stay():
    seen = []
    with mpwatch.WorkerGroup(2, on_event=seen.append) as group:
        for _ in range(2):
            group.run(functions.rank)
        run_id = group.workers[0].run_id
    calls = ["call_started", "worker_succeeded", "worker_succeeded"]
    assert names_of(seen)[:4] == ["run_started", "worker_started", "worker_started", "UNKNOWN > INIT"]
    assert names_of([event for event in seen if event.name in {"call_started", "worker_succeeded"}]) == calls * 2
    assert names_of(seen)[-4:] == [*["worker_exited"] * 2, "HEALTHY > STOPPED", "run_ended"]
    last = seen[-1]
    assert (last.state, last.reason, last.restarts) == (WorkerState.STOPPED, "", 0)
    assert {event.run_id for event in seen} == {run_id}
    assert (seen[0].fn, seen[0].nprocs) == ("", 2)


def test_a_group_whose_ranks_are_restarted():
    seen = []
    with mpwatch.WorkerGroup(2, on_event=seen.append) as group:
        with pytest.raises(mpwatch.RunFailedError):
            group.run(attempt_functions.ends, ("kill",))
        assert list(group.run(functions.rank)) == [0, 1]
    starts = [(event.ranks, event.attempt) for event in of_kind(WorkerStarted, seen)]
    assert starts == [((0,), 0), ((1,), 0), ((0,), 1), ((1,), 1)]
    assert len(of_kind(WorkerExited, seen)) == 4
    assert of_kind(WorkerFailed, seen)[0].is_root_cause
    assert [event.name for event in seen].count("run_started") == 1
    assert (seen[-1].state, seen[-1].restarts) == (WorkerState.STOPPED, 1)


def test_a_group_that_could_not_be_started():
    seen = []
    with pytest.raises(mpwatch.LaunchError) as caught:
        mpwatch.WorkerGroup(2, env=lambda worker: {"X": "x" * (worker.rank << 20)}, on_event=seen.append)
    assert (seen[0].name, seen[-1].name) == ("run_started", "run_ended")
    assert seen[-1].reason == f"LaunchError: {caught.value}"


def test_a_group_that_never_started_has_no_events():
    seen = []
    with pytest.raises(ZeroDivisionError):
        mpwatch.WorkerGroup(2, env=lambda worker: 1 / 0, on_event=seen.append)
    assert seen == []


def test_the_end_of_a_group_is_published_when_its_end_is_interrupted():
    seen = []

    def observe(event):
        seen.append(event)
        if event.name == "worker_exited" and event.ranks == (0,):
            signal.raise_signal(signal.SIGINT)

    group = mpwatch.WorkerGroup(2, on_event=observe)
    group.run(functions.rank)
    with pytest.raises(KeyboardInterrupt):
        group.close()
    assert names_of(seen)[-1] == "run_ended"
    group.close()
    assert names_of(seen).count("run_ended") == 1


@pytest.mark.parametrize("n", range(15))
def test_a_keyboard_interrupt_in_an_observer_is_raised_by_the_group(n):
    seen = []

    def interrupts(event):
        seen.append(event)
        if len(seen) == n + 1:
            raise KeyboardInterrupt(f"at event {n}")

    def calls():
        with mpwatch.WorkerGroup(2, on_event=interrupts, grace_period=5) as group:
            for _ in range(2):
                assert list(group.run(functions.rank)) == [0, 1]

    with pytest.raises(KeyboardInterrupt, match=f"^at event {n}$"):
        calls()
    assert names_of(seen).count("run_ended") == 1

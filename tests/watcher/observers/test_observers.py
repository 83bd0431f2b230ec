"""The events that observers receive in real runs, their order, and observers that raise."""

import json
import logging
import pickle
import signal
import threading
from functools import partial

import pytest

import mpwatch
from mpwatch import RestartPolicy, WorkerState
from mpwatch.events import JsonLines, Progressed, Restarting, RunEnded, RunStarted, WorkerExited, WorkerFailed, WorkerStarted
from support import functions
from support.failing import rank, wait_to_be_stopped
from support.process_state import SPAWN
from support.programs import TESTS, python
from support.runs import failed, of_kind

START = ["run_started", "worker_started", "worker_started", "UNKNOWN > INIT", "call_started"]
READY = ["worker_ready", "worker_ready", "INIT > HEALTHY"]
RETURN = ["worker_succeeded", "worker_succeeded", "worker_exited", "worker_exited"]
# Rank 1 raises, and rank 0 is stopped
FAIL = ["HEALTHY > UNHEALTHY", "worker_exited", "worker_exited", "worker_failed", "worker_stopped"]
AGAIN = ["restarting", "worker_started", "worker_started", "UNHEALTHY > INIT"]
EVENTS_OF_A_RESTART = [*START, *READY, *FAIL, *AGAIN, *READY, *RETURN, "HEALTHY > SUCCEEDED", "run_ended"]


def fails(failures, barriers=()):
    attempt = mpwatch.current_worker().restart_count
    if barriers:
        barriers[attempt].wait()
    if attempt < failures:
        if rank() == 1:
            raise ValueError(f"attempt {attempt}")
        wait_to_be_stopped()


def raises_by_itself():
    attempt = mpwatch.current_worker().restart_count
    if rank() > attempt:
        raise ValueError("the first attempt")
    return attempt


def names_of(events):
    return [f"{event.before.name} > {event.after.name}" if event.name == "state_changed" else event.name for event in events]


def run_with_a_restart(on_event, **options):
    barriers = [SPAWN.Barrier(2) for _ in range(2)]
    return mpwatch.run(fails, 2, args=(1, barriers), max_restarts=1, on_event=on_event, **options)


def test_a_restart():
    """The observers are called in the caller's thread, one after another."""
    called, here = [], threading.current_thread()
    result = run_with_a_restart([lambda event, n=n: called.append((n, event, threading.current_thread())) for n in range(2)])
    seen = result.events
    assert called == [(n, event, here) for event in seen for n in range(2)]
    assert names_of(seen) == EVENTS_OF_A_RESTART
    first, last = seen[0], seen[-1]
    assert isinstance(first, RunStarted)
    assert (first.fn, first.role, first.nprocs, first.max_restarts) == ("fails", "default", 2, 1)
    assert isinstance(last, RunEnded)
    assert (last.state, last.restarts, last.reason) == (WorkerState.SUCCEEDED, 1, "")
    assert {event.run_id for event in seen} == {result.workers[0].run_id}
    assert last.elapsed == pytest.approx(last.monotonic - first.monotonic, abs=0.01)
    offsets = [event.time - event.monotonic for event in seen]
    assert max(offsets) - min(offsets) < 1e-3
    (restarting,) = of_kind(Restarting, seen)
    assert (restarting.ranks, restarting.attempt, restarting.delay, restarting.restarts_left) == ((0, 1), 0, 0.0, 0)
    (failed,) = of_kind(WorkerFailed, seen)
    assert restarting.cause is failed.failure is result.attempts[0].root_cause
    assert (failed.ranks, failed.attempt, failed.is_root_cause) == ((1,), 0, True)
    at = seen.index(restarting)
    assert {event.attempt for event in seen[: at + 1]} == {0}
    assert {event.attempt for event in seen[at + 1 : -1]} == {1}
    pids = {(event.ranks, event.attempt): event.pid for event in of_kind(WorkerStarted, seen)}
    assert {(event.ranks, event.attempt): event.pid for event in of_kind(WorkerExited, seen)} == pids


def test_a_failure():
    seen = []
    error = failed(fails, 2, args=(9, [SPAWN.Barrier(2)]), on_event=seen.append)
    assert tuple(seen) == error.result.events
    assert names_of(seen) == [*START, *READY, *FAIL, "UNHEALTHY > FAILED", "run_ended"]
    assert seen[-1].reason == str(error).splitlines()[0]
    ends = {event.ranks[0]: event for event in of_kind(WorkerExited, seen)}
    assert (ends[0].was_stopped, ends[0].exit_code) == (True, -signal.SIGTERM)


def test_an_interrupt():
    seen = []

    def observe(event):
        seen.append(event)
        if names_of([event]) == ["INIT > HEALTHY"]:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(wait_to_be_stopped, 2, on_event=observe)
    fate = ["HEALTHY > UNHEALTHY", "worker_exited", "worker_exited", "worker_stopped", "worker_stopped"]
    assert names_of(seen) == [*START, *READY, *fate, "UNHEALTHY > STOPPED", "run_ended"]
    assert (seen[-1].state, seen[-1].reason) == (WorkerState.STOPPED, "the run was stopped: this process received SIGINT")


@pytest.mark.parametrize(
    ("start", "state"),
    [(partial(mpwatch.run, functions.rank), WorkerState.FAILED), (mpwatch.WorkerGroup, WorkerState.STOPPED)],
)
def test_ranks_that_could_not_be_started(start, state):
    seen, too_large = [], {"env": lambda worker: {"X": "x" * (worker.rank << 20)}}  # for rank 1
    with pytest.raises(mpwatch.LaunchError) as caught:
        start(2, **too_large, on_event=seen.append)
    assert names_of(seen) == ["run_started", "worker_started", f"UNKNOWN > {state.name}", "run_ended"]
    assert (seen[-1].state, seen[-1].reason) == (state, f"LaunchError: {caught.value}")


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_an_observer_that_raises_is_logged_once_and_dropped(caplog, error):
    received, seen = [], []

    def raises(event):
        received.append(event.name)
        if len(received) == 3:
            raise error("in the observer")

    result = mpwatch.run(fails, 2, args=(1,), max_restarts=1, on_event=[raises, seen.append])
    assert len(received) == 3
    assert tuple(seen) == result.events
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info[0] is error
    assert "raises" in record.message
    assert f"failed at the event '{received[-1]}'; it receives no more events" in record.message


AT_RESTART, LAST = EVENTS_OF_A_RESTART.index("restarting"), len(EVENTS_OF_A_RESTART) - 1
QUICK = {7, AT_RESTART, LAST}
PLACES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in range(LAST + 1)]


@pytest.mark.parametrize("n", PLACES)
def test_a_keyboard_interrupt_in_an_observer_is_raised_by_the_run(n):
    seen, more = [], []

    def interrupts(event):
        seen.append(event)
        if len(seen) == n + 1:
            raise KeyboardInterrupt(f"at event {n}")

    with pytest.raises(KeyboardInterrupt, match=f"^at event {n}$"):
        run_with_a_restart([interrupts, more.append], grace_period=5)
    assert names_of(seen)[: n + 1] == EVENTS_OF_A_RESTART[: n + 1]
    if n < LAST - 1:
        reason = f"KeyboardInterrupt: at event {n}"
        assert (more[-1].name, more[-1].state, more[-1].reason) == ("run_ended", WorkerState.STOPPED, reason)
    assert more == [*seen[:n], *seen[n + 1 :]]


def test_a_result_with_its_events_can_be_pickled_and_written(tmp_path):
    path, trace = tmp_path / "events.jsonl", tmp_path / "trace.json"
    policy = RestartPolicy(max_restarts=2, scope="worker")
    result = mpwatch.run(raises_by_itself, 2, max_restarts=policy, on_event=JsonLines(path))
    again = pickle.loads(pickle.dumps(result))
    assert (names_of(again.events), again.return_values) == (names_of(result.events), {0: 0, 1: 1})
    assert [attempt.ranks for attempt in again.attempts] == [attempt.ranks for attempt in result.attempts]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [json.loads(json.dumps(event.to_dict())) for event in result.events]
    assert [line["failure"]["exception"] for line in lines if line["event"] == "worker_failed"] == ["ValueError"]
    result.to_chrome_trace(trace)
    spans = [line.get("name", "") for line in json.loads(trace.read_text())["traceEvents"]]
    assert spans.count("raises_by_itself") >= 3
    assert all(str(event.pid) in trace.read_text() for event in of_kind(WorkerStarted, result.events))


def test_the_events_of_a_group():
    seen = []
    with mpwatch.WorkerGroup(2, on_event=seen.append) as group:
        for _ in range(2):
            group.run(functions.rank)
        run_id = group.workers[0].run_id
    calls = ["call_started", "worker_succeeded", "worker_succeeded"]
    assert names_of(seen)[:4] == ["run_started", "worker_started", "worker_started", "UNKNOWN > INIT"]
    assert names_of([event for event in seen if event.name in {"call_started", "worker_succeeded"}]) == calls * 2
    assert names_of(seen)[-4:] == [*["worker_exited"] * 2, "HEALTHY > STOPPED", "run_ended"]
    assert (seen[-1].state, seen[-1].reason, seen[-1].restarts) == (WorkerState.STOPPED, "", 0)
    assert {event.run_id for event in seen} == {run_id}
    assert (seen[0].fn, seen[0].nprocs) == ("", 2)


def test_on_progress_sees_each_report_while_the_ranks_run():
    def report_steps(go_on):
        for step in (1, 2, 3):
            mpwatch.report(step=step, total=3, loss=step / 4)
            assert go_on[step - 1].wait(60)

    go_on = [SPAWN.Event() for _ in range(3)]
    seen, others, threads = [], [], set()

    def record(event):
        threads.add(threading.current_thread())
        seen.append((event.ranks, event.step, event.total, dict(event.metrics)))
        if sum(step == event.step for _, step, _, _ in seen) == 2:
            go_on[event.step - 1].set()

    result = mpwatch.run(report_steps, 2, args=(go_on,), on_progress=record, on_event=others.append)
    expected = [((rank,), step, 3, {"loss": step / 4}) for rank in (0, 1) for step in (1, 2, 3)]
    assert sorted(seen, key=str) == expected
    assert threads == {threading.current_thread()}
    for events in (others, result.events):
        assert events
        assert not any(isinstance(event, Progressed) for event in events)


def test_the_last_report_of_a_short_call_is_not_lost():
    def report_often():
        for step in range(1000):
            mpwatch.report(step=step)

    seen = []
    mpwatch.run(report_often, 2, on_progress=seen.append)
    steps = [event.step for event in seen]
    assert steps.count(999) == 2
    assert len(steps) < 20
    assert seen[0].to_dict()["event"] == "progressed"


def test_the_example_shows_one_bar_for_all_ranks():
    done = python(str(TESTS.parent / "examples" / "progress_observers.py"))
    assert "100%" in done.stderr
    assert "40/40" in done.stderr

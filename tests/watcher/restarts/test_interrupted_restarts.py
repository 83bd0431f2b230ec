"""Restarts that signals, exceptions or shortages interrupt, and the end of a program whose ranks were restarted."""

import signal
import subprocess
import sys
import time

import pytest

import mpwatch
from mpwatch import LaunchError, RestartPolicy, WorkerState
from mpwatch.events import Restarting, WorkerStarted
from support.process_state import is_alive
from support.programs import ENV
from support.runs import at
from watcher.restarts import attempt_functions

YEAR = 3e7  # seconds; longer than poll(2) can wait


def in_a_year(scope="group"):
    return RestartPolicy(9, scope=scope, delay=YEAR, max_delay=YEAR)


def interrupt():
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("scope", ["group", "worker"])
def test_ctrl_c_during_the_delay_ends_the_run_at_once(scope):
    start = time.monotonic()
    observe = at(Restarting, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        mpwatch.run(attempt_functions.fails, 2, args=(1, 1), max_restarts=in_a_year(scope), on_event=observe)
    assert time.monotonic() - start < 60
    failed = caught.value.__cause__
    assert isinstance(failed, mpwatch.RunFailedError)
    assert repr(failed.__cause__) == "ValueError('attempt 0')"
    assert failed.result.notes == ("not restarted: this process received a signal",)
    assert failed.result.worker_states == {0: WorkerState.STOPPED, 1: WorkerState.FAILED}


def test_a_second_ctrl_c_ends_an_observer_of_a_restarted_rank():
    steps = []

    def observe():
        interrupt()
        steps.append("first")
        interrupt()
        steps.append("second")

    on_event = at(WorkerStarted, observe, attempt=1)
    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(attempt_functions.raises_once_then_waits, 2, max_restarts=3, on_event=on_event)
    assert steps == ["first"]


RESTARTED_RANKS = """\
import sys, mpwatch
from watcher.restarts import attempt_functions
def observe(event):
    if event.name == "worker_ready" and event.attempt: print(pids[event.ranks], flush=True)
    if event.name == "worker_started": pids[event.ranks] = event.pid
pids, policy = {}, mpwatch.RestartPolicy(1, scope=sys.argv[1])
mpwatch.run(attempt_functions.raises_once_then_waits, 2, max_restarts=policy, on_event=observe)
"""


@pytest.mark.parametrize(("scope", "number"), [("group", signal.SIGKILL), ("worker", signal.SIGTERM)])
def test_no_restarted_rank_outlives_its_program(scope, number, eventually):
    program = subprocess.Popen([sys.executable, "-c", RESTARTED_RANKS, scope], env=ENV, stdout=subprocess.PIPE, text=True)
    with program:
        pids = [int(program.stdout.readline()) for _ in range(2)]
        program.send_signal(number)
    assert program.returncode == -number
    eventually(lambda: not any(map(is_alive, pids)), seconds=1.0 if number == signal.SIGKILL else 0.0)


def has_no_room(worker):
    if (worker.restart_count, worker.rank) == (1, 1):
        raise LookupError("no room")
    return {}


def is_too_large(worker):
    return {"LARGE": "x" * (worker.restart_count * worker.rank << 20)}


@pytest.mark.parametrize(
    ("scope", "retry_if", "env", "error", "text"),
    [
        ("group", lambda _: 1 // 0, None, ZeroDivisionError, "by zero"),
        ("worker", None, has_no_room, LookupError, "no room"),
        ("group", None, is_too_large, LaunchError, "rank 1 could not be started: .*Argument list too long"),
    ],
)
def test_an_error_at_a_restart_is_raised_and_names_the_failures_before_it(scope, retry_if, env, error, text):
    events, policy = [], RestartPolicy(scope=scope, retry_if=retry_if)
    with pytest.raises(error, match=text) as caught:
        mpwatch.run(attempt_functions.fails, 2, args=(1, 1), max_restarts=policy, env=env, on_event=events.append)
    (note,) = caught.value.__notes__
    assert note.startswith("raised after ranks had failed:\n    first start, ")
    assert "rank 1 failed first: ValueError: attempt 0" in note
    assert (events[-1].name, events[-1].state) == ("run_ended", WorkerState.FAILED)

"""Restarts under difficult conditions: ranks that ignore SIGTERM, a killed watcher, exceptions at any bytecode."""

import logging
import os
import signal
import subprocess
import sys

import pytest

import mpwatch
from mpwatch import RestartPolicy
from support.process_state import SPAWN
from support.programs import ENV
from watcher.restarts import attempt_functions
from watcher.watcher_program import Program, alive, guardian_of

FIRST_TIME = "mpwatch.current_worker().restart_count == 0"
RESTARTED = "mpwatch.run(work, 2, grace_period=5, max_restarts=mpwatch.RestartPolicy(1, scope={scope!r}))"


def test_ranks_that_ignore_sigterm_are_killed_before_they_are_restarted():
    barriers = [SPAWN.Barrier(2) for _ in range(2)]
    result = mpwatch.run(
        attempt_functions.ignores_sigterm_in_the_first_attempt, 2, args=(barriers,), max_restarts=1, grace_period=0.2
    )
    assert list(result) == [1, 1]
    codes = {
        event.ranks[0]: event.exit_code for event in result.events if (event.name, event.attempt) == ("worker_exited", 0)
    }
    assert codes[0] == -signal.SIGKILL


def test_reset_after_resets_the_restarts_of_healthy_ranks():
    barriers = [SPAWN.Barrier(2) for _ in range(5)]
    policy = RestartPolicy(1, reset_after=1e-9)
    result = mpwatch.run(attempt_functions.fails, 2, args=(4, 1, barriers), max_restarts=policy)
    assert [attempt for attempt, *_ in result] == [4, 4]
    assert [event.restarts_left for event in result.events if event.name == "restarting"] == [0] * 4


def test_reset_after_resets_the_restarts_of_a_single_healthy_rank():
    policy = RestartPolicy(1, scope="worker", reset_after=1e-9)
    assert list(mpwatch.run(attempt_functions.raises_by_itself, 2, args=(3,), max_restarts=policy)) == [3, 4]


def test_a_rank_that_never_started_was_not_healthy():
    policy = RestartPolicy(1, reset_after=1e-9, retry_if=mpwatch.FailureKind.START)
    with pytest.raises(mpwatch.RunFailedError, match=r"all restarts are used up \(max_restarts=1\)"):
        mpwatch.run(attempt_functions.attempt, 2, max_restarts=policy, env={"PYTHONHOME": "/nonexistent"})


def test_each_restart_is_a_warning_in_the_log(caplog):
    mpwatch.run(attempt_functions.fails, 2, args=(2, 1), max_restarts=2)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 2
    for n, line in enumerate(lines):
        assert f"rank 1 failed first: ValueError: attempt {n}" in line


# --- restarted ranks are watched and guarded as before


@pytest.mark.parametrize("scope", ["group", "worker"])
@pytest.mark.parametrize("way", ["both", "the kernel's", "the guardian's"])
def test_no_restarted_rank_outlives_a_killed_watcher(scope, way, eventually):
    close = "; os.closerange(3, 4096)" if way == "the guardian's" else ""
    program = Program(call=RESTARTED.format(scope=scope), in_rank=f"assert not {FIRST_TIME}{close}")
    if way == "the kernel's":
        os.kill(guardian_of(program.process.pid), signal.SIGKILL)
    program.signal(signal.SIGKILL)
    program.end()
    eventually(lambda: not alive(program.pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_restarted_ranks(number):
    program = Program(call=RESTARTED.format(scope="group"), in_rank=f"assert not {FIRST_TIME}")
    program.signal(number, group=True)
    status, _, _, seconds = program.end()
    assert status == -number
    assert seconds < 4
    assert not alive(program.pids)


ANYWHERE = """
import mpwatch
from watcher import exception_at_any_bytecode
from watcher.restarts import attempt_functions
def restarted():
    policy = mpwatch.RestartPolicy(1, scope={scope!r}, retry_if=lambda failure: True)
    mpwatch.run(attempt_functions.raises_by_itself, 1, args=(1,), max_restarts=policy, env=lambda worker: {{}}, on_event=id)
exception_at_any_bytecode.main(restarted, 1, 401)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["group", "worker"])
def test_an_exception_at_any_bytecode_leaves_nothing_of_any_attempt(scope):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ANYWHERE.format(scope=scope)],
        env=ENV,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    thrown, of = (int(word) for word in line.split() if word.isdigit())
    assert thrown > 0.5 * (of // 401), line  # a run that is done sooner than the first one has fewer bytecodes

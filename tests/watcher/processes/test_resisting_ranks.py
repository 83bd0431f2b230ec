"""Tests of ranks that resist being stopped: they delay the end of the run by a bounded time, and do not outlive it."""

import logging
import os
import signal
import sys
import time
from pathlib import Path

import pytest

import mpwatch
from mpwatch import FailureKind
from mpwatch.os_support.processes import group_members
from support import failing
from support.process_state import SPAWN, is_alive
from support.programs import in_own_process
from watcher.processes import resisting_functions
from watcher.processes.resisting_functions import (
    WaitsUntilSiblingFails,
    is_killed_and_records_time,
    raises_and_records_time,
    returns_and_records_time,
)

FREEZER = Path("/sys/fs/cgroup/freezer")
GRACE = 0.3  # grace period of runs that last until its end
LONG = 30.0  # grace period of runs that end earlier
SOON = 6.0  # enough for a run with a long grace period, even on a loaded machine
BOUND = 1.0  # a run may take so much longer than its grace period
SLACK = 0.5  # for a loaded machine


class Outcome:
    """The outcome of a run whose rank 0 resists, and how many seconds the run took after the failure."""

    def __init__(self, grace, fn, *args, before=()):
        at = SPAWN.Value("d", 0.0)
        self.pid = SPAWN.Value("i", 0)
        try:
            self.values = list(mpwatch.run(fn, 2, args=(*before, self.pid, *args, at), grace_period=grace))
            self.root = None
        except mpwatch.RunFailedError as error:
            self.root, self.text = error.root_cause, str(error)
        self.seconds = time.monotonic() - at.value

    def assert_value_error_of(self, rank):
        expected = (rank, FailureKind.EXCEPTION)
        assert (self.root.rank, self.root.kind) == expected, self.text
        assert type(self.root.exception) is ValueError


def resist(prepare, ending, grace):
    outcome = Outcome(grace, resisting_functions.runs_beside_a_rank_that_resists, before=(prepare, ending))
    assert not [pid for pid in group_members(outcome.pid.value) if is_alive(pid)]
    return outcome


RESISTING = (
    resisting_functions.ignores_all_signals,
    resisting_functions.ignores_all_signals_with_handlers,
    resisting_functions.blocks_all_signals,
    resisting_functions.hangs_at_exit,
    resisting_functions.hangs_at_exit_and_blocks_all_signals,
    resisting_functions.suspends_itself_at_exit,
    resisting_functions.starts_a_thread_that_never_ends,
    resisting_functions.closes_all_descriptors,
    resisting_functions.closes_its_stderr,
    resisting_functions.joins_the_watchers_process_group,
    resisting_functions.tries_to_lead_a_session,
    resisting_functions.starts_a_helper_that_ignores_all_signals,
)
WITHOUT_SIGTERM = (
    resisting_functions.ignores_all_signals,
    resisting_functions.ignores_all_signals_with_handlers,
    resisting_functions.blocks_all_signals,
    resisting_functions.hangs_at_exit_and_blocks_all_signals,
)
BLOCKED_AT_EXIT = (
    resisting_functions.hangs_at_exit,
    resisting_functions.hangs_at_exit_and_blocks_all_signals,
    resisting_functions.suspends_itself_at_exit,
    resisting_functions.starts_a_thread_that_never_ends,
)
WAITING = {  # whether SIGKILL is needed
    resisting_functions.suspends_itself_then_waits: False,
    resisting_functions.hangs_in_c: False,
    resisting_functions.hangs_in_c_and_handles_sigterm: True,
    resisting_functions.execs_a_program_that_ignores_sigterm: True,
    resisting_functions.lets_another_thread_take_the_signals: False,
}


def name(value):
    return getattr(value, "__name__", None)


@pytest.mark.parametrize("prepare", RESISTING, ids=name)
def test_sibling_of_a_resisting_rank_fails(prepare):
    grace = GRACE if prepare in WITHOUT_SIGTERM else LONG
    outcome = resist(prepare, WaitsUntilSiblingFails(), grace)
    outcome.assert_value_error_of(1)
    assert outcome.seconds < (grace + BOUND if prepare in WITHOUT_SIGTERM else SOON)


@pytest.mark.parametrize("waiting", WAITING, ids=name)
def test_sibling_of_a_stuck_rank_fails(waiting):
    grace = GRACE if WAITING[waiting] else LONG
    outcome = resist(resisting_functions.does_nothing, WaitsUntilSiblingFails(waiting), grace)
    outcome.assert_value_error_of(1)
    assert outcome.seconds < (grace + BOUND if WAITING[waiting] else SOON)


@pytest.mark.parametrize("prepare", RESISTING, ids=name)
def test_a_resisting_rank_raises(prepare):
    needs_sigkill = prepare is resisting_functions.hangs_at_exit_and_blocks_all_signals
    grace = GRACE if needs_sigkill else LONG
    outcome = resist(prepare, raises_and_records_time, grace)
    outcome.assert_value_error_of(0)
    assert outcome.seconds < (grace + BOUND if needs_sigkill else SOON)


@pytest.mark.parametrize("prepare", RESISTING, ids=name)
def test_a_resisting_rank_is_killed(prepare):
    outcome = resist(prepare, is_killed_and_records_time, LONG)
    assert (outcome.root.rank, outcome.root.kind, outcome.root.exit_code) == (0, FailureKind.SIGNAL, 137), outcome.text
    assert outcome.seconds < SOON


@pytest.mark.parametrize("prepare", RESISTING, ids=name)
def test_a_resisting_rank_returns(prepare, caplog):
    """Its value is kept. If it does not exit within `grace_period`, at least a second, the log names it."""
    is_blocked = prepare in BLOCKED_AT_EXIT
    outcome = resist(prepare, returns_and_records_time, GRACE if is_blocked else LONG)
    assert outcome.values == [0, 1]
    assert outcome.seconds < (1.0 + GRACE + BOUND if is_blocked else SOON)
    assert ("rank 0 had returned but was still running" in caplog.text) == is_blocked
    has_hook = is_blocked and prepare is not resisting_functions.starts_a_thread_that_never_ends
    assert ("a slow exit: an exit hook, a finaliser or " in caplog.text) == has_hook


@pytest.mark.parametrize("leaves_group", [False, True], ids=["in its group", "in a session of its own"])
@pytest.mark.parametrize("end", [failing.is_killed, failing.calls_os_exit_with_7], ids=name)
def test_half_a_message_and_a_helper_that_holds_the_channel(end, leaves_group):
    pid, barrier = SPAWN.Value("i", 0), SPAWN.Barrier(2)
    start = time.monotonic()
    with pytest.raises(mpwatch.RunFailedError) as caught:
        args = (barrier, pid, leaves_group, end)
        mpwatch.run(resisting_functions.sends_half_a_message_and_ends, 2, args=args, grace_period=LONG)
    seconds = time.monotonic() - start
    is_left = is_alive(pid.value)
    if leaves_group:
        os.kill(pid.value, signal.SIGKILL)  # it had left the rank's group on purpose
    expected = (1, FailureKind.SIGNAL) if end is failing.is_killed else (1, FailureKind.EXIT)
    assert (caught.value.root_cause.rank, caught.value.root_cause.kind) == expected
    assert is_left == leaves_group
    assert seconds < SOON


@pytest.fixture
def freezer(eventually):
    folder = FREEZER / f"mpwatch-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no group that can be frozen can be made in {FREEZER}: {error}")
    yield folder
    (folder / "freezer.state").write_text("THAWED")
    eventually(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def test_a_rank_that_not_even_sigkill_ends(freezer, caplog):
    """It behaves like a rank in uninterruptible sleep. The log names it. Later it can end."""
    outcome = Outcome(GRACE, resisting_functions.fails_beside_a_frozen_rank, before=(str(freezer),))
    pid = outcome.pid.value
    outcome.assert_value_error_of(1)
    assert GRACE + BOUND - 0.3 < outcome.seconds < GRACE + BOUND + SLACK
    assert f"rank 0 (pid {pid}) has not ended after SIGKILL; mpwatch does not wait for it any longer" in caplog.text
    assert "rank 0: stopped by the watcher" in outcome.text
    assert is_alive(pid)
    (freezer / "freezer.state").write_text("THAWED")
    assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)


def run_with_debugger(is_awake, ending):
    outcome = Outcome(GRACE, resisting_functions.fails_beside_a_traced_rank, is_awake, ending)
    tracer = outcome.pid.value
    os.kill(tracer, signal.SIGKILL)
    return outcome


def test_a_rank_whose_debugger_does_not_wait_for_it(caplog):
    """The kernel reports a death to the debugger first, and to the watcher when the debugger has read the report."""
    outcome = run_with_debugger(False, WaitsUntilSiblingFails())
    outcome.assert_value_error_of(1)
    assert outcome.seconds < GRACE + BOUND + SLACK
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "rank-0 (pid " in record.getMessage()
    assert "is dead, but a debugger holds it" in record.getMessage()
    pid = record.args[1]
    assert os.waitpid(pid, 0)[0] == pid


def test_a_rank_that_is_killed_under_an_awake_debugger(caplog):
    outcome = run_with_debugger(True, is_killed_and_records_time)
    assert (outcome.root.rank, outcome.root.kind, outcome.root.exit_code) == (0, FailureKind.SIGNAL, 137), outcome.text
    assert outcome.seconds < BOUND
    assert caplog.text == ""


def test_a_rank_under_an_awake_debugger_is_stopped_as_usual(caplog):
    outcome = run_with_debugger(True, WaitsUntilSiblingFails())
    outcome.assert_value_error_of(1)
    assert outcome.seconds < GRACE + BOUND
    assert caplog.text == ""


@in_own_process
def test_a_signal_that_cannot_be_sent_does_not_keep_the_others_from_being_sent():
    pids = SPAWN.Array("i", 3)
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("mpwatch").addHandler(handler)

    def refuse(event, args):
        if event in ("os.kill", "os.killpg") and args[0] == pids[1]:
            raise RuntimeError("not this one")

    sys.addaudithook(refuse)  # it stays until the process ends
    with pytest.raises(mpwatch.RunFailedError) as raised:
        mpwatch.run(resisting_functions.rank_0_raises, 3, args=(pids, SPAWN.Barrier(3)), grace_period=0.2)
    assert type(raised.value.__cause__) is ValueError
    assert not is_alive(pids[2])
    assert f"rank 1 (pid {pids[1]}) could not be sent a signal: RuntimeError('not this one')" in logged

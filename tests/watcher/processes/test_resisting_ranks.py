"""Tests of ranks that resist being stopped: they delay the end of the run by a bounded time, and do not outlive it."""

import os
import signal
import time
from pathlib import Path

import pytest

import mpwatch
from mpwatch import FailureKind
from support import failing
from support.process_state import SPAWN, is_alive
from watcher.processes import resisting_functions as f

FREEZER = Path("/sys/fs/cgroup/freezer")
GRACE = 0.3  # grace period of runs that last until its end
LONG = 30.0  # grace period of runs that end earlier
SOON = 6.0  # enough for a run with a long grace period, even on a loaded machine
BOUND = 1.0  # a run may take so much longer than its grace period
SLACK = 0.5  # for a loaded machine

WITHOUT_SIGTERM = (f.ignores_all_signals, f.blocks_all_signals, f.hangs_at_exit_and_blocks_all_signals)
BLOCKED_AT_EXIT = (
    f.hangs_at_exit,
    f.hangs_at_exit_and_blocks_all_signals,
    f.suspends_itself_at_exit,
    f.starts_a_thread_that_never_ends,
)
RESISTING = (
    *dict.fromkeys(WITHOUT_SIGTERM + BLOCKED_AT_EXIT),
    f.joins_the_watchers_process_group,
    f.starts_a_helper_that_ignores_all_signals,
)


class Outcome:
    """The outcome of a run whose rank 0 resists, and how many seconds the run took after the failure."""

    def __init__(self, grace, fn, *args):
        at = SPAWN.RawValue("d", 0.0)  # without a lock, which a killed rank could hold
        self.pid = SPAWN.RawValue("i", 0)
        try:
            self.values = list(mpwatch.run(fn, 2, args=(*args, self.pid, at), grace_period=grace))
            self.root = None
        except mpwatch.RunFailedError as error:
            self.root, self.text = error.root_cause, str(error)
        self.seconds = time.monotonic() - at.value

    def assert_value_error_of(self, rank):
        assert (self.root.rank, self.root.kind) == (rank, FailureKind.EXCEPTION), self.text
        assert type(self.root.exception) is ValueError


def resist(grace, prepare=f.does_nothing, end=None, wait=failing.wait_to_be_stopped):
    outcome = Outcome(grace, f.runs_beside_a_rank_that_resists, prepare, end, wait)
    assert not list_group(outcome.pid.value)
    return outcome


def list_group(pgid):
    """Return the state of each process of a group that is left. A zombie does not count."""
    fields = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split())
        except OSError:
            continue
    return [state for state, _, group, *_ in fields if int(group) == pgid and state != "Z"]


def name(value):
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(
    ("prepare", "wait", "needs_sigkill"),
    [
        *((prepare, failing.wait_to_be_stopped, prepare in WITHOUT_SIGTERM) for prepare in RESISTING),
        (f.does_nothing, f.suspends_itself_then_waits, False),
        (f.does_nothing, f.hangs_in_c, True),
        (f.does_nothing, f.execs_a_program_that_ignores_sigterm, True),
    ],
    ids=name,
)
def test_sibling_of_a_resisting_rank_fails(prepare, wait, needs_sigkill):
    outcome = resist(GRACE if needs_sigkill else LONG, prepare, wait=wait)
    outcome.assert_value_error_of(1)
    assert outcome.seconds < (GRACE + BOUND if needs_sigkill else SOON)


@pytest.mark.parametrize("prepare", RESISTING, ids=name)
def test_a_resisting_rank_raises(prepare):
    needs_sigkill = prepare is f.hangs_at_exit_and_blocks_all_signals
    outcome = resist(GRACE if needs_sigkill else LONG, prepare, f.raises)
    outcome.assert_value_error_of(0)
    assert outcome.seconds < (GRACE + BOUND if needs_sigkill else SOON)


@pytest.mark.parametrize("prepare", RESISTING, ids=name)
def test_a_resisting_rank_returns(prepare, caplog):
    """Its value is kept. If it does not exit within `grace_period`, at least a second, the log names it."""
    is_blocked = prepare in BLOCKED_AT_EXIT
    outcome = resist(GRACE if is_blocked else LONG, prepare, f.returns)
    assert outcome.values == [0, 1]
    assert outcome.seconds < (1.0 + GRACE + BOUND if is_blocked else SOON)
    assert ("rank 0 had returned but was still running" in caplog.text) == is_blocked
    has_hook = is_blocked and prepare is not f.starts_a_thread_that_never_ends
    assert ("a slow exit: an exit hook, a finaliser or " in caplog.text) == has_hook


def test_a_part_of_a_message_and_a_helper_that_holds_the_channel():
    pid, barrier = SPAWN.RawValue("i", 0), SPAWN.Barrier(2)
    start = time.monotonic()
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(f.sends_a_part_of_a_message_and_is_killed, 2, args=(barrier, pid), grace_period=LONG)
    seconds = time.monotonic() - start
    os.kill(pid.value, signal.SIGKILL)  # it had left the rank's group on purpose
    assert (caught.value.root_cause.rank, caught.value.root_cause.signal) == (1, signal.SIGKILL)
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


@pytest.mark.linux
def test_a_rank_that_not_even_sigkill_ends(freezer, caplog):
    """It behaves like a rank in uninterruptible sleep. The log names it. Later it can end."""
    outcome = Outcome(GRACE, f.fails_beside_a_frozen_rank, str(freezer))
    pid = outcome.pid.value
    outcome.assert_value_error_of(1)
    assert GRACE + BOUND - 0.3 < outcome.seconds < GRACE + BOUND + SLACK
    assert f"rank 0 (pid {pid}) has not ended after SIGKILL; mpwatch does not wait for it any longer" in caplog.text
    assert "rank 0: stopped by the watcher" in outcome.text
    assert is_alive(pid)
    (freezer / "freezer.state").write_text("THAWED")
    assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)

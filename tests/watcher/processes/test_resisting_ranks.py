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
from support.runs import failed
from watcher.processes import resisting_functions as f

FREEZER = Path("/sys/fs/cgroup/freezer")
GRACE = 0.3  # grace period of runs that last until its end
LONG = 30.0  # grace period of runs that end earlier
SOON = 6.0  # enough for a run with a long grace period, even on a loaded machine
BOUND = 1.0  # a run may take so much longer than its grace period
SLACK = 0.5  # for a loaded machine

# how rank 0 resists; how long a run may last in which rank 1 fails, rank 0 raises, or rank 0 returns
RESISTING = {
    f.ignores_all_signals: ("grace", "soon", "soon"),
    f.hangs_at_exit: ("soon", "soon", "exit"),
    f.hangs_at_exit_and_blocks_all_signals: ("grace", "grace", "exit"),
    f.suspends_itself_at_exit: ("soon", "soon", "exit"),
    f.starts_a_thread_that_never_ends: ("soon", "soon", "exit"),
    f.joins_the_watchers_process_group: ("soon", "soon", "soon"),
    f.starts_a_helper_that_ignores_all_signals: ("soon", "soon", "soon"),
}
GRACE_PERIODS = {"grace": GRACE, "soon": LONG, "exit": GRACE}
BOUNDS = {"grace": GRACE + BOUND, "soon": SOON, "exit": 1.0 + GRACE + BOUND}


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


def resist(bound, prepare=f.does_nothing, end=None, wait=failing.wait_to_be_stopped):
    outcome = Outcome(GRACE_PERIODS[bound], f.runs_beside_a_rank_that_resists, prepare, end, wait)
    assert not list_group(outcome.pid.value)
    assert outcome.seconds < BOUNDS[bound]
    return outcome


def list_group(pgid):
    fields = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split())
        except OSError:
            continue
    return [state for state, _, group, *_ in fields if int(group) == pgid and state != "Z"]


def name(value):
    return getattr(value, "__name__", None)


@pytest.mark.parametrize("prepare", RESISTING, ids=name)
def test_a_rank_that_resists(prepare, caplog):
    """If it has returned, its value is kept. If it then does not exit within `grace_period`, the log names it."""
    if_other_fails, if_it_raises, if_it_returns = RESISTING[prepare]
    resist(if_other_fails, prepare).assert_value_error_of(1)
    resist(if_it_raises, prepare, f.raises).assert_value_error_of(0)
    assert resist(if_it_returns, prepare, f.returns).values == [0, 1]
    is_blocked = if_it_returns == "exit"
    assert ("rank 0 had returned but was still running" in caplog.text) == is_blocked
    has_hook = is_blocked and prepare is not f.starts_a_thread_that_never_ends
    assert ("a slow exit: an exit hook, a finaliser or " in caplog.text) == has_hook


@pytest.mark.parametrize(
    ("wait", "bound"),
    [
        (f.suspends_itself_then_waits, "soon"),
        (f.hangs_in_c, "grace"),
        (f.execs_a_program_that_ignores_sigterm, "grace"),
    ],
    ids=name,
)
def test_a_rank_that_does_not_react(wait, bound):
    resist(bound, wait=wait).assert_value_error_of(1)


def test_a_part_of_a_message_and_a_helper_that_holds_the_channel():
    pid, barrier = SPAWN.RawValue("i", 0), SPAWN.Barrier(2)
    start = time.monotonic()
    error = failed(f.sends_a_part_of_a_message_and_is_killed, 2, args=(barrier, pid), grace_period=LONG)
    seconds = time.monotonic() - start
    os.kill(pid.value, signal.SIGKILL)  # it had left the rank's group on purpose
    assert (error.root_cause.rank, error.root_cause.signal) == (1, signal.SIGKILL)
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

"""Tests of ranks that resist being stopped: they delay the end of the run by a bounded time, and do not outlive it."""

import os
import signal
import time
from pathlib import Path

import pytest

import mpwatch
from support.process_state import SPAWN, is_alive
from support.runs import failed
from watcher.processes import resisting_functions

FREEZER = Path("/sys/fs/cgroup/freezer")
GRACE = 0.3  # grace period of runs that last until its end
LONG = 30.0  # grace period of runs that end earlier
SOON = 6.0  # enough for a run with a long grace period, even on a loaded machine
BOUND = 1.0  # a run may take so much longer than its grace period
SLACK = 0.5  # for a loaded machine

# how rank 0 resists; how long a run may last in which rank 1 fails, rank 0 raises, or rank 0 returns
RESISTING = {
    "ignores_all_signals": ("grace", "soon", "soon"),
    "hangs_at_exit": ("soon", "soon", "exit"),
    "hangs_at_exit and blocks_signals": ("grace", "grace", "exit"),
    "suspends_itself_at_exit": ("soon", "soon", "exit"),
    "leaves_a_thread": ("soon", "soon", "exit"),
    "leaves_a_process": ("soon", "soon", "exit"),
    "leaves_its_process_group": ("soon", "soon", "soon"),
    "starts_a_helper_that_ignores_all_signals": ("soon", "soon", "soon"),
}
GRACE_PERIODS = {"grace": GRACE, "soon": LONG, "exit": GRACE}
BOUNDS = {"grace": GRACE + BOUND, "soon": SOON, "exit": 1.0 + GRACE + BOUND}


def resist(action, bound):
    pid, ended_at = SPAWN.RawValue("i", 0), SPAWN.RawValue("d", 0.0)  # without locks, which a killed rank could hold
    args = (action, pid, ended_at)
    result = mpwatch.run(resisting_functions.resist, 2, args=args, grace_period=GRACE_PERIODS[bound], check=False)
    assert time.monotonic() - ended_at.value < BOUNDS[bound]
    assert not list_group(pid.value)
    return result


def list_group(pgid):
    fields = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split())
        except OSError:
            continue
    return [state for state, _, group, *_ in fields if int(group) == pgid and state != "Z"]


def assert_blamed(result, rank):
    assert (result.root_cause.rank, type(result.root_cause.exception)) == (rank, ValueError), result


@pytest.mark.parametrize("action", RESISTING)
def test_a_rank_that_resists(action, caplog):
    """If it has returned, its value is kept. If it then does not exit within `grace_period`, the log names it."""
    if_other_fails, if_it_raises, if_it_returns = RESISTING[action]
    assert_blamed(resist(f"{action} and waits", if_other_fails), 1)
    assert_blamed(resist(f"{action} and raises", if_it_raises), 0)
    assert list(resist(f"{action} and returns", if_it_returns)) == ["the value of rank 0", "the other value"]
    is_blocked = if_it_returns == "exit"
    assert ("rank 0 had returned but was still running" in caplog.text) == is_blocked
    assert ("a slow exit: an exit hook, a finaliser or " in caplog.text) == ("at_exit" in action)


@pytest.mark.parametrize(
    ("action", "bound"),
    [
        pytest.param("suspends_itself", "soon", marks=pytest.mark.linux),  # the state of a process is in /proc
        ("changes_handlers and holds_the_gil", "grace"),
        ("ignores_sigterm_and_sigint and execs_a_program_that_waits", "grace"),
    ],
)
def test_a_rank_that_does_not_react(action, bound):
    result = resist(action, bound)
    assert_blamed(result, 1)
    text = "rank 0: stopped by the watcher (suspended, by SIGSTOP or SIGTSTP)"
    assert (text in str(mpwatch.RunFailedError(result))) == (action == "suspends_itself")


def test_a_part_of_a_message_and_a_helper_that_holds_the_channel():
    pid = SPAWN.RawValue("i", 0)
    error = failed(resisting_functions.send_a_part_of_a_message_and_die, 2, args=(pid,), grace_period=LONG)
    os.kill(pid.value, signal.SIGKILL)  # it had left the rank's group on purpose
    assert (error.root_cause.rank, error.root_cause.signal) == (1, signal.SIGKILL)
    assert error.result.elapsed < SOON


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
    shared, failed_at = SPAWN.RawValue("i", 0), SPAWN.RawValue("d", 0.0)
    args = (str(freezer), shared, failed_at)
    error = failed(resisting_functions.fail_beside_a_frozen_rank, 2, args=args, grace_period=GRACE)
    assert GRACE + BOUND - 0.3 < time.monotonic() - failed_at.value < GRACE + BOUND + SLACK
    assert_blamed(error.result, 1)
    pid = shared.value
    assert f"rank 0 (pid {pid}) has not ended after SIGKILL; mpwatch does not wait for it any longer" in caplog.text
    assert "rank 0: stopped by the watcher" in str(error)
    assert is_alive(pid)
    (freezer / "freezer.state").write_text("THAWED")
    assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)

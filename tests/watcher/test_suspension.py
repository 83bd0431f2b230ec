"""Ctrl-Z: SIGTSTP suspends the ranks, with all processes that they have started, together with the program."""

import os
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from support import screens
from support.failing import state_of
from support.programs import ENV, command
from watcher.programs import Program, alive
from watcher.watched_program import main

SPIN = "print(*mpwatch.run(spin, 2, args=({!r},), timeout=60, grace_period=30), flush=True)"
SPIN_IN_GROUP = """
with mpwatch.WorkerGroup(2, timeout=2.0, heartbeat_timeout=1.0) as group:
    group.run(os.getpid)
    print(*group.run(spin, ({!r},)), flush=True)
"""
SPIN_IN_MAP = "print(*sorted(mpwatch.map(spin, [{!r}] * 2, 2)), flush=True)"
RESULT = "(0, 0) (1, 0)\n"
CTRL_Z = b"\x1a"


def have_all_stopped(pids):
    return all(state_of(pid) == "T" for pid in pids)


def are_all_running(pids):
    return all(state_of(pid) != "T" for pid in pids)


def catches_ctrl_z(pid):
    (caught,) = re.findall(r"SigCgt:\s(\w+)", Path(f"/proc/{pid}/status").read_text())
    return int(caught, 16) >> (signal.SIGTSTP - 1) & 1


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "gate"


@pytest.fixture
def start(gate):
    with ExitStack() as stack:
        yield lambda call=SPIN, in_host="": stack.enter_context(Program(call.format(str(gate)), "", in_host))


def suspend(program):
    """Send SIGTSTP, and check that the program and its ranks stop.

    In the first two milliseconds of a call the program has its own signals. The signal comes after that.
    """
    wait_until(lambda: catches_ctrl_z(program.process.pid))
    program.signal(signal.SIGTSTP)
    _, status = os.waitpid(program.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), program.process.communicate()
    wait_until(lambda: have_all_stopped(program.pids))


def finish(program, gate):
    gate.touch()
    assert program.end() == (0, RESULT, "")


@pytest.mark.parametrize(
    ("call", "rounds", "seconds"),
    [
        (SPIN, 1, 0),
        (SPIN_IN_GROUP, 2, 2.5),  # longer than the limits, which do not count it
        (SPIN_IN_MAP, 3, 0),
        pytest.param(SPIN, 100, 0, marks=pytest.mark.slow),
    ],
)
def test_ranks_and_helpers_stop_and_go_on_with_the_program(start, gate, call, rounds, seconds):
    program = start(call)
    for number in range(rounds):
        suspend(program)
        if number == 0:
            time.sleep(seconds)
        program.signal(signal.SIGCONT)
        wait_until(lambda: are_all_running([program.process.pid, *program.pids]))
    finish(program, gate)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_during_the_suspension(start, signum):
    """It is delivered afterwards, except SIGKILL, which ends the program at once, and its ranks."""
    program = start()
    suspend(program)
    program.signal(signum)
    if signum == signal.SIGINT:
        time.sleep(0.1)
        assert have_all_stopped([program.process.pid, *program.pids])
        program.signal(signal.SIGCONT)
    wait_until(lambda: not alive(program.pids))
    assert program.end()[:2] == (-signum, "")


@pytest.mark.parametrize(
    ("handler", "output"), [("lambda *_: print('own handler', flush=True)", "own handler\n"), ("signal.SIG_IGN", "")]
)
def test_a_host_with_its_own_way_is_left_alone(start, gate, handler, output):
    program = start(in_host=f"signal.signal(signal.SIGTSTP, {handler})")
    program.signal(signal.SIGTSTP)
    if output:
        assert program.process.stdout.readline() == output
    assert are_all_running([program.process.pid, *program.pids])
    finish(program, gate)


def test_ctrl_z_does_nothing_in_a_terminal_without_a_shell(gate):
    """The program leads the session, as with `ssh -t host python x.py`. Nothing there could continue it."""
    with screens.Program(*command(main, SPIN.format(str(gate)), "", ""), env=ENV) as terminal:
        assert terminal.read_until(lambda rows: sum(row.startswith("running") for row in rows) == 2)
        terminal.type(CTRL_Z)
        assert terminal.read_until(lambda rows: any("^Z" in row for row in rows))  # only later output is not discarded
        gate.touch()
        assert terminal.read_until(lambda rows: RESULT.strip() in rows)
        assert terminal.end() == 0

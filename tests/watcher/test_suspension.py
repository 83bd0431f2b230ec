"""Ctrl-Z: SIGTSTP suspends the ranks, with all processes that they have started, together with the program."""

import os
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from support import screens
from support.programs import ENV, TESTS, command
from watcher.programs import Program, alive
from watcher.watched_program import main

SPIN = "print(*mpwatch.run(spin, 2, args=({!r},), timeout=60, grace_period=30), flush=True)"
SPIN_IN_GROUP = """
with mpwatch.WorkerGroup(2, timeout=2.0, heartbeat_timeout=1.0) as group:
    group.run(os.getpid)
    print(*group.run(spin, ({!r},)), flush=True)
"""
SPIN_IN_MAP = "print(*sorted(mpwatch.map(spin, [{!r}] * 2, 2)), flush=True)"
CPU_SECONDS = 0.2  # that a process may use from SIGTSTP to its stop
RESULT = "(0, 0) (1, 0)\n"
CTRL_Z = b"\x1a"


def read_stat(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_seconds(pids):
    return [(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") for fields in map(read_stat, pids)]


def have_all_stopped(pids):
    return all(read_stat(pid)[0] == "T" for pid in pids)


def are_all_running(pids):
    return all(read_stat(pid)[0] != "T" for pid in pids)


def catches_ctrl_z(pid):
    (caught,) = re.findall(r"SigCgt:\s(\w+)", Path(f"/proc/{pid}/status").read_text())
    return int(caught, 16) >> (signal.SIGTSTP - 1) & 1


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def check_suspension(pids, before):
    """Check that these processes stop soon. `before` is what they had used when the suspension was requested."""
    wait_until(lambda: have_all_stopped(pids))
    after = cpu_seconds(pids)
    assert max(b - a for a, b in zip(before, after, strict=True)) <= CPU_SECONDS
    let_time_pass(0.03)  # three clock ticks
    assert cpu_seconds(pids) == after


def let_time_pass(seconds):
    signal.sigtimedwait([], seconds)


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
    before = cpu_seconds(program.pids)
    program.signal(signal.SIGTSTP)
    _, status = os.waitpid(program.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), program.process.communicate()
    check_suspension(program.pids, before)


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
            let_time_pass(seconds)
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
        let_time_pass(0.1)
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


def test_ctrl_z_and_fg_and_bg_in_a_terminal(gate):
    def has(row, times=1):
        return lambda rows: rows.count(row) == times

    def find_pids(rows):
        found = [row.split()[1:] for row in rows if row.startswith("running")]
        return [int(pid) for pids in found for pid in pids]

    arguments = [str(TESTS / "support" / "job_shell.py"), *command(main, SPIN.format(str(gate)), "", "")]
    with screens.Program(*arguments, env=ENV) as terminal:
        assert terminal.read_until(lambda rows: len(find_pids(rows)) == 4)
        pids = find_pids(terminal.emulator.rows())
        for number in (1, 2):
            before = cpu_seconds(pids)
            terminal.type(CTRL_Z)
            assert terminal.read_until(has("stopped by SIGTSTP", number))
            check_suspension(pids, before)
            if number == 2:
                terminal.type(b"bg\r")
                assert terminal.read_until(has("in the background"))
                wait_until(lambda: are_all_running(pids))
            terminal.type(b"fg\r")
            assert terminal.read_until(has("in the foreground", number))
            wait_until(lambda: are_all_running(pids))
        gate.touch()
        assert terminal.read_until(has("ended with 0"))
        assert RESULT.strip() in terminal.emulator.rows()
        assert terminal.end() == 0


def test_ctrl_z_does_nothing_in_a_terminal_without_a_shell(gate):
    """The program leads the session, as with `ssh -t host python x.py`. Nothing there could continue it."""
    with screens.Program(*command(main, SPIN.format(str(gate)), "", ""), env=ENV) as terminal:
        assert terminal.read_until(lambda rows: sum(row.startswith("running") for row in rows) == 2)
        terminal.type(CTRL_Z)
        assert terminal.read_until(lambda rows: any("^Z" in row for row in rows))  # only later output is not discarded
        gate.touch()
        assert terminal.read_until(lambda rows: RESULT.strip() in rows)
        assert terminal.end() == 0

"""Ctrl-Z: SIGTSTP suspends the ranks, with all processes that they have started, together with the program."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mpwatch
from mpwatch.os_support.processes import read_process_state
from support import functions
from support.continuer import continued
from support.process_state import is_alive
from support.programs import ENV, TESTS, command, in_own_process
from support.signal_at_line import SignalAtLine
from support.thoroughness import THOROUGH
from watcher import suspended_functions

CPU_SECONDS = 0.2  # that a process may use from SIGTSTP to its stop
RESULT = "(0, 0) (1, 0)\n"
CTRL_Z = b"\x1a"


def state_of(pid):
    state = read_process_state(pid)
    return None if state is None else state.letter


def cpu_seconds(pids):
    """Return the CPU time of each process so far."""
    found = []
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return found


def have_all_stopped(pids):
    return all(state_of(pid) == "T" for pid in pids)


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def wait_for_stop_of(pids):
    """Wait until these processes have stopped. On a busy machine a process gets SIGSTOP before it is next to run."""
    wait_until(lambda: have_all_stopped(pids))


def are_all_running(pids):
    return all(state_of(pid) != "T" for pid in pids)


def check_suspension(pids, before):
    """Check that these processes stop soon. `before` is what they had used when the suspension was requested."""
    wait_for_stop_of(pids)
    after = cpu_seconds(pids)
    assert max(b - a for a, b in zip(before, after, strict=True)) <= CPU_SECONDS
    stay_suspended(0.03)  # three clock ticks
    assert cpu_seconds(pids) == after


def stay_suspended(seconds):
    """Let time pass that no limit may count."""
    signal.sigtimedwait([], seconds)


class Program:
    """A program with two ranks, which this process suspends and resumes as a shell does. A context manager."""

    def __init__(self, function, gate, *args, ranks=2):
        self.gate = gate
        self.process = subprocess.Popen(
            [sys.executable, *command(function, str(gate), *args)],
            env={**ENV, "PYTHONWARNINGS": "default"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.pids = [pid for _ in range(ranks) for pid in self.read_pids()]  # of each rank, and of its helper

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def read_line(self):
        return self.process.stdout.readline()

    def read_pids(self):
        words = self.read_line().split()
        assert words[:1] == ["running"], f"{words} {self.process.communicate()}"
        return [int(word) for word in words[1:]]

    def send(self, signum):
        os.kill(self.process.pid, signum)

    def suspend(self):
        """Send SIGTSTP, wait until the program has stopped, and check that its ranks have stopped.

        In the first two milliseconds of a call the program has its own signals. The signal comes after that.
        """
        wait_until(lambda: read_process_state(self.process.pid).catches(signal.SIGTSTP))
        before = cpu_seconds(self.pids)
        self.send(signal.SIGTSTP)
        self.wait_for_stop()
        check_suspension(self.pids, before)

    def wait_for_stop(self):
        stopped = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert stopped.si_code == os.CLD_STOPPED, self.process.communicate()

    def resume(self):
        self.send(signal.SIGCONT)

    def finish(self):
        """Let the ranks return. Return the exit status, stdout and stderr of the program."""
        self.gate.touch()
        out, err = self.process.communicate(timeout=60)
        assert not [pid for pid in self.pids if is_alive(pid)]
        return self.process.returncode, out, err


@pytest.fixture
def gate(tmp_path):
    """The path of a file that lets the ranks return when it exists."""
    return tmp_path / "gate"


@pytest.mark.parametrize("rounds", [3, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", [suspended_functions.run, suspended_functions.call])
def test_ranks_and_helpers_stop_and_go_on_with_the_program(gate, eventually, function, rounds):
    with Program(function, gate, {}) as program:
        for _ in range(rounds):
            program.suspend()
            program.resume()
            eventually(lambda: are_all_running([program.process.pid, *program.pids]))
        assert program.finish() == (0, RESULT, "")


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (suspended_functions.call, {"timeout": 2.0, "heartbeat_timeout": 1.0}),
        pytest.param(suspended_functions.run, {"timeout": 5.0, "heartbeat_timeout": 2.0}, marks=pytest.mark.slow),
    ],
)
def test_no_limit_counts_the_suspension(gate, function, options):
    with Program(function, gate, options) as program:
        program.suspend()
        stay_suspended(options["timeout"] + 0.5)
        program.resume()
        assert program.finish() == (0, RESULT, "")


def test_the_grace_period_does_not_count_the_suspension(gate):
    with Program(suspended_functions.run_that_is_terminated, gate, {"grace_period": 2}) as program:
        program.send(signal.SIGTERM)
        assert [program.read_line() for _ in range(2)] == ["saving\n"] * 2
        del program.pids[1::2]  # the helpers are dead
        program.suspend()
        stay_suspended(2.5)
        program.resume()
        status, out, err = program.finish()
        assert (status, out) == (-signal.SIGTERM, "saved\n" * 2)
        assert err.startswith("the run was stopped: this process received SIGTERM\n")


@pytest.mark.parametrize(
    ("failing", "options", "starts"),
    [([0, 1], {"delay": 1.0}, [0, 2]), ([1], {"delay": 1.0, "scope": "worker"}, [1, 1])],
    ids=["all ranks wait for their restart", "one rank waits"],
)
def test_no_rank_is_started_during_a_suspension(gate, failing, options, starts):
    before, after = starts
    with Program(suspended_functions.run_with_a_restart, gate, failing, options, ranks=0) as program:
        lines = sorted(program.read_line() for _ in range(1 + before))
        assert lines.pop(0) == "restarting\n"
        program.pids = [int(word) for line in lines for word in line.split()[1:]]
        if program.pids:
            program.suspend()
        else:
            program.send(signal.SIGTSTP)
            program.wait_for_stop()
        processes = list_descendants(program.process.pid)
        stay_suspended(1.5)
        assert list_descendants(program.process.pid) == processes
        program.resume()
        program.pids += [pid for _ in range(after) for pid in program.read_pids()]
        counts = (0 if 0 not in failing and options.get("scope") else 1, 1)
        assert program.finish()[:2] == (0, f"(0, {counts[0]}) (1, {counts[1]})\n")


@pytest.mark.slow
def test_a_restart_after_a_suspension_has_the_rest_of_the_timeout(gate):
    with Program(suspended_functions.run_that_fails_later, gate, 6.0) as program:
        program.suspend()
        stay_suspended(6.5)
        program.resume()
        gate.touch()
        program.pids += [pid for _ in range(2) for pid in program.read_pids()]
        assert program.finish()[:2] == (0, "(0, 1) (1, 1)\n")


def list_descendants(pid):
    """Return the ranks of a program, and the processes that they have started."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    children = {int(word) for task in tasks for word in (task / "children").read_text().split()}
    ranks = {child for child in children if b"\0rank=" in Path(f"/proc/{child}/cmdline").read_bytes()}
    return ranks.union(*map(list_descendants, children))


@pytest.mark.parametrize("event", ["run_started", "worker_started", "call_started"])
def test_a_program_whose_observer_runs_is_suspended_at_once(gate, event):
    with Program(suspended_functions.run_that_suspends_itself, gate, event, ranks=0) as program:
        program.wait_for_stop()
        wait_for_stop_of(list_descendants(program.process.pid))
        program.resume()
        program.pids = [pid for _ in range(2) for pid in program.read_pids()]
        assert program.finish() == (0, RESULT, "")


def test_two_requests_are_one_suspension(gate):
    with Program(suspended_functions.run, gate, {}) as program:
        program.send(signal.SIGTSTP)
        program.suspend()
        program.resume()
        assert program.finish() == (0, RESULT, "")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_suspension_is_delivered_afterwards(gate, signum):
    with Program(suspended_functions.run, gate, {"grace_period": 30}) as program:
        program.suspend()
        program.send(signum)
        stay_suspended(0.1)
        assert have_all_stopped([program.process.pid, *program.pids])
        program.resume()
        out, _ = program.process.communicate(timeout=60)
        assert (program.process.returncode, out) == (-signum, "")
        assert not [pid for pid in program.pids if is_alive(pid)]


def test_no_rank_outlives_a_suspended_program_that_is_killed(gate, eventually):
    with Program(suspended_functions.run, gate, {}) as program:
        program.suspend()
        program.send(signal.SIGKILL)
        eventually(lambda: not [pid for pid in program.pids if is_alive(pid)])


def test_processes_that_were_stopped_before_stay_stopped(gate, eventually):
    with Program(suspended_functions.run, gate, {}) as program:
        rank_0, helper_0, rank_1, helper_1 = program.pids
        stopped, others = [rank_0, helper_1], [helper_0, rank_1]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        wait_for_stop_of(stopped)
        program.suspend()
        program.resume()
        eventually(lambda: are_all_running(others))
        assert have_all_stopped(stopped)
        os.kill(rank_0, signal.SIGCONT)
        assert program.finish() == (0, RESULT, "")


@pytest.mark.parametrize(
    ("function", "output"),
    [(suspended_functions.run_with_own_handler, "own handler\n"), (suspended_functions.run_that_ignores_ctrl_z, "")],
)
def test_a_host_with_its_own_way_is_left_alone(gate, function, output):
    with Program(function, gate, {}) as program:
        program.send(signal.SIGTSTP)
        if output:
            assert program.read_line() == output
        assert are_all_running([program.process.pid, *program.pids])
        assert program.finish() == (0, RESULT, "")


def test_the_run_of_another_thread_is_left_alone(gate):
    with Program(suspended_functions.run_in_a_thread, gate, {}) as program:
        program.send(signal.SIGTSTP)
        program.wait_for_stop()
        assert are_all_running(program.pids)
        program.resume()
        assert program.finish() == (0, RESULT, "")


@pytest.mark.parametrize(
    ("first", "stride"),
    [(1, 11), pytest.param(1, 3, marks=pytest.mark.slow), *(pytest.param(first, 3, marks=THOROUGH) for first in (2, 3))],
)
@pytest.mark.parametrize("name", ["run.py", "host_signals.py", "suspension.py"])
@in_own_process
def test_a_suspension_may_come_at_any_line(first, stride, name):
    def suspend(event):
        if name == "suspension.py" and event.name == "call_started":
            os.kill(os.getpid(), signal.SIGTSTP)

    with continued():
        n, was_sent = first, True
        while was_sent:
            with SignalAtLine(signal.SIGTSTP, name, n) as suspending:
                assert list(mpwatch.run(functions.rank, 1, on_event=suspend)) == [0]
            was_sent = suspending.was_sent
            n += stride
            assert signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        assert n > 2 * stride


def test_ctrl_z_and_fg_and_bg_in_a_terminal(gate, eventually):
    pytest.importorskip("pyte")
    from support.screens import Program as TerminalProgram

    def has(row, times=1):
        return lambda rows: rows.count(row) == times

    def find_pids(rows):
        found = [row.split()[1:] for row in rows if row.startswith("running")]
        return [int(pid) for pids in found for pid in pids]

    arguments = [str(TESTS / "support" / "job_shell.py"), *command(suspended_functions.run, str(gate), {"timeout": 60})]
    with TerminalProgram(*arguments, env=ENV) as terminal:
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
                eventually(lambda: are_all_running(pids))
            terminal.type(b"fg\r")
            assert terminal.read_until(has("in the foreground", number))
            eventually(lambda: are_all_running(pids))
        gate.touch()
        assert terminal.read_until(has("ended with 0"))
        assert RESULT.strip() in terminal.emulator.rows()
        assert terminal.end() == 0


def test_ctrl_z_does_nothing_in_a_terminal_without_a_shell(gate):
    """The program leads the session, as with `ssh -t host python x.py`. Nothing there could continue it."""
    pytest.importorskip("pyte")
    from support.screens import Program as TerminalProgram

    with TerminalProgram(*command(suspended_functions.run, str(gate), {"timeout": 60}), env=ENV) as terminal:
        assert terminal.read_until(lambda rows: sum(row.startswith("running") for row in rows) == 2)
        terminal.type(CTRL_Z)
        assert terminal.read_until(lambda rows: any("^Z" in row for row in rows))  # only later output is not discarded
        gate.touch()
        assert terminal.read_until(lambda rows: RESULT.strip() in rows)
        assert terminal.end() == 0

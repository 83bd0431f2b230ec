"""The live view of real runs in real terminals."""

import os
import re
import signal
import sys

import pytest

pytest.importorskip("pyte")
pytest.importorskip("rich")

from mpwatch.live_view.scroll_region import RESTORE_CURSOR, WRAP_ON
from mpwatch.os_support.processes import read_process_state
from support.programs import ENV, TESTS
from support.screens import Program

PROGRAM = str(TESTS / "live_view" / "view_program.py")


@pytest.fixture
def fifo(tmp_path):
    """A FIFO: ranks that read from it go on when it is closed."""
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    with open(os.open(path, os.O_RDWR), "wb", buffering=0) as file:
        file.path = path
        yield file


def start_program(*args, env=ENV, **more):
    env = {name: value for name, value in env.items() if name != "PYTHONUNBUFFERED"}
    return Program(PROGRAM, *map(str, args), env=env, **more)


def test_printed_lines_are_whole_and_not_mixed_with_the_view(fifo):
    with start_program("print_and_report", 3, fifo.path, 100, "hurry=True", columns=110, rows=20) as program:
        seen = []

        def has_enough_drawings(rows):
            is_drawn = "rank" in rows[-4] and all(row[:4].strip() for row in rows[-3:])  # the drawing is complete
            if is_drawn and (not seen or seen[-1] != rows[-4:]):
                seen.append(rows[-4:])
            return len(seen) > 20

        assert program.read_until(has_enough_drawings)
        for rows in seen:
            assert [row.split()[0] for row in rows] == ["rank", "0", "1", "2"]
        fifo.close()
        assert program.end() == 0
        printed = [row for row in program.emulator.all_rows() if row]
    assert printed[0] == "before"
    after = re.fullmatch(r"after (\d+) (\d+) (\d+)", printed.pop())
    assert re.fullmatch(r"mpwatch: step \d+ of 1000000 \(0 %\); loss [\d.e-]+; 3 ranks returned", printed.pop())
    for rank in range(3):
        mine = [row for row in printed[1:] if row.startswith(f"<{rank} ")]
        assert mine == [f"<{rank} {n} {'=' * (n % 100)}>" for n in range(int(after[rank + 1]))]
    assert len(printed) == 1 + sum(map(int, after.groups()))


def shows_step(step):
    return lambda rows: any(f"step {step} of 8" in row for row in rows) and sum("running" in row for row in rows[-3:]) == 3


def test_a_run_in_a_terminal_that_changes_its_size(fifo):
    with start_program("report_and_wait_for_fifo", 3, fifo.path, 3, "hurry=True") as program:
        assert program.read_until(shows_step(3))
        rows = program.emulator.rows()
        assert rows[0] == "before"
        assert not any(rows[1:-5])
        program.emulator.screen.resize(40, 120)
        program.resize(120, 40)

        def is_drawn_once(rows):  # an incomplete drawing has fewer rows
            is_resized = program.emulator.screen.margins == (0, 34)
            return is_resized and shows_step(3)(rows) and sum("running" in row for row in rows) == 4

        assert program.read_until(is_drawn_once)
        fifo.close()
        assert program.end() == 0
        last = "mpwatch: step 8 of 8 (100 %); loss 0.25; 3 ranks returned"
        assert [row for row in program.emulator.all_rows() if row] == ["before", last, "after None None None"]
        assert program.emulator.screen.margins is None


def test_by_default_the_view_appears_when_a_rank_reports(fifo):
    with start_program("report_and_wait_for_fifo", 3, fifo.path, 5, "hurry=True") as program:
        assert program.read_until(shows_step(5))
        program.type(b"\x03")
        assert program.end() == -signal.SIGINT
        rows = [row for row in program.emulator.all_rows() if row]
        assert "KeyboardInterrupt" in rows
        assert rows[-1] == "  last reports: ranks 0-2 at step 5 of 8"
        assert "mpwatch: step 5 of 8 (62 %); loss 0.5; 3 ranks stopped" in rows
        assert not any("━" in row for row in rows)
        assert program.emulator.screen.margins is None


END_OF_DRAWING = WRAP_ON.encode()
MARK = b"\0"  # does nothing in a terminal
# Starts a program as a shell does, and goes on when it has ended.
SHELL = """
import subprocess, sys
program = subprocess.Popen(sys.argv[1:])
print(program.pid, flush=True)
program.wait()
input("next")
"""


def suspend_between_drawings(program, pid):
    """Suspend a process of the program when no drawing is incomplete."""
    terminal = os.open(f"/proc/{pid}/fd/0", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    with open(terminal, "wb", buffering=0) as file:
        while not program.output.endswith(END_OF_DRAWING + RESTORE_CURSOR.encode() + MARK):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGSTOP)
            while read_process_state(pid).letter != "T":
                os.sched_yield()
            while file.write(MARK) is None:  # the terminal is full
                program.read_once()
            end = len(program.output)
            assert program.read_until(lambda _, end=end: MARK in program.output[end:])


def test_the_terminal_is_restored_after_the_program_was_killed(fifo):
    command = [sys.executable, PROGRAM, "report_and_wait_for_fifo", "3", fifo.path, "5", "hurry=True"]
    with Program("-c", SHELL, *command, env=ENV) as program:
        assert program.read_until(shows_step(5))
        # A third drawing has begun after the guardian got its order: the watcher thread handles its commands in order.
        assert program.read_until(lambda _: program.output.count(END_OF_DRAWING) > 2)
        pid = program.emulator.rows()[0]
        suspend_between_drawings(program, int(pid))
        os.kill(int(pid), signal.SIGKILL)
        assert program.read_until(lambda rows: "next" in rows and program.emulator.screen.margins is None)
        assert [row for row in program.emulator.all_rows() if row] == [pid, "before", "next"]


def has_stopped(program, times):
    return program.emulator.all_rows().count("stopped by SIGTSTP") == times


def test_the_terminal_is_free_while_the_program_is_suspended(fifo):
    """The view is drawn all the time, so Ctrl-Z mostly comes during a drawing.

    The kernel then discards the end of the drawing, and the cursor may be in the rows of the view.
    """
    shell = [str(TESTS / "support" / "job_shell.py"), PROGRAM]
    with Program(*shell, "report_and_wait_for_fifo", "3", fifo.path, "5", "hurry=True", env=ENV, rows=60) as program:
        for number in range(1, 11):
            assert program.read_until(shows_step(5))
            program.type(b"\x1a")
            assert program.read_until(lambda _, number=number: has_stopped(program, number))
            rows = program.emulator.rows()
            assert program.emulator.screen.margins is None
            assert not any("step 5 of 8" in row or "running" in row for row in rows), "\n".join(rows)
            program.type(b"fg\r")
        assert program.read_until(shows_step(5))
        fifo.close()
        assert program.read_until(lambda rows: "ended with 0" in rows)
        last = "mpwatch: step 8 of 8 (100 %); loss 0.25; 3 ranks returned"
        assert [row for row in program.emulator.all_rows() if row][-3:] == [last, "after None None None", "ended with 0"]
        assert program.end() == 0


def test_the_terminal_is_free_if_an_observer_runs_at_the_suspension(fifo):
    shell = [str(TESTS / "support" / "job_shell.py"), PROGRAM]
    with Program(*shell, "print_and_report", "3", fifo.path, "20", "suspends_itself=True", env=ENV) as program:
        assert program.read_until(lambda _: has_stopped(program, 1))
        drawings = program.output.count(END_OF_DRAWING)
        assert drawings
        assert program.emulator.screen.margins is None
        assert not any("running" in row for row in program.emulator.rows())
        program.type(b"fg\r")
        assert program.read_until(lambda _: program.output.count(END_OF_DRAWING) > drawings)
        fifo.close()
        assert program.read_until(lambda rows: "ended with 0" in rows)
        assert program.end() == 0


def test_no_view_with_progress_false(fifo):
    fifo.close()
    with start_program("report_and_wait_for_fifo", 2, "/dev/null", 5, "progress=False") as program:
        assert program.end() == 0
        assert [row for row in program.emulator.all_rows() if row] == ["before", "after None None"]


@pytest.mark.parametrize("size", [(0, 0), (80, 0)], ids=str)
def test_lines_in_a_terminal_that_does_not_know_its_size(size):
    class ProgramWithoutSize(Program):
        def resize(self, columns, rows):
            super().resize(*size)

    with ProgramWithoutSize(PROGRAM, "report_and_wait_for_fifo", "2", "/dev/null", "8", "progress=True", env=ENV) as program:
        assert program.end() == 0
    assert b"\nmpwatch: step 8 of 8 (100 %); " in program.output


def test_the_report_of_a_failure_is_printed_below(fifo):
    with start_program("report_and_wait_for_fifo", 3, fifo.path, "'three'", "progress=True") as program:
        assert program.end() == 1
        rows = [row for row in program.emulator.all_rows() if row]
        assert "TypeError: report() takes step as an int, not a str" in rows
        assert program.emulator.screen.margins is None


@pytest.mark.parametrize("progress", ["None", "True"])
def test_a_terminal_where_rich_is_not_installed(fifo, tmp_path, progress):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['rich'] = sys.modules['rich.console'] = None")
    env = {**ENV, "PYTHONPATH": os.pathsep.join([str(tmp_path), ENV["PYTHONPATH"]])}
    with start_program(
        "report_and_wait_for_fifo", 3, fifo.path, 5, f"progress={progress}", "hurry=True", env=env
    ) as program:
        assert program.read_until(lambda rows: any("mpwatch: step 5" in row and "3 ranks running" in row for row in rows))
        fifo.close()
        assert program.end() == 0
        rows = [row for row in program.emulator.all_rows() if row]
    assert rows[0] == "before"
    assert rows[1].startswith("mpwatch: ")
    assert rows[-2:] == ["mpwatch: step 8 of 8 (100 %); loss 0.25; 3 ranks returned", "after None None None"]

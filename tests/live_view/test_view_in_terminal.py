"""The live view of real runs in real terminals."""

import os
import re
import signal

import pytest

pytest.importorskip("pyte")
pytest.importorskip("rich")

from live_view.reporting_functions import main
from support.programs import ENV, TESTS, command
from support.screens import Program

JOB_SHELL = str(TESTS / "support" / "job_shell.py")


@pytest.fixture
def fifo(tmp_path):
    """A FIFO: ranks that read from it go on when it is closed."""
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    with open(os.open(path, os.O_RDWR), "wb", buffering=0) as file:
        file.path = path
        yield file


def start_program(function, *args, env=None, columns=100, rows=30, **options):
    env = {name: value for name, value in ENV.items() if name != "PYTHONUNBUFFERED"} | (env or {})
    return Program(*command(main, function, args, options), env=env, columns=columns, rows=rows)


def text_rows(program):
    """Return the rows that are not empty, without the time of the run."""
    return [re.sub(r" after [\d.]+ s$", "", row) for row in program.emulator.all_rows() if row]


def test_printed_lines_are_whole_and_not_mixed_with_the_view(fifo):
    with start_program("print_and_report", fifo.path, 100, progress=True, columns=110, rows=20) as program:
        seen = set()

        def has_enough_drawings(rows):
            if "rank" in rows[-3] and all(row[:4].strip() for row in rows[-2:]):  # the drawing is complete
                seen.add(tuple(rows[-3:]))
            return len(seen) > 6

        assert program.read_until(has_enough_drawings)
        assert {tuple(row.split()[0] for row in rows) for rows in seen} == {("rank", "0", "1")}
        fifo.close()
        assert program.end() == 0
        printed = text_rows(program)
    assert printed[0] == "before"
    after = re.fullmatch(r"after (\d+) (\d+)", printed.pop())
    assert re.fullmatch(r"mpwatch: step \d+ of 1000000 \(0 %\); loss [\d.e-]+; 2 ranks returned", printed.pop())
    for rank in range(2):
        mine = [row for row in printed[1:] if row.startswith(f"<{rank} ")]
        assert mine == [f"<{rank} {n} {'=' * (n % 100)}>" for n in range(int(after[rank + 1]))]
    assert len(printed) == 1 + sum(map(int, after.groups()))


LAST_LINE = "mpwatch: step 8 of 8 (100 %); loss 0.25; 2 ranks returned"


def shows_step(step):
    return lambda rows: any(f"step {step} of 8" in row for row in rows) and sum("running" in row for row in rows[-2:]) == 2


def test_a_run_in_a_terminal_that_changes_its_size(fifo):
    with start_program("report_and_wait_for_fifo", fifo.path, 3, progress=True) as program:
        assert program.read_until(shows_step(3))
        first, *others = program.emulator.rows()[:-4]
        assert (first, any(others)) == ("before", False)
        program.emulator.screen.resize(40, 120)
        program.resize(120, 40)

        def is_drawn_once(rows):  # an incomplete drawing has fewer rows
            is_resized = program.emulator.screen.margins == (0, 35)
            return is_resized and shows_step(3)(rows) and sum("running" in row for row in rows) == 3

        assert program.read_until(is_drawn_once)
        fifo.close()
        assert program.end() == 0
        assert text_rows(program) == ["before", LAST_LINE, "after None None"]
        assert program.emulator.screen.margins is None


def test_by_default_the_view_appears_when_a_rank_reports(fifo):
    with start_program("report_and_wait_for_fifo", fifo.path, 5) as program:
        assert program.read_until(shows_step(5))
        program.type(b"\x03")
        assert program.end() == -signal.SIGINT
        rows = text_rows(program)
        assert "KeyboardInterrupt" in rows
        assert rows[-1] == "  last reports: ranks 0-1 at step 5 of 8"
        assert "mpwatch: step 5 of 8 (62 %); loss 0.5; 2 ranks stopped" in rows
        assert not any("━" in row for row in rows)
        assert program.emulator.screen.margins is None


def test_the_terminal_is_free_while_the_program_is_suspended_or_in_the_background(fifo):
    def is_free(program):
        return program.emulator.screen.margins is None and not any("running" in row for row in program.emulator.rows())

    def is_drawn(rows):
        return "step" in rows[-4] and "running" in rows[-1]

    arguments = command(main, "print_and_report", (fifo.path, 20), {"progress": True})
    with Program(JOB_SHELL, *arguments, env=ENV) as program:
        for times in (1, 2, 3):
            assert program.read_until(is_drawn)
            program.type(b"\x1a")
            assert program.read_until(lambda _, n=times: program.emulator.all_rows().count("stopped by SIGTSTP") == n)
            assert is_free(program)
            if times == 2:
                program.type(b"bg\r")
                assert program.read_until(lambda _: "in the background" in program.emulator.all_rows())
                printed = len(text_rows(program))
                assert program.read_until(lambda _, printed=printed: len(text_rows(program)) > printed + 500)
                assert is_free(program)
            program.type(b"fg\r")
        assert program.read_until(is_drawn)
        fifo.close()
        assert program.read_until(lambda rows: "ended with 0" in rows)
        assert program.end() == 0
        assert re.fullmatch(r"mpwatch: step \d+ of 1000000 .* 2 ranks returned", text_rows(program)[-3])


def test_no_view_with_progress_false():
    with start_program("report_and_wait_for_fifo", "/dev/null", 5, progress=False) as program:
        assert program.end() == 0
        assert text_rows(program) == ["before", "after None None"]


def test_a_terminal_where_rich_is_not_installed(fifo, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['rich'] = sys.modules['rich.console'] = None")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), ENV["PYTHONPATH"]])}
    with start_program("report_and_wait_for_fifo", fifo.path, 5, env=path) as program:
        assert program.read_until(lambda rows: rows[1].startswith("mpwatch: step 5 of 8"))
        fifo.close()
        assert program.end() == 0
        first, *_, last, after = text_rows(program)
    assert (first, last, after) == ("before", LAST_LINE, "after None None")

"""The live view in a terminal: the escape sequences, as an emulator understands them; and real runs in real ones."""

import os
import pty
import re
import signal
import sys
import termios
from contextlib import closing, suppress

import pytest

pytest.importorskip("pyte")
pytest.importorskip("rich")

from programs import ENV, HERE
from screens import Emulator, Program
from test_view_model import status, steps_of

from mpwatch.view import choice, places, terminal
from mpwatch.view.model import Tracker
from mpwatch.view.region import Region, at_line_start
from mpwatch.view.table import Rows
from mpwatch.view.terminal import TerminalDisplay

COLUMNS, ROWS = 40, 10
VIEW = ["== one ==", "== two =="]


@pytest.fixture
def emulator():
    return Emulator(COLUMNS, ROWS)


def send(emulator, text):
    emulator.feed(text.replace("\n", "\r\n").encode())


def draw(emulator, region, lines, **more):
    emulator.feed(region.draw(emulator.screen.columns, emulator.screen.lines, lines, **more).encode())


def numbered(first, last):
    return [f"line {n}" for n in range(first, last + 1)]


# --- the rows that are kept, by themselves


@pytest.mark.parametrize("before", [0, 1, 7, 8, 9, 10, 30], ids=lambda n: f"{n} lines before")
@pytest.mark.parametrize("rest", ["", "half a line"])
def test_what_is_printed_scrolls_above_the_view(emulator, before, rest):
    region = Region()
    send(emulator, "".join(f"line {n}\n" for n in range(before)) + rest)
    for n in range(before, before + 20):
        draw(emulator, region, [*VIEW, f"picture {n}"])
        assert emulator.rows()[-3:] == [*VIEW, f"picture {n}"]
        send(emulator, (" goes on" if rest and n == before else f"line {n}") + "\n")
    draw(emulator, region, [*VIEW, "last"])
    send(emulator, region.release())
    assert not any(mark in row for row in emulator.everything() for mark in ("==", "picture", "last"))
    printed = [row for row in emulator.everything() if row]
    first_line = "half a line goes on" if rest else f"line {before}"
    assert printed == [*numbered(0, before - 1), first_line, *numbered(before + 1, before + 19)]
    assert emulator.screen.margins is None


def test_the_cursor_stays_where_it_was(emulator):
    region = Region()
    send(emulator, "one\ntwo\nthr")
    draw(emulator, region, VIEW)
    assert emulator.cursor == (2, 3)
    draw(emulator, region, VIEW)
    assert emulator.cursor == (2, 3)
    send(emulator, region.release())
    assert emulator.cursor == (2, 3)
    assert emulator.rows()[:4] == ["one", "two", "thr", ""]


def test_a_view_that_grows_and_shrinks(emulator):
    region = Region()
    send(emulator, "".join(f"{line}\n" for line in numbered(1, 8)))
    for height in (1, 5, 2, 4, 0, 3):
        draw(emulator, region, [f"v{n} of {height}" for n in range(height)])
        send(emulator, f"after {height}\n")
        rows = emulator.rows()
        assert rows[ROWS - height :] == [f"v{n} of {height}" for n in range(height)]
        assert not any("of" in row for row in rows[: ROWS - height])
    send(emulator, region.release())
    text = [row for row in emulator.everything() if row]
    assert text == [*numbered(1, 8), *[f"after {height}" for height in (1, 5, 2, 4, 0, 3)]]


@pytest.mark.parametrize(("columns", "rows"), [(40, 14), (60, 10), (60, 20)])
def test_a_terminal_that_grows(emulator, columns, rows):
    region = Region()
    send(emulator, "".join(f"{line}\n" for line in numbered(1, 8)))
    draw(emulator, region, VIEW)
    emulator.screen.resize(rows, columns)
    draw(emulator, region, VIEW)
    send(emulator, "more\n")
    assert emulator.rows()[-2:] == VIEW
    assert sum("==" in row for row in emulator.everything()) == 2


def test_somebody_else_may_have_had_the_terminal(emulator):
    """It was cleared and put back to how it began, say, while this program was stopped."""
    region = Region()
    draw(emulator, region, VIEW)
    emulator.feed(b"\x1bc")
    send(emulator, "".join(f"{line}\n" for line in numbered(1, 12)))
    draw(emulator, region, VIEW, is_sure=False)
    send(emulator, "more\n")
    assert emulator.rows() == [*numbered(7, 12), "more", "", *VIEW]


def test_a_row_that_is_too_wide_is_cut(emulator):
    draw(emulator, Region(), ["x" * 70, "below"])
    assert emulator.rows()[-2:] == ["x" * COLUMNS, "below"]


def test_colours_of_what_is_printed_are_not_those_of_the_view(emulator):
    region = Region()
    send(emulator, "\x1b[31mred")
    draw(emulator, region, ["\x1b[32mgreen"])
    send(emulator, "more")
    cells = emulator.screen.buffer
    assert {cells[0][n].fg for n in range(7)} == {"red"}
    assert cells[ROWS - 1][0].fg == "green"


def test_what_was_never_kept_is_not_given_back():
    region = Region()
    assert region.release() == region.draw(COLUMNS, ROWS, []) == ""
    draw_it = region.draw(COLUMNS, ROWS, VIEW)
    assert region.release() == region.release() != ""
    region.forget()
    assert region.release() == ""
    assert region.draw(COLUMNS, ROWS, VIEW) == draw_it


@pytest.mark.parametrize("column", [0, 1, 20, COLUMNS - 1, COLUMNS])
def test_a_line_of_its_own(emulator, column):
    send(emulator, "x" * column + at_line_start(COLUMNS) + "mine")
    assert [row for row in emulator.rows() if row] == [*(["x" * column] if column else []), "mine"]


# --- what is drawn there


def lines_of(picture, columns=100, rows=40):
    return [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in Rows("utf-8").render(picture, columns, rows)]


def test_a_line_a_rank():
    tracker = Tracker()
    tracker.see(steps_of(0, 0, cpu_seconds=0.0))
    more = {"memory": 512_000_000, "cpu_seconds": 1.0, "heartbeat_at": 1.0, "metrics": {"loss": 0.5, "[b]x": 1.0}}
    overall, head, *ranks = lines_of(tracker.see(steps_of(25, 50, at=2.0, **more)))
    assert re.fullmatch(
        r"[━╸╺ ]{20} step 25 of 100 \(25 %\), 12.5 steps/s, 6.0 s left; loss 0.5, \[b\]x 1; 2 ranks.*", overall
    )
    assert head.split("  ")[0] == "rank"
    assert " ".join(ranks[1].split()) == "1 at work 50 of 100 25 loss 0.5, [b]x 1 512 MB 50 % 1.0 s ago"


def test_what_has_no_room_is_left_out():
    picture = Tracker().see(steps_of(*range(10), metrics={"a metric of a long name": 0.5}))
    assert len(lines_of(picture, rows=24)) == 12
    assert all(len(line) <= 60 for line in lines_of(picture, columns=60))
    assert "memory" not in lines_of(picture, columns=60)[1]
    assert lines_of(picture, rows=22)[1].split()[0] == "ranks"
    assert len(lines_of(picture, rows=4)) == 1
    assert lines_of(picture, rows=3) == lines_of(picture, columns=19) == []


def test_many_ranks_are_folded():
    lines = lines_of(Tracker().see(steps_of(*range(1, 18))))
    assert [line.split()[0] for line in lines[1:]] == ["ranks", "steps", "slowest"]


def test_a_terminal_without_unicode():
    (line, *_) = Rows("ascii").render(Tracker().see([status(step=50)]), 100, 40)
    assert re.sub(r"\x1b\[[\d;]*m", "", line).isascii()
    assert "step 50" in line


# --- a terminal


class Terminal:
    """Of somebody's: `fd` is the end that programs have."""

    def __init__(self):
        self._other, self.fd = pty.openpty()
        os.set_blocking(self._other, False)

    def read(self):
        """What has been written to it."""
        with suppress(BlockingIOError):
            return os.read(self._other, 1 << 16)
        return b""

    def close(self):
        os.close(self._other)
        os.close(self.fd)


@pytest.fixture
def ours():
    with closing(Terminal()) as found:
        yield found


def test_nobody_elses_terminal_is_drawn_in(ours):
    assert not places.is_foreground(ours.fd)
    with open("/dev/null") as file:
        assert not places.is_foreground(file.fileno())
    display = TerminalDisplay(ours.fd, Rows("utf-8"), "utf-8")
    display.show(Tracker().see([status(step=1)]))
    display.leave(Tracker().see([status(step=1)]))
    assert display.has_left


@pytest.fixture
def in_foreground(monkeypatch):
    """Whether this process is, as far as the view can tell."""
    state = {"is": True}
    monkeypatch.setattr(terminal, "is_foreground", lambda fd: state["is"])
    return state


def test_while_in_the_background_the_terminal_is_left_to_others(ours, in_foreground, emulator):
    termios.tcsetwinsize(ours.fd, (ROWS, COLUMNS))
    display, picture = TerminalDisplay(ours.fd, Rows("utf-8"), "utf-8"), Tracker().see([status(step=1)])
    for is_there in (True, False, True):
        in_foreground["is"] = is_there
        display.show(picture)
        emulator.feed(ours.read())
        assert ("step 1 of 100" in emulator.rows()[-3]) is is_there
        assert (emulator.screen.margins is not None) is is_there
    in_foreground["is"] = False
    display.leave(picture)
    assert not any(emulator.feed(ours.read()).everything())


def test_it_is_put_in_order_though_that_was_interrupted(ours, in_foreground, emulator, monkeypatch):
    assert in_foreground["is"]
    termios.tcsetwinsize(ours.fd, (ROWS, COLUMNS))
    display, picture = TerminalDisplay(ours.fd, Rows("utf-8"), "utf-8"), Tracker().see([status(step=1)])
    display.show(picture)
    assert emulator.feed(ours.read()).screen.margins is not None

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(terminal, "_takes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            display.leave(picture)
    display.leave(picture)
    assert emulator.feed(ours.read()).screen.margins is None
    assert " ".join(row for row in emulator.everything() if row) == "mpwatch: step 1 of 100 (1 %); 1 rank at work"


def test_a_terminal_that_takes_nothing_is_left_alone(ours, in_foreground, monkeypatch):
    monkeypatch.setattr(terminal, "LAST_SECONDS", 0.01)
    display, picture = TerminalDisplay(ours.fd, Rows("utf-8"), "utf-8"), Tracker().see([status(step=1)])
    termios.tcsetwinsize(ours.fd, (ROWS, COLUMNS))
    display.show(picture)
    os.set_blocking(ours.fd, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(ours.fd, b"x" * 10_000)
    os.set_blocking(ours.fd, True)
    display.show(picture)
    display.leave(picture)
    assert display.has_left


def test_there_is_one_view_in_a_terminal_at_a_time(ours):
    first = TerminalDisplay(ours.fd, Rows("utf-8"), "utf-8")
    assert not terminal.is_free()
    first.leave(Tracker().see([status()]))
    assert terminal.is_free()
    second = TerminalDisplay(ours.fd, Rows("utf-8"), "utf-8")
    assert not terminal.is_free()
    del second  # forgotten
    assert terminal.is_free()


class NoStream:
    def fileno(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("stream", [None, NoStream(), object()])
def test_streams_that_are_none(monkeypatch, stream):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    assert choice.view_for(None) is None
    assert choice.view_for(False) is None


# --- real runs


@pytest.fixture
def gate(tmp_path):
    """Ranks that read from it go on when it is closed."""
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    with open(os.open(path, os.O_RDWR), "wb", buffering=0) as door:
        door.path = path
        yield door


def watched(*args, env=ENV, **more):
    env = {name: value for name, value in env.items() if name != "PYTHONUNBUFFERED"}
    return Program(str(HERE / "watched.py"), *map(str, args), env=env, **more)


def test_what_ranks_print_is_whole_and_apart_from_the_view(gate):
    with watched("prints_while_it_reports", 3, gate.path, 100, "hurry=True", columns=110, rows=20) as program:
        seen = []

        def is_enough(rows):
            is_drawn = "rank" in rows[-4] and all(row[:4].strip() for row in rows[-3:])  # and not half of it, so far
            if is_drawn and (not seen or seen[-1] != rows[-4:]):
                seen.append(rows[-4:])
            return len(seen) > 20

        assert program.read_until(is_enough)
        for rows in seen:
            assert [row.split()[0] for row in rows] == ["rank", "0", "1", "2"]
        gate.close()
        assert program.end() == 0
        printed = [row for row in program.emulator.everything() if row]
    assert printed[0] == "before"
    after = re.fullmatch(r"after (\d+) (\d+) (\d+)", printed.pop())
    assert re.fullmatch(r"mpwatch: step \d+ of 1000000 \(0 %\); loss [\d.e-]+; 3 ranks returned", printed.pop())
    for rank in range(3):
        mine = [row for row in printed[1:] if row.startswith(f"<{rank} ")]
        assert mine == [f"<{rank} {n} {'=' * (n % 100)}>" for n in range(int(after[rank + 1]))]
    assert len(printed) == 1 + sum(map(int, after.groups()))


def has_reported(step):
    return lambda rows: any(f"step {step} of 8" in row for row in rows) and sum("at work" in row for row in rows[-3:]) == 3


def test_a_run_in_a_terminal_that_changes_its_size(gate):
    with watched("waits_at_the_gate", 3, gate.path, 3, "hurry=True") as program:
        assert program.read_until(has_reported(3))
        rows = program.emulator.rows()
        assert rows[0] == "before"
        assert not any(rows[1:-5])
        program.emulator.screen.resize(40, 120)
        program.resize(120, 40)
        assert program.read_until(lambda rows: has_reported(3)(rows) and program.emulator.screen.margins == (0, 34))
        assert sum("at work" in row for row in program.emulator.rows()) == 4
        gate.close()
        assert program.end() == 0
        last = "mpwatch: step 8 of 8 (100 %); loss 0.25; 3 ranks returned"
        assert [row for row in program.emulator.everything() if row] == ["before", last, "after None None None"]
        assert program.emulator.screen.margins is None


def test_without_being_asked_it_is_there_once_a_rank_reports(gate):
    with watched("waits_at_the_gate", 3, gate.path, 5, "hurry=True") as program:
        assert program.read_until(has_reported(5))
        program.type(b"\x03")
        assert program.end() == -signal.SIGINT
        rows = [row for row in program.emulator.everything() if row]
        assert rows[-1] == "KeyboardInterrupt"
        assert "mpwatch: step 5 of 8 (62 %); loss 0.5; 3 ranks stopped" in rows
        assert not any("━" in row for row in rows)
        assert program.emulator.screen.margins is None


def test_not_if_it_is_not_wanted(gate):
    gate.close()
    with watched("waits_at_the_gate", 2, "/dev/null", 5, "progress=False") as program:
        assert program.end() == 0
        assert [row for row in program.emulator.everything() if row] == ["before", "after None None"]


def test_the_report_of_a_failure_comes_below(gate):
    with watched("waits_at_the_gate", 3, gate.path, "'three'", "progress=True") as program:
        assert program.end() == 1
        rows = [row for row in program.emulator.everything() if row]
        assert "TypeError: report() takes step as an int, not a str" in rows
        assert program.emulator.screen.margins is None


@pytest.mark.parametrize("progress", ["None", "True"])
def test_a_terminal_where_rich_is_not_installed(gate, tmp_path, progress):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['rich'] = sys.modules['rich.console'] = None")
    env = {**ENV, "PYTHONPATH": os.pathsep.join([str(tmp_path), ENV["PYTHONPATH"]])}
    with watched("waits_at_the_gate", 3, gate.path, 5, f"progress={progress}", "hurry=True", env=env) as program:
        assert program.read_until(lambda rows: any("mpwatch: step 5" in row and "3 ranks at work" in row for row in rows))
        gate.close()
        assert program.end() == 0
        rows = [row for row in program.emulator.everything() if row]
    assert rows[0] == "before"
    assert rows[1].startswith("mpwatch: ")
    assert rows[-2:] == ["mpwatch: step 8 of 8 (100 %); loss 0.25; 3 ranks returned", "after None None None"]

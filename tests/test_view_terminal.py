"""The live view in a terminal: the escape sequences, as an emulator understands them, and when they are written."""

import os
import pty
import re
import socket
import subprocess
import sys
import termios
from contextlib import closing, suppress

import pytest

pytest.importorskip("pyte")
pytest.importorskip("rich")

from pyte.modes import DECAWM
from screens import Emulator
from test_view_model import status, steps_of

from mpwatch.live_view import select, terminal, tty
from mpwatch.live_view.model import Tracker
from mpwatch.live_view.rich_rows import RichRenderer
from mpwatch.live_view.scroll_region import ScrollRegion, at_line_start
from mpwatch.live_view.terminal import TerminalDisplay
from mpwatch.watcher.processes.guardian import PROGRAM

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
    region = ScrollRegion()
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
    region = ScrollRegion()
    send(emulator, "one\ntwo\nthr")
    draw(emulator, region, VIEW)
    assert emulator.cursor == (2, 3)
    draw(emulator, region, VIEW)
    assert emulator.cursor == (2, 3)
    send(emulator, region.release())
    assert emulator.cursor == (2, 3)
    assert emulator.rows()[:4] == ["one", "two", "thr", ""]


def test_a_view_that_grows_and_shrinks(emulator):
    region = ScrollRegion()
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
    region = ScrollRegion()
    send(emulator, "".join(f"{line}\n" for line in numbered(1, 8)))
    draw(emulator, region, VIEW)
    emulator.screen.resize(rows, columns)
    draw(emulator, region, VIEW)
    send(emulator, "more\n")
    assert emulator.rows()[-2:] == VIEW
    assert sum("==" in row for row in emulator.everything()) == 2


def test_somebody_else_may_have_had_the_terminal(emulator):
    """It was cleared and put back to how it began, say, while this program was stopped."""
    region = ScrollRegion()
    draw(emulator, region, VIEW)
    emulator.feed(b"\x1bc")
    send(emulator, "".join(f"{line}\n" for line in numbered(1, 12)))
    draw(emulator, region, VIEW, is_sure=False)
    send(emulator, "more\n")
    assert emulator.rows() == [*numbered(7, 12), "more", "", *VIEW]


def test_a_row_that_is_too_wide_is_cut(emulator):
    draw(emulator, ScrollRegion(), ["x" * 70, "below"])
    assert emulator.rows()[-2:] == ["x" * COLUMNS, "below"]


def test_colours_of_what_is_printed_are_not_those_of_the_view(emulator):
    region = ScrollRegion()
    send(emulator, "\x1b[31mred")
    draw(emulator, region, ["\x1b[32mgreen"])
    send(emulator, "more")
    cells = emulator.screen.buffer
    assert {cells[0][n].fg for n in range(7)} == {"red"}
    assert cells[ROWS - 1][0].fg == "green"


def test_what_was_never_kept_is_not_given_back():
    region = ScrollRegion()
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
    return [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in RichRenderer("utf-8").render(picture, columns, rows)]


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
    (line, *_) = RichRenderer("ascii").render(Tracker().see([status(step=50)]), 100, 40)
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
        data = b""
        with suppress(BlockingIOError):
            while True:
                data += os.read(self._other, 1 << 16)
        return data

    def close(self):
        os.close(self._other)
        os.close(self.fd)


@pytest.fixture
def ours():
    with closing(Terminal()) as found:
        yield found


def test_nobody_elses_terminal_is_drawn_in(ours):
    assert not tty.is_foreground(ours.fd)
    with open("/dev/null") as file:
        assert not tty.is_foreground(file.fileno())
    display = TerminalDisplay(ours.fd, RichRenderer("utf-8"), "utf-8")
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
    display, picture = TerminalDisplay(ours.fd, RichRenderer("utf-8"), "utf-8"), Tracker().see([status(step=1)])
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
    display, picture = TerminalDisplay(ours.fd, RichRenderer("utf-8"), "utf-8"), Tracker().see([status(step=1)])
    display.show(picture)
    assert emulator.feed(ours.read()).screen.margins is not None

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(terminal, "takes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            display.leave(picture)
    display.leave(picture)
    assert emulator.feed(ours.read()).screen.margins is None
    assert " ".join(row for row in emulator.everything() if row) == "mpwatch: step 1 of 100 (1 %); 1 rank at work"


@pytest.mark.parametrize("fraction", [n / 20 for n in range(1, 20)])
def test_a_picture_that_was_cut_short_leaves_nothing(ours, in_foreground, emulator, monkeypatch, fraction):
    """By Ctrl-C, pressed twice, while a slow terminal takes it bit by bit."""
    termios.tcsetwinsize(ours.fd, (ROWS, COLUMNS))
    display, picture = TerminalDisplay(ours.fd, RichRenderer("utf-8"), "utf-8"), Tracker().see([status(step=1)])
    os.write(ours.fd, b"printed\n")
    display.show(picture)
    write = os.write

    def cut(fd, data):
        write(fd, data[: int(len(data) * fraction)])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", cut)
        with pytest.raises(KeyboardInterrupt):
            display.show(picture)
    display.leave(picture)
    write(ours.fd, b"after")
    emulator.feed(ours.read())
    assert emulator.rows()[:5] == ["printed", "mpwatch: step 1 of 100 (1 %); 1 rank at", "work", "after", ""]
    assert {emulator.screen.buffer[3][n].fg for n in range(5)} == {"default"}
    assert emulator.screen.margins is None
    assert DECAWM in emulator.screen.mode


def test_a_terminal_that_takes_nothing_is_left_alone(ours, in_foreground, monkeypatch):
    monkeypatch.setattr(terminal, "LAST_SECONDS", 0.01)
    display, picture = TerminalDisplay(ours.fd, RichRenderer("utf-8"), "utf-8"), Tracker().see([status(step=1)])
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


def test_a_terminal_without_a_name_has_a_view_too(ours, in_foreground, monkeypatch):
    def has_none(fd):
        raise OSError

    monkeypatch.setattr(os, "ttyname", has_none)
    termios.tcsetwinsize(ours.fd, (ROWS, COLUMNS))
    display = TerminalDisplay(ours.fd, RichRenderer("utf-8"), "utf-8")
    display.show(Tracker().see([status(step=1)]))
    assert display.repair is None
    assert b"step 1 of 100" in ours.read()


@pytest.mark.parametrize("is_there", [True, False])
def test_the_guardian_puts_a_terminal_in_order(ours, is_there):
    name = os.ttyname(ours.fd) if is_there else "/dev/nowhere"
    watcher, line = socket.socketpair()
    with watcher, line:
        watcher.sendall(f"=61 /dev/null\n=\n=6263 {name}\n".encode())
        watcher.close()
        subprocess.run([sys.executable, "-I", "-S", PROGRAM, str(line.fileno())], pass_fds=[line.fileno()], check=True)
    assert ours.read() == (b"bc" if is_there else b"")


def test_there_is_one_view_in_a_terminal_at_a_time(ours):
    first = TerminalDisplay(ours.fd, RichRenderer("utf-8"), "utf-8")
    assert not terminal.is_free()
    first.leave(Tracker().see([status()]))
    assert terminal.is_free()
    second = TerminalDisplay(ours.fd, RichRenderer("utf-8"), "utf-8")
    assert not terminal.is_free()
    del second  # forgotten
    assert terminal.is_free()


class Tee:
    """What people put in the place of sys.stderr, to keep it in a file as well."""

    def __init__(self, fd):
        self.fileno = lambda: fd


def test_a_stream_that_does_not_tell_its_encoding(ours, in_foreground, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(tty, "is_foreground", lambda fd: in_foreground["is"])
    monkeypatch.setattr(sys, "stderr", Tee(ours.fd))
    termios.tcsetwinsize(ours.fd, (ROWS, COLUMNS))
    view = select.view_for(None)
    view.show([status(step=1)])
    assert b"step 1 of 100" in ours.read()
    view.close([])


class NoStream:
    def fileno(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("stream", [None, NoStream(), object()])
def test_streams_that_are_none(monkeypatch, stream):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    assert select.view_for(None) is None
    assert select.view_for(False) is None

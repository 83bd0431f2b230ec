"""The live view in a terminal: which escape sequences are written, when, and what a terminal emulator makes of them."""

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

from live_view.test_view_model import status, statuses_with_steps
from mpwatch.live_view import select, terminal, tty
from mpwatch.live_view.model import SnapshotBuilder
from mpwatch.live_view.rich_rows import RichRenderer
from mpwatch.live_view.scroll_region import ScrollRegion, go_to_line_start
from mpwatch.live_view.terminal import TerminalDisplay
from mpwatch.watcher.processes.guardian import PROGRAM
from support.screens import Emulator

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


# --- ScrollRegion


@pytest.mark.parametrize("before", [0, 1, 7, 8, 9, 10, 30], ids=lambda n: f"{n} lines before")
@pytest.mark.parametrize("rest", ["", "half a line"])
def test_printed_lines_scroll_above_the_view(emulator, before, rest):
    region = ScrollRegion()
    send(emulator, "".join(f"line {n}\n" for n in range(before)) + rest)
    for n in range(before, before + 20):
        draw(emulator, region, [*VIEW, f"drawing {n}"])
        assert emulator.rows()[-3:] == [*VIEW, f"drawing {n}"]
        send(emulator, (" goes on" if rest and n == before else f"line {n}") + "\n")
    draw(emulator, region, [*VIEW, "last"])
    send(emulator, region.release())
    assert not any(mark in row for row in emulator.all_rows() for mark in ("==", "drawing", "last"))
    printed = [row for row in emulator.all_rows() if row]
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
    text = [row for row in emulator.all_rows() if row]
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
    assert sum("==" in row for row in emulator.all_rows()) == 2


def test_another_program_may_have_reset_the_terminal(emulator):
    """As when `reset` is run while this program is stopped."""
    region = ScrollRegion()
    draw(emulator, region, VIEW)
    emulator.feed(b"\x1bc")
    send(emulator, "".join(f"{line}\n" for line in numbered(1, 12)))
    draw(emulator, region, VIEW, is_state_known=False)
    send(emulator, "more\n")
    assert emulator.rows() == [*numbered(7, 12), "more", "", *VIEW]


def test_a_row_wider_than_the_terminal_is_cut(emulator):
    draw(emulator, ScrollRegion(), ["x" * 70, "below"])
    assert emulator.rows()[-2:] == ["x" * COLUMNS, "below"]


def test_the_view_does_not_change_the_colours_of_printed_text(emulator):
    region = ScrollRegion()
    send(emulator, "\x1b[31mred")
    draw(emulator, region, ["\x1b[32mgreen"])
    send(emulator, "more")
    cells = emulator.screen.buffer
    assert {cells[0][n].fg for n in range(7)} == {"red"}
    assert cells[ROWS - 1][0].fg == "green"


def test_the_view_is_removed_wherever_a_drawing_has_ended():
    """The kernel may write a part of a drawing only if the program is killed meanwhile."""
    region = ScrollRegion()
    region.draw(COLUMNS, ROWS, VIEW)
    for cut in range(len(region.draw(COLUMNS, ROWS, VIEW)) + 1):
        emulator, region = Emulator(COLUMNS, ROWS), ScrollRegion()
        send(emulator, "one\ntwo\n")
        draw(emulator, region, VIEW)
        send(emulator, region.draw(COLUMNS, ROWS, VIEW)[:cut])
        send(emulator, region.recover() + "next\n")
        assert [row.strip() for row in emulator.all_rows() if row] == ["one", "two", "next"], cut
        assert emulator.screen.margins is None
        assert DECAWM in emulator.screen.mode


@pytest.mark.parametrize("line", ["hal", "50 %\r"])
def test_an_unfinished_line_stays_when_the_view_is_removed(emulator, line):
    region = ScrollRegion()
    send(emulator, "one\n" + line)
    draw(emulator, region, VIEW)
    send(emulator, region.recover())
    assert [row for row in emulator.rows() if row] == ["one", line.strip()]


def test_nothing_is_released_before_rows_are_reserved():
    region = ScrollRegion()
    assert region.release() == region.recover() == region.draw(COLUMNS, ROWS, []) == ""
    draw_it = region.draw(COLUMNS, ROWS, VIEW)
    assert region.release() == region.release() != ""
    region.mark_released()
    assert region.release() == ""
    assert region.draw(COLUMNS, ROWS, VIEW) == draw_it


@pytest.mark.parametrize("column", [0, 1, 20, COLUMNS - 1, COLUMNS])
def test_go_to_line_start(emulator, column):
    send(emulator, "x" * column + go_to_line_start(COLUMNS) + "mine")
    assert [row for row in emulator.rows() if row] == [*(["x" * column] if column else []), "mine"]


# --- RichRenderer


def render_lines(snapshot, columns=100, rows=40):
    return [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in RichRenderer("utf-8").render(snapshot, columns, rows)]


def test_a_row_for_each_rank():
    tracker = SnapshotBuilder()
    tracker.update(statuses_with_steps(0, 0, cpu_seconds=0.0))
    more = {"memory": 512_000_000, "cpu_seconds": 1.0, "heartbeat_at": 1.0, "metrics": {"loss": 0.5, "[b]x": 1.0}}
    overall, head, *ranks = render_lines(tracker.update(statuses_with_steps(25, 50, at=2.0, **more)))
    assert re.fullmatch(
        r"[━╸╺ ]{20} step 25 of 100 \(25 %\), 12.5 steps/s, 6.0 s left; loss 0.5, \[b\]x 1; 2 ranks.*", overall
    )
    assert head.split("  ")[0] == "rank"
    assert " ".join(ranks[1].split()) == "1 running 50 of 100 25 loss 0.5, [b]x 1 512 MB 50 % 1.0 s ago"


def test_columns_and_rows_without_room_are_left_out():
    snapshot = SnapshotBuilder().update(statuses_with_steps(*range(10), metrics={"a metric of a long name": 0.5}))
    assert len(render_lines(snapshot, rows=24)) == 12
    assert all(len(line) <= 60 for line in render_lines(snapshot, columns=60))
    assert "memory" not in render_lines(snapshot, columns=60)[1]
    assert render_lines(snapshot, rows=22)[1].split()[0] == "ranks"
    assert len(render_lines(snapshot, rows=4)) == 1
    assert render_lines(snapshot, rows=3) == render_lines(snapshot, columns=19) == []


def test_many_ranks_are_summarized():
    lines = render_lines(SnapshotBuilder().update(statuses_with_steps(*range(1, 18))))
    assert [line.split()[0] for line in lines[1:]] == ["ranks", "steps", "slowest"]


def test_a_terminal_without_unicode():
    (line, *_) = RichRenderer("ascii").render(SnapshotBuilder().update([status(step=50)]), 100, 40)
    assert re.sub(r"\x1b\[[\d;]*m", "", line).isascii()
    assert "step 50" in line


# --- TerminalDisplay


class PseudoTerminal:
    """A pseudo-terminal. `fd` is the end that programs use."""

    def __init__(self):
        self._other, self.fd = pty.openpty()
        os.set_blocking(self._other, False)

    def read(self):
        """Return what has been written to it."""
        data = b""
        with suppress(BlockingIOError):
            while True:
                data += os.read(self._other, 1 << 16)
        return data

    def close(self):
        os.close(self._other)
        os.close(self.fd)


@pytest.fixture
def pty_terminal():
    with closing(PseudoTerminal()) as found:
        yield found


def test_a_terminal_of_another_session_is_not_drawn_in(pty_terminal):
    assert not tty.is_foreground(pty_terminal.fd)
    with open("/dev/null") as file:
        assert not tty.is_foreground(file.fileno())
    display = TerminalDisplay(pty_terminal.fd, RichRenderer("utf-8"), "utf-8")
    display.show(SnapshotBuilder().update([status(step=1)]))
    display.close(SnapshotBuilder().update([status(step=1)]))
    assert display.is_closed


@pytest.fixture
def foreground(monkeypatch):
    """Set whether the view takes this process for one in the foreground."""
    state = {"is_foreground": True}
    monkeypatch.setattr(terminal, "is_foreground", lambda fd: state["is_foreground"])
    return state


def test_no_rows_are_reserved_while_in_the_background(pty_terminal, foreground, emulator):
    termios.tcsetwinsize(pty_terminal.fd, (ROWS, COLUMNS))
    display, snapshot = (
        TerminalDisplay(pty_terminal.fd, RichRenderer("utf-8"), "utf-8"),
        SnapshotBuilder().update([status(step=1)]),
    )
    for is_there in (True, False, True):
        foreground["is_foreground"] = is_there
        display.show(snapshot)
        emulator.feed(pty_terminal.read())
        assert ("step 1 of 100" in emulator.rows()[-3]) is is_there
        assert (emulator.screen.margins is not None) is is_there
    foreground["is_foreground"] = False
    display.close(snapshot)
    assert not any(emulator.feed(pty_terminal.read()).all_rows())


def test_the_terminal_is_restored_after_an_interrupted_close(pty_terminal, foreground, emulator, monkeypatch):
    assert foreground["is_foreground"]
    termios.tcsetwinsize(pty_terminal.fd, (ROWS, COLUMNS))
    display, snapshot = (
        TerminalDisplay(pty_terminal.fd, RichRenderer("utf-8"), "utf-8"),
        SnapshotBuilder().update([status(step=1)]),
    )
    display.show(snapshot)
    assert emulator.feed(pty_terminal.read()).screen.margins is not None

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(terminal, "is_writable", interrupt)
        with pytest.raises(KeyboardInterrupt):
            display.close(snapshot)
    display.close(snapshot)
    assert emulator.feed(pty_terminal.read()).screen.margins is None
    assert "".join(row for row in emulator.all_rows() if row) == "mpwatch: step 1 of 100 (1 %); 1 rank running"


@pytest.mark.parametrize("fraction", [n / 20 for n in range(1, 20)])
def test_an_incomplete_drawing_leaves_nothing(pty_terminal, foreground, emulator, monkeypatch, fraction):
    """As by Ctrl-C, pressed twice, while a slow terminal takes the drawing in small pieces."""
    termios.tcsetwinsize(pty_terminal.fd, (ROWS, COLUMNS))
    display, snapshot = (
        TerminalDisplay(pty_terminal.fd, RichRenderer("utf-8"), "utf-8"),
        SnapshotBuilder().update([status(step=1)]),
    )
    os.write(pty_terminal.fd, b"printed\n")
    display.show(snapshot)
    write = os.write

    def cut(fd, data):
        write(fd, data[: int(len(data) * fraction)])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", cut)
        with pytest.raises(KeyboardInterrupt):
            display.show(snapshot)
    display.close(snapshot)
    write(pty_terminal.fd, b"after")
    emulator.feed(pty_terminal.read())
    assert emulator.rows()[:5] == ["printed", "mpwatch: step 1 of 100 (1 %); 1 rank run", "ning", "after", ""]
    assert {emulator.screen.buffer[3][n].fg for n in range(5)} == {"default"}
    assert emulator.screen.margins is None
    assert DECAWM in emulator.screen.mode


def test_a_terminal_that_takes_no_output_is_left_alone(pty_terminal, foreground, monkeypatch):
    monkeypatch.setattr(terminal, "WRITE_SECONDS", 0.01)
    display, snapshot = (
        TerminalDisplay(pty_terminal.fd, RichRenderer("utf-8"), "utf-8"),
        SnapshotBuilder().update([status(step=1)]),
    )
    termios.tcsetwinsize(pty_terminal.fd, (ROWS, COLUMNS))
    display.show(snapshot)
    os.set_blocking(pty_terminal.fd, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(pty_terminal.fd, b"x" * 10_000)
    os.set_blocking(pty_terminal.fd, True)
    display.show(snapshot)
    display.close(snapshot)
    assert display.is_closed


def test_a_terminal_without_a_name_has_a_view(pty_terminal, foreground, monkeypatch):
    def raise_oserror(fd):
        raise OSError

    monkeypatch.setattr(os, "ttyname", raise_oserror)
    termios.tcsetwinsize(pty_terminal.fd, (ROWS, COLUMNS))
    display = TerminalDisplay(pty_terminal.fd, RichRenderer("utf-8"), "utf-8")
    display.show(SnapshotBuilder().update([status(step=1)]))
    assert display.terminal_restore is None
    assert b"step 1 of 100" in pty_terminal.read()


@pytest.mark.parametrize("is_there", [True, False])
def test_the_guardian_restores_a_terminal(pty_terminal, is_there):
    name = os.ttyname(pty_terminal.fd) if is_there else "/dev/nowhere"
    watcher, line = socket.socketpair()
    with watcher, line:
        watcher.sendall(f"=61 /dev/null\n=\n=6263 {name}\n".encode())
        watcher.close()
        subprocess.run([sys.executable, "-I", "-S", PROGRAM, str(line.fileno())], pass_fds=[line.fileno()], check=True)
    assert pty_terminal.read() == (b"bc" if is_there else b"")


def test_a_terminal_has_one_view_at_a_time(pty_terminal):
    first = TerminalDisplay(pty_terminal.fd, RichRenderer("utf-8"), "utf-8")
    assert not terminal.is_terminal_free()
    first.close(SnapshotBuilder().update([status()]))
    assert terminal.is_terminal_free()
    second = TerminalDisplay(pty_terminal.fd, RichRenderer("utf-8"), "utf-8")
    assert not terminal.is_terminal_free()
    del second  # never closed
    assert terminal.is_terminal_free()


class StreamWithoutEncoding:
    """A replacement for sys.stderr, such as one that copies it to a file."""

    def __init__(self, fd):
        self.fileno = lambda: fd


def test_a_stream_without_an_encoding(pty_terminal, foreground, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(tty, "is_foreground", lambda fd: foreground["is_foreground"])
    monkeypatch.setattr(sys, "stderr", StreamWithoutEncoding(pty_terminal.fd))
    termios.tcsetwinsize(pty_terminal.fd, (ROWS, COLUMNS))
    view = select.select_view(None)
    view.show([status(step=1)])
    assert b"step 1 of 100" in pty_terminal.read()
    view.close([])


class BrokenStream:
    def fileno(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("stream", [None, BrokenStream(), object()])
def test_objects_that_are_no_streams(monkeypatch, stream):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    assert select.select_view(None) is None
    assert select.select_view(False) is None

"""The escape sequences that reserve the last rows of a terminal, as a terminal emulator understands them."""

import pytest

pytest.importorskip("pyte")
pytest.importorskip("rich")

from pyte.modes import DECAWM

from mpwatch.live_view.terminal import ScrollRegion
from support.screens import Emulator

COLUMNS, ROWS = 40, 10
VIEW = ["== one ==", "== two =="]


@pytest.fixture
def emulator():
    return Emulator(COLUMNS, ROWS)


def send(emulator, text):
    emulator.feed(text.replace("\n", "\r\n").encode())


def draw(emulator, region, lines):
    emulator.feed(region.draw(emulator.screen.columns, emulator.screen.lines, lines).encode())


def text_rows(emulator):
    return [row for row in emulator.all_rows() if row]


def test_a_view_that_grows_and_shrinks(emulator):
    region, heights, before = ScrollRegion(), (1, 5, 2, 4, 0, 3), [f"line {n}" for n in range(8)]
    send(emulator, "\n".join([*before, ""]))
    for height in heights:
        draw(emulator, region, [f"v{n} of {height}" for n in range(height)])
        send(emulator, f"after {height}\n")
        rows = emulator.rows()
        assert rows[ROWS - height :] == [f"v{n} of {height}" for n in range(height)]
        assert not any("of" in row for row in rows[: ROWS - height])
    send(emulator, region.release())
    assert text_rows(emulator) == [*before, *[f"after {height}" for height in heights]]


def test_the_view_is_removed_wherever_a_drawing_has_ended():
    """At Ctrl-Z the kernel discards what the terminal has not shown yet."""
    region = ScrollRegion()
    region.draw(COLUMNS, ROWS, VIEW)
    for cut in range(len(region.draw(COLUMNS, ROWS, VIEW)) + 1):
        emulator, region = Emulator(COLUMNS, ROWS), ScrollRegion()
        send(emulator, "one\ntwo\n")
        draw(emulator, region, VIEW)
        send(emulator, region.draw(COLUMNS, ROWS, VIEW)[:cut])
        send(emulator, region.release() + "next\n")
        assert [row.strip() for row in text_rows(emulator)] == ["one", "two", "next"], cut
        assert emulator.screen.margins is None
        assert DECAWM in emulator.screen.mode

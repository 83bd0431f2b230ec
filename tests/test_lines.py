"""What the bytes of a stream look like as lines, and how the lines of several ranks are put together. No clock, no pipe."""

import math

import pytest

from mpwatch.watcher.output.line_assembler import LONGEST, LineAssembler, prefixed
from mpwatch.watcher.output.multiplexer import HOLD_BYTES, HOLD_SECONDS, SHOW_SECONDS, OutputMultiplexer, RankStream
from mpwatch.watcher.output.stderr_tail import KEPT, LAST_LINES, StderrTail


def seen(*portions):
    lines = LineAssembler()
    return b"".join(map(lines.feed, portions)) + lines.end()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (b"a\nb\n", b"a\nb\n"),
        (b"a\n\nb", b"a\n\nb\n"),
        (b"\n", b"\n"),
        (b"", b""),
        (b"a\r\nb\r\n", b"a\nb\n"),
        (b"10%\r20%\r30%\n", b"30%\n"),
        (b"\r10%\r20%", b"20%\n"),
        (b"10%\r20%\r", b"20%\n"),
        (b"10%\r\r\n20%\n", b"10%\n20%\n"),
        (b"a\nb\rc\nd\n", b"a\nc\nd\n"),
        (b"\x1b[31mred\x1b[0m\n", b"\x1b[31mred\x1b[0m\n"),
        (b"one\n\x1b[Atwo\x1b[2K\x1b[?25l\n", b"one\ntwo\n"),
        (b"\xff\xfe\n", b"\xff\xfe\n"),
    ],
)
def test_lines_are_as_a_terminal_shows_them_however_they_come(written, read):
    assert seen(written) == read
    assert seen(*(bytes([byte]) for byte in written)) == read


def test_a_bar_that_is_written_again_and_again_takes_no_memory():
    lines = LineAssembler()
    for percent in range(100_000):
        assert lines.feed(b"\r%d%%" % percent) == b""
    assert lines.rest == b"99999%"
    assert len(lines._rest) < 10


def test_returns_take_no_time_and_no_memory():
    """If each were looked at from each one before it, this would take minutes."""
    lines = LineAssembler()
    for _ in range(30):
        assert lines.feed(b"\r" * (1 << 15)) == b""
    assert len(lines._rest) < 2
    assert lines.feed(b"end\r\r\n") == b"end\n"


def test_a_line_without_an_end_is_shown_in_pieces():
    lines = LineAssembler()
    portion = b"x" * (LONGEST // 2)
    assert [len(lines.feed(portion)) for _ in range(4)] == [0, 0, 3 * LONGEST // 2 + 1, 0]


def test_prefixes():
    assert prefixed(b"a\n\nb\n", b"> ") == b"> a\n> \n> b\n"
    assert prefixed(b"", b"> ") == b""
    assert prefixed(b"a\n", b"") == b"a\n"


class Heard:
    """A mixer, with a clock of its own, and what has been written so far."""

    def __init__(self, *, is_mixed=False, may_be_mixed=True):
        self.mixer = OutputMultiplexer(is_mixed=is_mixed, may_be_mixed=may_be_mixed)
        self.voices = {}
        self.now = 100.0

    def voice(self, rank, stream="stdout"):
        return self.voices.setdefault((rank, stream), RankStream(rank, stream, lambda: b"[%d] " % rank))

    def hear(self, rank, data, stream="stdout"):
        self.mixer.hear(self.voice(rank, stream), data, self.now)
        return self.taken()

    def after(self, seconds):
        self.now += seconds
        self.mixer.expire(self.now)
        return self.taken()

    def pause(self):
        self.mixer.pause(self.now)
        return self.taken()

    def end(self, rank):
        self.mixer.end(self.voice(rank))
        return self.taken()

    def taken(self):
        return b"".join(data for _, data in self.mixer.take())


def test_who_is_alone_is_passed_on_as_it_comes():
    heard = Heard()
    assert heard.hear(0, b"a\n\r10%") == b""
    assert heard.mixer.due_at == heard.now + HOLD_SECONDS
    assert heard.after(HOLD_SECONDS) == b"a\n\r10%"
    assert heard.mixer.due_at == math.inf
    assert heard.hear(0, b"\r20%") == b"\r20%"
    assert heard.hear(0, b"oh", stream="stderr") == b"oh"
    assert heard.pause() == b""


def test_a_rank_that_is_known_to_be_the_only_one_waits_for_nobody():
    assert Heard(may_be_mixed=False).hear(0, b"\r1") == b"\r1"


def test_ranks_that_speak_at_about_the_same_time_have_prefixes_from_the_first_line_on():
    heard = Heard()
    assert heard.hear(0, b"a\n") == b""
    assert heard.hear(1, b"b\nc") == b"[0] a\n[1] b\n"
    assert heard.pause() == b"[1] c\n"


def test_who_has_ended_meanwhile_is_heard_with_the_others():
    heard = Heard()
    assert heard.hear(0, b"a\nb") == heard.end(0) == b""
    assert heard.hear(1, b"c\n") == b"[0] a\n[0] b\n[1] c\n"


def test_who_speaks_much_is_not_held_back():
    assert len(Heard().hear(0, b"x" * (HOLD_BYTES + 1))) == HOLD_BYTES + 1


def test_a_line_that_another_rank_breaks_into_is_shown_again_whole():
    heard = Heard()
    heard.hear(0, b"a\nbe")
    assert heard.after(1) == b"a\nbe"
    assert heard.hear(1, b"c\n") == b"\n[1] c\n"
    assert heard.hear(0, b"gun\n") == b"[0] begun\n"


def test_a_bar_among_others_is_shown_now_and_then_and_in_the_end():
    heard = Heard(is_mixed=True)
    assert heard.hear(0, b"\r10%") == b""
    assert heard.hear(1, b"b\n") == b"[1] b\n"
    assert heard.after(SHOW_SECONDS) == b"[0] 10%\n"
    assert heard.after(SHOW_SECONDS) == b""
    assert heard.hear(0, b"\r20%") == heard.hear(0, b"\r30%") == b""
    assert heard.after(SHOW_SECONDS) == b"[0] 30%\n"
    assert heard.hear(0, b"\r100%\n") == b"[0] 100%\n"
    assert heard.after(SHOW_SECONDS) == b""


def test_a_line_that_was_shown_before_its_end_is_not_shown_again():
    heard = Heard(is_mixed=True)
    heard.hear(0, b"loading ...")
    assert heard.after(SHOW_SECONDS) == b"[0] loading ...\n"
    assert heard.hear(0, b"\nloaded\n") == b"[0] loaded\n"
    heard.hear(0, b"again")
    assert heard.after(SHOW_SECONDS) == b"[0] again\n"
    assert heard.pause() == b""


def test_what_comes_after_a_pause_is_another_line():
    heard = Heard(is_mixed=True)
    heard.hear(0, b"a")
    assert heard.pause() == b"[0] a\n"
    assert heard.hear(0, b"b\n") == b"[0] b\n"


def test_streams_keep_their_order():
    heard = Heard(is_mixed=True)
    for stream, data in (("stdout", b"a\n"), ("stderr", b"b\n"), ("stdout", b"c\n")):
        heard.mixer.hear(heard.voice(0, stream), data, heard.now)
    assert heard.mixer.take() == [("stdout", b"[0] a\n"), ("stderr", b"[0] b\n"), ("stdout", b"[0] c\n")]
    assert heard.mixer.take() == []


def test_the_last_words():
    words = StderrTail()
    assert words.last_lines() == ""
    words.hear(b"\xff one\n10%\r20%")
    assert words.last_lines() == "\ufffd one\n20%"
    words.hear(b"\n" + b"".join(b"line %d\n" % n for n in range(100)))
    assert words.last_lines().splitlines() == [f"line {n}" for n in range(100 - LAST_LINES, 100)]
    words.hear(b"x" * 2 * KEPT + b"\nend\n")
    assert words.last_lines() == "end"  # of the line before it there is but the end
    words.forget()
    assert words.last_lines() == ""

"""LineAssembler, OutputMultiplexer and StderrTail. No clock, no pipe."""

import math

import pytest

from mpwatch.watcher.output.line_assembler import MAX_LINE_BYTES, LineAssembler, add_prefix
from mpwatch.watcher.output.multiplexer import HOLD_BYTES, HOLD_SECONDS, SHOW_SECONDS, OutputMultiplexer, RankStream
from mpwatch.watcher.output.stderr_tail import TAIL_BYTES, TAIL_LINES, StderrTail


def assemble(*portions):
    assembler = LineAssembler()
    return b"".join(map(assembler.feed, portions)) + assembler.flush()


@pytest.mark.parametrize(
    ("written", "expected"),
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
def test_lines_are_as_a_terminal_shows_them(written, expected):
    assert assemble(written) == expected
    assert assemble(*(bytes([byte]) for byte in written)) == expected


def test_updates_of_a_progress_bar_take_no_memory():
    assembler = LineAssembler()
    for percent in range(100_000):
        assert assembler.feed(b"\r%d%%" % percent) == b""
    assert assembler.unfinished_line == b"99999%"
    assert len(assembler._unfinished) < 10


def test_repeated_carriage_returns_take_no_time_and_no_memory():
    """With a quadratic algorithm, this would take minutes."""
    assembler = LineAssembler()
    for _ in range(30):
        assert assembler.feed(b"\r" * (1 << 15)) == b""
    assert len(assembler._unfinished) < 2
    assert assembler.feed(b"end\r\r\n") == b"end\n"


def test_a_very_long_line_is_split():
    assembler = LineAssembler()
    portion = b"x" * (MAX_LINE_BYTES // 2)
    assert [len(assembler.feed(portion)) for _ in range(4)] == [0, 0, 3 * MAX_LINE_BYTES // 2 + 1, 0]


def test_add_prefix():
    assert add_prefix(b"a\n\nb\n", b"> ") == b"> a\n> \n> b\n"
    assert add_prefix(b"", b"> ") == b""
    assert add_prefix(b"a\n", b"") == b"a\n"


class MultiplexerDriver:
    """An OutputMultiplexer with a simulated clock. Its methods return the bytes that are to be written."""

    def __init__(self, *, is_line_mode=False, has_several_ranks=True):
        self.multiplexer = OutputMultiplexer(is_line_mode=is_line_mode, has_several_ranks=has_several_ranks)
        self.rank_streams = {}
        self.now = 100.0

    def rank_stream(self, rank, stream="stdout"):
        return self.rank_streams.setdefault((rank, stream), RankStream(rank, stream, lambda: b"[%d] " % rank))

    def feed(self, rank, data, stream="stdout"):
        self.multiplexer.feed(self.rank_stream(rank, stream), data, self.now)
        return self.take()

    def advance(self, seconds):
        self.now += seconds
        self.multiplexer.write_due(self.now)
        return self.take()

    def flush(self):
        self.multiplexer.flush(self.now)
        return self.take()

    def end_stream(self, rank):
        self.multiplexer.end_stream(self.rank_stream(rank))
        return self.take()

    def take(self):
        return b"".join(data for _, data in self.multiplexer.take_pending())


def test_one_rank_is_in_passthrough_mode_after_a_moment():
    driver = MultiplexerDriver()
    assert driver.feed(0, b"a\n\r10%") == b""
    assert driver.multiplexer.due_at == driver.now + HOLD_SECONDS
    assert driver.advance(HOLD_SECONDS) == b"a\n\r10%"
    assert driver.multiplexer.due_at == math.inf
    assert driver.feed(0, b"\r20%") == b"\r20%"
    assert driver.feed(0, b"oh", stream="stderr") == b"oh"
    assert driver.flush() == b""


def test_the_only_shown_rank_is_in_passthrough_mode_at_once():
    assert MultiplexerDriver(has_several_ranks=False).feed(0, b"\r1") == b"\r1"


def test_ranks_that_print_at_the_same_time_have_prefixes_from_the_first_line_on():
    driver = MultiplexerDriver()
    assert driver.feed(0, b"a\n") == b""
    assert driver.feed(1, b"b\nc") == b"[0] a\n[1] b\n"
    assert driver.flush() == b"[1] c\n"


def test_a_stream_that_ends_while_held_back():
    driver = MultiplexerDriver()
    assert driver.feed(0, b"a\nb") == driver.end_stream(0) == b""
    assert driver.feed(1, b"c\n") == b"[0] a\n[0] b\n[1] c\n"


def test_much_output_is_not_held_back():
    assert len(MultiplexerDriver().feed(0, b"x" * (HOLD_BYTES + 1))) == HOLD_BYTES + 1


def test_a_line_interrupted_by_another_rank_is_shown_again_complete():
    driver = MultiplexerDriver()
    driver.feed(0, b"a\nbe")
    assert driver.advance(1) == b"a\nbe"
    assert driver.feed(1, b"c\n") == b"\n[1] c\n"
    assert driver.feed(0, b"gun\n") == b"[0] begun\n"


def test_a_progress_bar_in_line_mode_is_shown_every_two_seconds_and_at_its_end():
    driver = MultiplexerDriver(is_line_mode=True)
    assert driver.feed(0, b"\r10%") == b""
    assert driver.feed(1, b"b\n") == b"[1] b\n"
    assert driver.advance(SHOW_SECONDS) == b"[0] 10%\n"
    assert driver.advance(SHOW_SECONDS) == b""
    assert driver.feed(0, b"\r20%") == driver.feed(0, b"\r30%") == b""
    assert driver.advance(SHOW_SECONDS) == b"[0] 30%\n"
    assert driver.feed(0, b"\r100%\n") == b"[0] 100%\n"
    assert driver.advance(SHOW_SECONDS) == b""


def test_an_unfinished_line_that_was_shown_is_not_repeated():
    driver = MultiplexerDriver(is_line_mode=True)
    driver.feed(0, b"loading ...")
    assert driver.advance(SHOW_SECONDS) == b"[0] loading ...\n"
    assert driver.feed(0, b"\nloaded\n") == b"[0] loaded\n"
    driver.feed(0, b"again")
    assert driver.advance(SHOW_SECONDS) == b"[0] again\n"
    assert driver.flush() == b""


def test_output_after_flush_begins_a_new_line():
    driver = MultiplexerDriver(is_line_mode=True)
    driver.feed(0, b"a")
    assert driver.flush() == b"[0] a\n"
    assert driver.feed(0, b"b\n") == b"[0] b\n"


def test_stdout_and_stderr_keep_their_order():
    driver = MultiplexerDriver(is_line_mode=True)
    for stream, data in (("stdout", b"a\n"), ("stderr", b"b\n"), ("stdout", b"c\n")):
        driver.multiplexer.feed(driver.rank_stream(0, stream), data, driver.now)
    assert driver.multiplexer.take_pending() == [("stdout", b"[0] a\n"), ("stderr", b"[0] b\n"), ("stdout", b"[0] c\n")]
    assert driver.multiplexer.take_pending() == []


def test_stderr_tail():
    stderr_tail = StderrTail()
    assert stderr_tail.last_lines() == ""
    stderr_tail.feed(b"\xff one\n10%\r20%")
    assert stderr_tail.last_lines() == "\ufffd one\n20%"
    stderr_tail.feed(b"\n" + b"".join(b"line %d\n" % n for n in range(100)))
    assert stderr_tail.last_lines().splitlines() == [f"line {n}" for n in range(100 - TAIL_LINES, 100)]
    stderr_tail.feed(b"x" * 2 * TAIL_BYTES + b"\nend\n")
    assert stderr_tail.last_lines() == "end"  # the line before is incomplete
    stderr_tail.clear()
    assert stderr_tail.last_lines() == ""

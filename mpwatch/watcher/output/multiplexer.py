"""Merge the output of several ranks into the caller's stdout and stderr. This module reads no clock and no pipe.

There are two modes:

    passthrough mode   one rank prints        bytes as they come: a progress bar moves in place, half a line appears at once
    line mode          several ranks print    complete lines, each with the prefix of its rank, such as "[3] "

If a call has no mode at first, the output of the first rank that prints is held back for at most HOLD_SECONDS. If a second
rank prints within HOLD_SECONDS, line mode begins. Otherwise passthrough mode begins. Passthrough mode changes to line mode
as soon as a second rank prints. Line mode stays until the end of the call.

In line mode, LineAssembler keeps only the latest update of a progress bar. A new update of the progress bar is shown as a
separate line, at most once in SHOW_SECONDS. The last update of a progress bar is always shown.
"""

import math
from collections.abc import Callable, Collection

from mpwatch.watcher.output.line_assembler import LineAssembler, add_prefix

HOLD_SECONDS = 0.2
HOLD_BYTES = 1 << 16
SHOW_SECONDS = 2.0  # before an unfinished line is shown, and between two updates of it
COLOURS = (36, 33, 32, 35, 34)  # of prefixes, by rank: cyan, yellow, green, magenta and blue in a terminal


class RankStream:
    def __init__(self, rank: int, stream: str, make_prefix: Callable[[], bytes]) -> None:
        self.rank = rank
        self.stream = stream
        self.make_prefix = make_prefix
        self.assembler = LineAssembler()
        self.shown = b""  # the state of the unfinished line that was shown last
        self.due_at = math.inf  # when the unfinished line is shown next

    def feed(self, data: bytes, now: float) -> bytes:
        """Return the lines that are now complete, but not one that was shown without its newline."""
        lines, shown = self.assembler.feed(data), self.shown
        if lines:
            self.shown, self.due_at = b"", math.inf
        if self.assembler.unfinished_line not in (b"", self.shown):
            self.due_at = min(self.due_at, now + SHOW_SECONDS)
        return lines.removeprefix(shown + b"\n") if shown else lines

    def take_update(self) -> bytes:
        """Return the unfinished line with a newline, unless it is empty or was shown."""
        line, shown = self.assembler.unfinished_line, self.shown
        self.shown, self.due_at = line, math.inf
        return line + b"\n" if line not in (b"", shown) else b""

    def discard_unfinished_line(self) -> None:
        """Drop the unfinished line, so that the next byte begins a new line."""
        self.assembler.flush()
        self.shown, self.due_at = b"", math.inf


class OutputMultiplexer:
    """Merges the output of all ranks. If only one rank can be shown, passthrough mode begins at once.

    Prefixes have colours in the streams of `coloured`.
    """

    def __init__(self, *, is_line_mode: bool, has_several_ranks: bool, coloured: Collection[str] = ()) -> None:
        self._coloured = coloured
        self._is_line_mode = is_line_mode
        self._has_several_ranks = has_several_ranks
        self._only_rank: int | None = None  # the rank that has printed so far, in passthrough mode
        self._held_back: list[tuple[RankStream, bytes]] = []  # until there is a mode; no bytes: the stream has ended
        self._choose_mode_at = math.inf
        self._rank_streams: dict[RankStream, None] = {}  # those that have printed and have not ended
        self._pending: list[tuple[str, bytes]] = []
        self._is_mid_line: dict[str, bool] = {}  # by the caller's stream: whether its last line has no newline yet

    @property
    def due_at(self) -> float:
        """The time at which the output thread must call `write_due`."""
        return min(self._choose_mode_at, *(rank_stream.due_at for rank_stream in self._rank_streams), math.inf)

    def feed(self, rank_stream: RankStream, data: bytes, now: float) -> None:
        if not self._is_line_mode and self._only_rank not in (None, rank_stream.rank):
            self._change_to_line_mode()
        self._rank_streams[rank_stream] = None
        if self._is_line_mode:
            self._write_lines(rank_stream, rank_stream.feed(data, now))
        elif self._only_rank is None and self._has_several_ranks:
            self._hold_back(rank_stream, data, now)
        else:
            rank_stream.assembler.feed(data)
            self._write(rank_stream.stream, data)

    def write_due(self, now: float) -> None:
        """Write everything that is due now: output that was held back, and updates of unfinished lines."""
        if self._choose_mode_at <= now:
            self._choose_mode(now)
        for rank_stream in self._rank_streams:
            if rank_stream.due_at <= now:
                self._write_update(rank_stream)

    def flush(self, now: float) -> None:
        """Write all remaining output, even unfinished lines."""
        self._choose_mode(now)
        for rank_stream in self._rank_streams:
            self._end_line(rank_stream)

    def end_stream(self, rank_stream: RankStream) -> None:
        if self._held_back:
            self._held_back.append((rank_stream, b""))
        else:
            self._rank_streams.pop(rank_stream, None)
            self._end_line(rank_stream)

    def take_pending(self) -> list[tuple[str, bytes]]:
        """Return what has to be written now, as pairs of a stream of the caller and bytes."""
        pending, self._pending = self._pending, []
        return pending

    def _hold_back(self, rank_stream: RankStream, data: bytes, now: float) -> None:
        if not self._held_back:
            self._choose_mode_at = now + HOLD_SECONDS
        self._held_back.append((rank_stream, data))
        is_much = sum(len(held) for _, held in self._held_back) > HOLD_BYTES
        if is_much or rank_stream.rank != self._held_back[0][0].rank:
            self._choose_mode(now)

    def _choose_mode(self, now: float) -> None:
        """Choose the mode by the number of ranks that have printed so far, and write the output that was held back."""
        held_back, self._held_back, self._choose_mode_at = self._held_back, [], math.inf
        if len({rank_stream.rank for rank_stream, data in held_back if data}) > 1:
            self._is_line_mode = True
        elif held_back:
            self._only_rank = held_back[0][0].rank
        for rank_stream, data in held_back:
            if data:
                self.feed(rank_stream, data, now)
            else:
                self.end_stream(rank_stream)

    def _change_to_line_mode(self) -> None:
        """A second rank has printed something. If the first one has printed half a line, end it; it is shown again when it
        is whole.
        """
        self._is_line_mode = True
        for rank_stream in self._rank_streams:
            rank_stream.shown = rank_stream.assembler.unfinished_line
        for stream, is_mid_line in self._is_mid_line.items():
            if is_mid_line:
                self._write(stream, b"\n")

    def _end_line(self, rank_stream: RankStream) -> None:
        if self._is_line_mode:
            self._write_update(rank_stream)
        rank_stream.discard_unfinished_line()

    def _write_update(self, rank_stream: RankStream) -> None:
        self._write_lines(rank_stream, rank_stream.take_update())

    def _write_lines(self, rank_stream: RankStream, lines: bytes) -> None:
        prefix = rank_stream.make_prefix()
        if prefix and rank_stream.stream in self._coloured:
            prefix = b"\x1b[%dm%b\x1b[0m" % (COLOURS[rank_stream.rank % len(COLOURS)], prefix)
        self._write(rank_stream.stream, add_prefix(lines, prefix))

    def _write(self, stream: str, data: bytes) -> None:
        if data:
            self._pending.append((stream, data))
            self._is_mid_line[stream] = not data.endswith(b"\n")

"""What is written to the caller's streams of what several ranks have written to theirs, and when. Pure.

    one rank is heard          what it writes, as it comes: a progress bar moves, an unfinished line is there at once
    more than one is heard     whole lines, each with the prefix of its rank

Who speaks first may be alone or only the quickest, so what is said first is held back for a moment.
"""

import math
from collections.abc import Callable

from mpwatch.watcher.output.line_assembler import LineAssembler, prefixed

HOLD_SECONDS = 0.2
HOLD_BYTES = 1 << 16
SHOW_SECONDS = 2.0  # until a line that has no end yet is shown, and from then to when it is shown again


class RankStream:
    """One stream of one rank.

    Args:
        rank: whose.
        stream: "stdout" or "stderr".
        prefix: gives what a line that comes now begins with.
    """

    def __init__(self, rank: int, stream: str, prefix: Callable[[], bytes]) -> None:
        self.rank = rank
        self.stream = stream
        self.prefix = prefix
        self.lines = LineAssembler()
        self.shown = b""  # of the line that has no end yet
        self.due_at = math.inf  # when more of that is shown

    def complete(self, data: bytes, now: float) -> bytes:
        """The lines that are whole with this, but for one that has been shown as it is."""
        lines, shown = self.lines.feed(data), self.shown
        if lines:
            self.shown, self.due_at = b"", math.inf
        if self.lines.rest not in (b"", self.shown):
            self.due_at = min(self.due_at, now + SHOW_SECONDS)
        return lines.removeprefix(shown + b"\n") if shown else lines

    def unfinished(self) -> bytes:
        """That line as it stands, if there is more of it than was shown."""
        rest, shown = self.lines.rest, self.shown
        self.shown, self.due_at = rest, math.inf
        return rest + b"\n" if rest not in (b"", shown) else b""

    def forget_line(self) -> None:
        """What comes next begins another one."""
        self.lines.end()
        self.shown, self.due_at = b"", math.inf


class OutputMultiplexer:
    """Of one call of the ranks.

    Args:
        is_mixed: whole lines with prefixes from the beginning, whoever speaks.
        may_be_mixed: False if only one rank can be heard.
    """

    def __init__(self, *, is_mixed: bool, may_be_mixed: bool) -> None:
        self._is_mixed = is_mixed
        self._may_be_mixed = may_be_mixed
        self._only_rank: int | None = None
        self._held: list[tuple[RankStream, bytes]] = []  # nothing of one that has ended meanwhile
        self._decide_at = math.inf
        self._rank_streams: dict[RankStream, None] = {}  # that have spoken
        self._out: list[tuple[str, bytes]] = []
        self._in_a_line: dict[str, bool] = {}  # by stream: whether what was written ends in the midst of one

    @property
    def due_at(self) -> float:
        """When `expire` is to be called."""
        return min(self._decide_at, *(rank_stream.due_at for rank_stream in self._rank_streams), math.inf)

    def hear(self, rank_stream: RankStream, data: bytes, now: float) -> None:
        """A rank has written this."""
        if not self._is_mixed and self._only_rank not in (None, rank_stream.rank):
            self._mix()
        self._rank_streams[rank_stream] = None
        if self._is_mixed:
            self._write(rank_stream.stream, prefixed(rank_stream.complete(data, now), rank_stream.prefix()))
        elif self._only_rank is None and self._may_be_mixed:
            self._hold(rank_stream, data, now)
        else:
            rank_stream.lines.feed(data)
            self._write(rank_stream.stream, data)

    def expire(self, now: float) -> None:
        """A time has come."""
        if self._decide_at <= now:
            self._decide(now)
        for rank_stream in self._rank_streams:
            if rank_stream.due_at <= now:
                self._write(rank_stream.stream, prefixed(rank_stream.unfinished(), rank_stream.prefix()))

    def pause(self, now: float) -> None:
        """The ranks have answered, or ended: what stands on their lines is all there will be for now."""
        self._decide(now)
        for rank_stream in self._rank_streams:
            self._end_line(rank_stream)

    def end(self, rank_stream: RankStream) -> None:
        """This stream has ended."""
        if self._held:
            self._held.append((rank_stream, b""))
        else:
            self._rank_streams.pop(rank_stream, None)
            self._end_line(rank_stream)

    def take(self) -> list[tuple[str, bytes]]:
        """What is to be written by now, to which stream."""
        out, self._out = self._out, []
        return out

    def _end_line(self, rank_stream: RankStream) -> None:
        if self._is_mixed:
            self._write(rank_stream.stream, prefixed(rank_stream.unfinished(), rank_stream.prefix()))
        rank_stream.forget_line()

    def _hold(self, rank_stream: RankStream, data: bytes, now: float) -> None:
        if not self._held:
            self._decide_at = now + HOLD_SECONDS
        self._held.append((rank_stream, data))
        is_much = sum(len(held) for _, held in self._held) > HOLD_BYTES
        if is_much or rank_stream.rank != self._held[0][0].rank:
            self._decide(now)

    def _decide(self, now: float) -> None:
        """Whether the first speaker is alone."""
        held, self._held, self._decide_at = self._held, [], math.inf
        if len({rank_stream.rank for rank_stream, data in held if data}) > 1:
            self._is_mixed = True
        elif held:
            self._only_rank = held[0][0].rank
        for rank_stream, data in held:
            if data:
                self.hear(rank_stream, data, now)
            else:
                self.end(rank_stream)

    def _mix(self) -> None:
        """Somebody else speaks. A line that the first one is in the midst of is left, and shown again when whole."""
        self._is_mixed = True
        for rank_stream in self._rank_streams:
            rank_stream.shown = rank_stream.lines.rest
        for stream, is_open in self._in_a_line.items():
            if is_open:
                self._write(stream, b"\n")

    def _write(self, stream: str, data: bytes) -> None:
        if data:
            self._out.append((stream, data))
            self._in_a_line[stream] = not data.endswith(b"\n")

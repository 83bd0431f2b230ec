"""The live view as lines that are appended to a stream, at intervals of ten seconds. No line is written to a full pipe."""

from typing import TextIO

from mpwatch.live_view.formatting import format_overall
from mpwatch.live_view.model import Snapshot
from mpwatch.live_view.tty import is_writable

LAST_LINE_SECONDS = 1.0  # the last line waits this long for room in the stream


class LineDisplay:
    period = 10.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_written: object = None

    def show(self, snapshot: Snapshot, timeout: float = 0.0) -> None:
        overall = snapshot.overall
        content = (overall.step, overall.total, str(overall.metrics), snapshot.counts)  # as text, since NaN != NaN
        if content != self._last_written and self._has_room(timeout):
            self._last_written = content
            self._stream.write(f"mpwatch: {format_overall(snapshot)}\n")  # one write, so that the line stays whole
            self._stream.flush()

    def pause(self) -> None:
        """Do nothing, because other output does not overwrite the lines of the live view."""

    def close(self, snapshot: Snapshot) -> None:
        self.show(snapshot, LAST_LINE_SECONDS)

    def _has_room(self, timeout: float) -> bool:
        """A pipe that poll() reports as writable has room for PIPE_BUF bytes, which is enough for a line."""
        try:
            fd = self._stream.fileno()
        except (AttributeError, OSError, ValueError):  # not a stream of the operating system
            return True
        return is_writable(fd, timeout)

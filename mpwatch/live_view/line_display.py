"""The live view as lines that are appended to a stream, at intervals of ten seconds."""

from typing import TextIO

from mpwatch.live_view.formatting import format_overall
from mpwatch.live_view.model import Snapshot


class LineDisplay:
    period = 10.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_written: object = None

    def show(self, snapshot: Snapshot) -> None:
        overall = snapshot.overall
        content = (overall.step, overall.total, str(overall.metrics), snapshot.counts)  # as text, since NaN != NaN
        if content != self._last_written:
            self._last_written = content
            self._stream.write(f"mpwatch: {format_overall(snapshot)}\n")  # one write, so that the line stays whole
            self._stream.flush()

    def pause(self) -> None:
        """Do nothing, because other output does not overwrite the lines of the live view."""

    def close(self, snapshot: Snapshot) -> None:
        self.show(snapshot)

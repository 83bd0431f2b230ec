"""The live view where nothing can be drawn over: a line on a stream, now and then, if there is something new to say. A pipe
that is full is not waited for.
"""

from typing import TextIO

from mpwatch.live_view.formatting import line_of
from mpwatch.live_view.model import Snapshot
from mpwatch.live_view.tty import takes

PERIOD = 10.0
LAST_SECONDS = 1.0  # for the stream to take the last line


class LineDisplay:
    """Lines on this stream."""

    period = PERIOD
    repair = None  # nothing of anybody's is kept

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said: object = None

    def show(self, picture: Snapshot) -> None:
        """Say it, if it is news."""
        self._say(picture, patience=0.0)

    def leave(self, picture: Snapshot) -> None:
        """The same; all that was said stays."""
        self._say(picture, patience=LAST_SECONDS)

    def _say(self, picture: Snapshot, patience: float) -> None:
        overall = picture.overall
        news = (overall.step, overall.total, str(overall.metrics), picture.counts)  # as text: no NaN equals another
        if news != self._said and self._takes(patience):
            self._said = news
            self._stream.write(f"mpwatch: {line_of(picture)}\n")  # in one piece, so that nothing comes between
            self._stream.flush()

    def _takes(self, seconds: float) -> bool:
        """Whether a line finds room, within so long: a pipe that takes something takes a page."""
        try:
            fd = self._stream.fileno()
        except (AttributeError, OSError, ValueError):  # it is not of the system
            return True
        return takes(fd, seconds)

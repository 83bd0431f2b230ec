"""The live view where nothing can be drawn over: a line on a stream, now and then, if there is something new to say."""

from typing import TextIO

from .model import Picture
from .words import line_of

__all__ = ["PlainDisplay"]

PERIOD = 10.0


class PlainDisplay:
    """Lines on this stream."""

    period = PERIOD
    repair = None  # nothing of anybody's is kept

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said: object = None

    def show(self, picture: Picture) -> None:
        """Say it, if it is news."""
        overall = picture.overall
        news = (overall.step, overall.total, str(overall.metrics), picture.counts)  # as text: no NaN equals another
        if news != self._said:
            self._said = news
            self._stream.write(f"mpwatch: {line_of(picture)}\n")  # in one piece, so that nothing comes between
            self._stream.flush()

    def leave(self, picture: Picture) -> None:
        """The same; all that was said stays."""
        self.show(picture)

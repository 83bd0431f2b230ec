"""The bytes of one stream, put together into the lines that a reader would see. Pure.

A terminal shows of a line what was written last: a carriage return goes back to its start, and a progress bar is one line
that is written again and again. Where the lines of several ranks are shown below each other, each is shown as it is in the
end; what moves the cursor about is left out, since it would move it into the lines of others. Colours stay.
"""

import re

LONGEST = 1 << 20  # bytes: a line that is longer is shown in pieces, since it has to be kept until its end
OVERWRITTEN = re.compile(rb"^[^\n]*\r(?=[^\r\n])", re.MULTILINE)  # up to the last return that something follows
RETURNS = re.compile(rb"\r{2,}")  # they do what one does
MOVES = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")


class LineAssembler:
    """Of one stream."""

    def __init__(self) -> None:
        self._rest = b""  # of a line that has no end yet

    def feed(self, data: bytes) -> bytes:
        """The lines that these bytes complete, as they are seen, each with its newline."""
        end = data.rfind(b"\n") + 1
        whole = b"".join((self._rest, memoryview(data)[:end])) if end else b""
        self._rest = _seen(data[end:] if end else self._rest + data)
        too_long = self.end() if len(self._rest) > LONGEST else b""
        return _seen(whole) + too_long

    @property
    def rest(self) -> bytes:
        """What stands on the line that has no end yet."""
        return self._rest.rstrip(b"\r")

    def end(self) -> bytes:
        """That, as a line; empty if nothing stands there."""
        rest, self._rest = self.rest, b""
        return rest + b"\n" if rest else b""


def prefixed(lines: bytes, prefix: bytes) -> bytes:
    """These lines, each with that before it."""
    if not lines or not prefix:
        return lines
    with_one_more = memoryview(lines.replace(b"\n", b"\n" + prefix))
    return b"".join((prefix, with_one_more[: -len(prefix)]))


def _seen(text: bytes) -> bytes:
    """Looked for first, and by a single byte: that takes a hundredth of the time."""
    if b"\x1b" in text:
        text = MOVES.sub(b"", text)
    if b"\r" in text:
        text = OVERWRITTEN.sub(b"", RETURNS.sub(b"\r", text).replace(b"\r\n", b"\n"))
    return text

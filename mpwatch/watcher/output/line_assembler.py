r"""Turn the bytes of one stream into the lines that a terminal would show. Pure.

A progress bar writes the same line many times, with a carriage return ("\r") between two updates. Only the text after the
last carriage return of a line is kept:

    "10%\r20%\r30%\n"    becomes    "30%\n"

Escape sequences that move the cursor or erase text are removed, because they would damage the lines of other ranks in the
same terminal. Escape sequences for colours are kept.
"""

import re

MAX_LINE_BYTES = 1 << 20  # a longer line is split, because an unfinished line is kept in memory
OVERWRITTEN = re.compile(rb"^[^\n]*\r(?=[^\r\n])", re.MULTILINE)  # all before the last "\r" that is followed by text
REPEATED_RETURNS = re.compile(rb"\r{2,}")  # same effect as one
CURSOR_CONTROLS = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")  # move the cursor, erase, scroll, set a mode


class LineAssembler:
    def __init__(self) -> None:
        self._unfinished = b""  # the line without a newline so far

    def feed(self, data: bytes) -> bytes:
        """Add bytes that the rank has written, and return the lines that are now complete, each with its newline."""
        end = data.rfind(b"\n") + 1
        complete = b"".join((self._unfinished, memoryview(data)[:end])) if end else b""
        self._unfinished = _remove_overwritten(data[end:] if end else self._unfinished + data)
        too_long = self.flush() if len(self._unfinished) > MAX_LINE_BYTES else b""
        return _remove_overwritten(complete) + too_long

    @property
    def unfinished_line(self) -> bytes:
        """The visible text of the line that has no newline yet."""
        return self._unfinished.rstrip(b"\r")

    def flush(self) -> bytes:
        line, self._unfinished = self.unfinished_line, b""
        return line + b"\n" if line else b""


def add_prefix(lines: bytes, prefix: bytes) -> bytes:
    if not lines or not prefix:
        return lines
    with_one_more = memoryview(lines.replace(b"\n", b"\n" + prefix))
    return b"".join((prefix, with_one_more[: -len(prefix)]))


def _remove_overwritten(text: bytes) -> bytes:
    """Remove text that is overwritten after a carriage return, and escape sequences that move the cursor or erase text."""
    if b"\x1b" in text:
        text = CURSOR_CONTROLS.sub(b"", text)
    if b"\r" in text:
        text = OVERWRITTEN.sub(b"", REPEATED_RETURNS.sub(b"\r", text).replace(b"\r\n", b"\n"))
    return text

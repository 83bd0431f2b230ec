"""stdout of a rank that is read by the watcher, or goes to a file. Runs in a rank.

To a pipe or a file Python and C write in blocks: lines would come late, and those of the last block not at all if the rank
is killed. A terminal's stdout is flushed at the end of each line, and so is this one. (stderr always is.)
"""

from __future__ import annotations

import sys
from contextlib import suppress

from ..os_support.descriptors import c_stdout_by_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["end_lines_early", "flush_for_answer"]

_flush_c: Callable[[], object] | None = None  # once it is so


def end_lines_early() -> None:
    """Flush Python's stdout and that of C at the end of each line."""
    global _flush_c
    with suppress(AttributeError, ValueError):  # an interpreter without a stdout
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _flush_c = c_stdout_by_lines()


def flush_for_answer() -> None:
    """What a call has printed, an unfinished line too, is read before its answer, and belongs to it."""
    if _flush_c is not None:
        with suppress(BaseException):  # closed, or replaced by something that raises what it likes
            sys.stdout.flush()
        _flush_c()

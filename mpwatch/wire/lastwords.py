"""A rank's black box: memory that outlives it, for what cannot go over the channel.

    file without a name, one a rank:  [ an answer, up to SLOT bytes ][ the Python stack at a crash ]

Code that turns itself into a daemon closes every descriptor, the channel among them; a mapping stays, so an answer can
still be left in it. It is one frame (messages.py), and its header is written last: half an answer is none. faulthandler
writes the stack through the descriptor, at the moment of the crash. The watcher reads both once the rank is dead.
"""

import mmap
import os

from .messages import HEADER, Message, parse_header

__all__ = ["SLOT", "LastWords", "read_answer", "read_crash"]

SLOT = 1 << 20  # bytes; only the pages that are written cost memory
CRASH_LIMIT = 1 << 16


class LastWords:
    """The rank's side. `crash_fd` is positioned where the stack belongs, and stays open."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, SLOT)
        os.set_inheritable(fd, False)
        os.lseek(fd, SLOT, os.SEEK_SET)
        self.crash_fd = fd

    def leave_answer(self, frame: bytes) -> bool:
        """Leave this for the watcher; False if it does not fit."""
        if len(frame) > SLOT:
            return False
        self._memory[HEADER.size : len(frame)] = frame[HEADER.size :]
        self._memory[: HEADER.size] = frame[: HEADER.size]
        return True


def read_answer(fd: int) -> Message | None:
    """The answer that a dead rank left, if any."""
    head = os.pread(fd, HEADER.size, 0)
    if len(head) < HEADER.size or not any(head):
        return None
    kind, stamp, length = parse_header(head)
    return Message(kind, stamp, os.pread(fd, length, HEADER.size))


def read_crash(fd: int) -> str:
    """The stack that a dead rank left, in faulthandler's words; empty if it did not crash."""
    return os.pread(fd, CRASH_LIMIT, SLOT).decode(errors="replace")

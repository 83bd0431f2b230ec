"""A rank's black box: memory that outlives it, for what cannot go over the channel.

    file without a name, one for all ranks of a run:  [ slot of rank 0 ][ slot of rank 1 ]...
    a slot:                                           [ frame ][ frame ][ zeros ]

Code that turns itself into a daemon closes every descriptor, the channel among them; a mapping stays, so an answer can
still be left in it. It is made of frames (messages.py), and the header of each is written last: half a frame is none. The
watcher reads the slot once the rank is dead.
"""

import mmap
import os

from .messages import HEADER, Message, parse_header

__all__ = ["SLOT", "LastWords", "read_answer"]

SLOT = 1 << 20  # bytes; only the pages that are written cost memory


class LastWords:
    """The rank's side: the slot of that number in the file."""

    def __init__(self, fd: int, slot: int) -> None:
        self._memory = mmap.mmap(fd, SLOT, offset=slot * SLOT)
        self._used = 0
        os.close(fd)

    def leave(self, frame: bytes) -> bool:
        """Leave this for the watcher, after what was left before; False if it does not fit."""
        start, end = self._used, self._used + len(frame)
        if end > SLOT:
            return False
        body = start + HEADER.size
        self._memory[body:end] = frame[HEADER.size :]
        self._memory[start:body] = frame[: HEADER.size]
        self._used = end
        return True


def read_answer(fd: int, slot: int) -> list[Message]:
    """What a dead rank left in its slot. Raises ValueError if somebody has overwritten it."""
    messages = []
    at, end = slot * SLOT, (slot + 1) * SLOT
    while len(head := os.pread(fd, min(HEADER.size, end - at), at)) == HEADER.size and any(head):
        kind, stamp, length = parse_header(head)
        at += HEADER.size
        messages.append(Message(kind, stamp, os.pread(fd, min(length, end - at), at)))
        at += length
        if at > end:
            raise ValueError(f"a message of {length} bytes in a slot of {SLOT}")
    return messages

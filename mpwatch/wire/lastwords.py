"""A rank's black box: memory that outlives it (slots.py), for what cannot go over the channel.

    in a rank's slot:  [ frame ][ frame ][ zeros ]

An answer is made of frames (messages.py), and the header of each is written last: half a frame is none. The watcher reads
them once the rank is dead.
"""

import mmap
import os

from .messages import HEADER, Message, parse_header
from .slots import SLOT, WORDS

__all__ = ["LastWords", "read_answer"]


class LastWords:
    """The rank's side, in the memory of its slot."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._used = 0

    def leave(self, frame: bytes) -> bool:
        """Leave this for the watcher, after what was left before; False if it does not fit."""
        start, end = self._used, self._used + len(frame)
        if end > WORDS:
            return False
        body = start + HEADER.size
        self._memory[body:end] = frame[HEADER.size :]
        self._memory[start:body] = frame[: HEADER.size]
        self._used = end
        return True


def read_answer(fd: int, slot: int) -> list[Message]:
    """What a dead rank left in its slot. Raises ValueError if somebody has overwritten it."""
    messages = []
    at, end = slot * SLOT, slot * SLOT + WORDS
    while len(head := os.pread(fd, min(HEADER.size, end - at), at)) == HEADER.size and any(head):
        kind, stamp, length = parse_header(head)
        at += HEADER.size
        messages.append(Message(kind, stamp, os.pread(fd, min(length, end - at), at)))
        at += length
        if at > end:
            raise ValueError(f"a message of {length} bytes in a slot of {SLOT}")
    return messages

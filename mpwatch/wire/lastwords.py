"""Memory that outlives a rank, for an answer that finds its channel closed.

Code that turns itself into a daemon closes every descriptor, the channel among them; a mapping stays. So each rank maps
one slot of a file without a name, which the watcher reads once the rank is dead. A slot holds one frame (messages.py);
its length is written last, so that half an answer is none.
"""

import mmap
import os

from .messages import HEADER, Frames, Message

__all__ = ["SLOT", "Slot", "read_slot"]

SLOT = 1 << 20  # bytes; only the pages that are written cost memory


class Slot:
    """A rank's slot, from the rank's side. Takes over the descriptor and closes it."""

    def __init__(self, fd: int, index: int) -> None:
        try:
            self._memory = mmap.mmap(fd, SLOT, offset=index * SLOT)
        finally:
            os.close(fd)

    def write(self, frame: bytes) -> bool:
        """Leave this for the watcher; False if it does not fit."""
        if len(frame) > SLOT:
            return False
        self._memory[HEADER.size : len(frame)] = frame[HEADER.size :]
        self._memory[: HEADER.size] = frame[: HEADER.size]
        return True


def read_slot(fd: int, index: int) -> list[Message]:
    """What the rank of this slot left: one message or none."""
    head = os.pread(fd, HEADER.size, index * SLOT)
    if not head.strip(b"\0"):
        return []
    return Frames().feed(os.pread(fd, SLOT, index * SLOT))[:1] if len(head) == HEADER.size else []

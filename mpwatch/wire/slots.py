"""Memory that a rank shares with the watcher, and that outlives it: what is left there needs no channel and no waiting.

    file without a name, one for all ranks of a run:  [ slot of rank 0 ][ slot of rank 1 ]...
    a slot:                        [ last words: see lastwords.py ][ pulse: see pulse.py ][ number of a call ]

That number is of the latest call in which the watcher has interrupted the rank, counted from 1: a signal does not say which
call it is meant for, and may come when that one has just been answered.

Code that turns itself into a daemon closes every descriptor; a mapping stays.
"""

import mmap
import os
import struct

__all__ = ["PULSE", "SLOT", "WORDS", "clear_slot", "interrupted_call", "note_interrupt", "open_slot"]

SLOT = 1 << 20  # bytes; only the pages that are written cost memory
PULSE = 4096
NUMBER = struct.Struct("Q")
WORDS = SLOT - PULSE - NUMBER.size


def open_slot(fd: int, slot: int) -> mmap.mmap:
    """The rank's side: its own slot. The descriptor is closed. Raises OSError."""
    try:
        return mmap.mmap(fd, SLOT, offset=slot * SLOT)
    finally:
        os.close(fd)


def clear_slot(fd: int, slot: int) -> None:
    """The watcher's side: the rank that had it is dead, and another one gets it. What was never written to stays a hole."""
    nothing = bytes(WORDS)
    if os.pread(fd, WORDS, slot * SLOT) != nothing:
        os.pwrite(fd, nothing, slot * SLOT)
    os.pwrite(fd, bytes(SLOT - WORDS), slot * SLOT + WORDS)


def note_interrupt(fd: int, slot: int, call: int) -> None:
    """The watcher's side, before it sends the signal."""
    os.pwrite(fd, NUMBER.pack(call), (slot + 1) * SLOT - NUMBER.size)


def interrupted_call(memory: mmap.mmap) -> int:
    """The rank's side; 0 if there has been none."""
    number: int = NUMBER.unpack_from(memory, SLOT - NUMBER.size)[0]
    return number

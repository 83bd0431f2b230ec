"""Memory that a rank shares with the watcher, and that outlives it: what is left there needs no channel and no waiting.

    file without a name, one for all ranks of a run:  [ slot of rank 0 ][ slot of rank 1 ]...
    a slot:                                           [ last words: see lastwords.py ][ pulse: see pulse.py ]

Code that turns itself into a daemon closes every descriptor; a mapping stays.
"""

import mmap
import os

__all__ = ["PULSE", "SLOT", "WORDS", "open_slot"]

SLOT = 1 << 20  # bytes; only the pages that are written cost memory
PULSE = 4096
WORDS = SLOT - PULSE


def open_slot(fd: int, slot: int) -> mmap.mmap:
    """The rank's side: its own slot. The descriptor is closed. Raises OSError."""
    try:
        return mmap.mmap(fd, SLOT, offset=slot * SLOT)
    finally:
        os.close(fd)

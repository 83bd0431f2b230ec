"""The times of what happened in one history, in a file that all its processes map. Times are of CLOCK_MONOTONIC."""

import mmap
import os
import struct
import time

TIME = struct.Struct("d")
CALLED, ENDED, TIMER_FIRED = range(3)  # slots of the host program
FIRST_RANK = 3  # slot of rank 0: the time at which its action begins


class EventTimes:
    def __init__(self, folder: str) -> None:
        fd = os.open(f"{folder}/times", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, mmap.PAGESIZE)
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)

    def record(self, slot: int) -> None:
        TIME.pack_into(self._memory, slot * TIME.size, time.monotonic())

    def read(self, slot: int) -> float | None:
        return TIME.unpack_from(self._memory, slot * TIME.size)[0] or None

    def close(self) -> None:
        self._memory.close()

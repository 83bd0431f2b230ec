"""Where a history writes down what happened when: memory in a file that all its processes share, and outlives them all.

Times are of CLOCK_MONOTONIC. The meeting place, too, is made so that no death can hold anybody up or wake anybody early: a
named pipe for each rank, into which every other writes a byte, and which this side keeps open.
"""

import mmap
import os
import struct
import time

__all__ = ["ALARM", "BEGAN", "ENDED", "Board"]

TIME = struct.Struct("d")
BEGAN, ENDED, ALARM = range(3)  # the watcher's lines; those of the ranks follow
RANKS = 3


class Board:
    """In a folder of the history's own."""

    def __init__(self, folder: str, nprocs: int) -> None:
        self._folder = folder
        self._nprocs = nprocs
        fd = os.open(f"{folder}/board", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, mmap.PAGESIZE)
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)

    def write(self, line: int) -> None:
        """This happens now."""
        TIME.pack_into(self._memory, line * TIME.size, time.monotonic())

    def write_of(self, rank: int) -> None:
        """This rank does now what it is there for."""
        self.write(RANKS + rank)

    def read(self, line: int) -> float | None:
        return TIME.unpack_from(self._memory, line * TIME.size)[0] or None

    def read_ranks(self) -> dict[int, float]:
        times = {rank: self.read(RANKS + rank) for rank in range(self._nprocs)}
        return {rank: at for rank, at in times.items() if at is not None}

    def close(self) -> None:
        self._memory.close()

    def open_doors(self) -> list[int]:
        """Descriptors that are to stay open as long as ranks may meet."""
        for rank in range(self._nprocs):
            os.mkfifo(self._door(rank))
        return [os.open(self._door(rank), os.O_RDWR) for rank in range(self._nprocs)]

    def arrive(self) -> None:
        """Tell all that one more is at work."""
        for rank in range(self._nprocs):
            fd = os.open(self._door(rank), os.O_RDWR)
            os.write(fd, b"x")
            os.close(fd)

    def wait_for_all(self, rank: int) -> None:
        """Until all are at work."""
        fd = os.open(self._door(rank), os.O_RDWR)
        missing = self._nprocs
        while missing:
            missing -= len(os.read(fd, missing))
        os.close(fd)

    def _door(self, rank: int) -> str:
        return f"{self._folder}/door-{rank}"

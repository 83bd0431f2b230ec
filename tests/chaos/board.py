"""The times of what happened in one history, in a file that all its processes map. The file outlives them.

Times are of CLOCK_MONOTONIC. The ranks also meet here at the start, by named pipes: each rank writes a byte into the pipe of
every rank. The harness keeps the pipes open. So the death of a rank neither blocks another rank nor wakes it early.
"""

import mmap
import os
import struct
import time

TIME = struct.Struct("d")
CALLED, ENDED, TIMER_FIRED = range(3)  # slots of the host program; those of the ranks follow
FIRST_RANK = 3


class EventTimes:
    """The times of one history, in its folder."""

    def __init__(self, folder: str, nprocs: int) -> None:
        self._folder = folder
        self._nprocs = nprocs
        fd = os.open(f"{folder}/times", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, mmap.PAGESIZE)
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)

    def record(self, slot: int) -> None:
        """Store the present time in a slot."""
        TIME.pack_into(self._memory, slot * TIME.size, time.monotonic())

    def record_rank(self, rank: int) -> None:
        """Store the present time as the time at which the rank's action begins."""
        self.record(FIRST_RANK + rank)

    def read(self, slot: int) -> float | None:
        return TIME.unpack_from(self._memory, slot * TIME.size)[0] or None

    def read_ranks(self) -> dict[int, float]:
        times = {rank: self.read(FIRST_RANK + rank) for rank in range(self._nprocs)}
        return {rank: at for rank, at in times.items() if at is not None}

    def close(self) -> None:
        self._memory.close()

    def open_pipes(self) -> list[int]:
        """Create the named pipes. Return descriptors that must stay open until all ranks have met."""
        for rank in range(self._nprocs):
            os.mkfifo(self._pipe_path(rank))
        return [os.open(self._pipe_path(rank), os.O_RDWR) for rank in range(self._nprocs)]

    def announce_start(self) -> None:
        """Signal to all ranks that one more rank runs."""
        for rank in range(self._nprocs):
            fd = os.open(self._pipe_path(rank), os.O_RDWR)
            os.write(fd, b"x")
            os.close(fd)

    def wait_for_all_ranks(self, rank: int) -> None:
        fd = os.open(self._pipe_path(rank), os.O_RDWR)
        missing = self._nprocs
        while missing:
            missing -= len(os.read(fd, missing))
        os.close(fd)

    def _pipe_path(self, rank: int) -> str:
        return f"{self._folder}/pipe-{rank}"

"""The memory that the watcher shares with each rank.

Each rank has its own part of the shared memory, which is called the rank's slot. The watcher can read the slot even when the
rank is dead.

    one anonymous file for all ranks of a run:  [ slot of rank 0 ][ slot of rank 1 ]...
    a slot:            [ stop memory ][ heartbeat memory ][ visit ][ number of the interrupted call ]
    stop memory:       see stop_step.py
    heartbeat memory:  [ time of the last heartbeat ][ checksum, length ][ last report: time, step, total, metrics ]

- A heartbeat is one write of eight bytes to memory, so a rank can send heartbeats in its innermost loop, from any thread.
  While the rank writes a report, the report's checksum is wrong, and the watcher reads it again.
- Before the watcher interrupts a call with SIGINT, it writes the number of this call into the rank's slot. So a SIGINT that
  arrives between two calls can be ignored: its number is not that of the next call.
- If another program wants a debugger's prompt, the watcher sets `visit` to 1, and sends the signal that asks for stacks.

The slot stays mapped into the rank's memory even if user code closes all descriptors, for example to become a daemon.
"""

from __future__ import annotations

import marshal
import math
import mmap
import os
import struct
from binascii import crc32

from mpwatch.os_support.clock import monotonic
from mpwatch.wire import stop_step

TYPE_CHECKING = False

# All sizes are in bytes.
SLOT_SIZE = 1 << 16  # a multiple of each page size, for mmap; only pages that are written take memory
HEARTBEAT_SIZE = 4096
CALL_NUMBER = struct.Struct("Q")
STOP_AT = 0  # where the stop memory begins in a slot
HEARTBEAT_AT = STOP_AT + len(stop_step.CLEARED)
VISIT_AT = SLOT_SIZE - CALL_NUMBER.size - 1

# A time of CLOCK_MONOTONIC. It is 0 before the first heartbeat, and infinity if no heartbeat will follow. In native byte
# order the time is written at once.
HEARTBEAT_TIME = struct.Struct("d")
REPORT_HEADER = struct.Struct("=II")  # checksum and length of the report
NO_REPORT = struct.Struct("=dII")  # everything before the report
CLEARED = stop_step.CLEARED + bytes(NO_REPORT.size)  # the stop memory, and no heartbeat
MAX_REPORT_SIZE = HEARTBEAT_SIZE - HEARTBEAT_TIME.size - REPORT_HEADER.size
MAX_READS = 100  # attempts to read a complete report; writing one takes less than a microsecond

# --- The slot ---


def open_slot(fd: int, slot: int) -> mmap.mmap:
    """In the rank: map the rank's slot of the file into memory and close the file's descriptor. Raises OSError."""
    try:
        return mmap.mmap(fd, SLOT_SIZE, offset=slot * SLOT_SIZE)
    finally:
        os.close(fd)


def read_interrupted_call(memory: mmap.mmap) -> int:
    """In the rank: return the number of the last call that the watcher has interrupted, or 0 if there was none."""
    number: int = CALL_NUMBER.unpack_from(memory, SLOT_SIZE - CALL_NUMBER.size)[0]
    return number


def take_visit(memory: mmap.mmap) -> bool:
    """In the rank: return whether a visit was requested, once."""
    is_requested, memory[VISIT_AT] = memory[VISIT_AT], 0
    return bool(is_requested)


# --- Heartbeats and reports ---


class Report:
    """What a rank passed to `mpwatch.report()`. `at` is the time of the call, by CLOCK_MONOTONIC."""

    def __init__(self, at: float, step: int | None, total: int | None, metrics: dict[str, float]) -> None:
        self.at = at
        self.step = step
        self.total = total
        self.metrics = metrics


class HeartbeatSample:
    """The content of a rank's heartbeat memory. What the rank has not written is None."""

    def __init__(self, beat_at: float | None, report: Report | None) -> None:
        self.beat_at = beat_at
        self.report = report


class HeartbeatWriter:
    """In the rank: writes the rank's heartbeats and reports into its slot."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def write_heartbeat(self) -> None:
        HEARTBEAT_TIME.pack_into(self._memory, HEARTBEAT_AT, monotonic())

    def stop(self) -> None:
        """If there were heartbeats, record that none will follow, because the function has returned."""
        if HEARTBEAT_TIME.unpack_from(self._memory, HEARTBEAT_AT)[0]:
            HEARTBEAT_TIME.pack_into(self._memory, HEARTBEAT_AT, math.inf)

    def write_report(self, step: int | None, total: int | None, metrics: dict[str, float]) -> None:
        """Write a report, which also counts as a heartbeat. Raises ValueError if the report is too large."""
        now = monotonic()
        body = marshal.dumps((now, step, total, metrics))
        if len(body) > MAX_REPORT_SIZE:
            raise ValueError(
                f"report() got metrics that take {len(body)} bytes; there is room for {MAX_REPORT_SIZE}. "
                "Pass fewer metrics, or shorter names"
            )
        # This is one slice assignment, so no other thread of this process can write meanwhile.
        record = HEARTBEAT_TIME.pack(now) + REPORT_HEADER.pack(crc32(body), len(body)) + body
        self._memory[HEARTBEAT_AT : HEARTBEAT_AT + len(record)] = record


class Slot:
    """The watcher's side: the slot of one rank, even of a dead one. `fd` is that of the file."""

    def __init__(self, fd: int, number: int) -> None:
        self._fd, self._start = fd, number * SLOT_SIZE
        self.stop_memory = stop_step.StopMemory(fd, self._start + STOP_AT)

    def clear(self) -> None:
        """Clear what the previous call of the rank has left."""
        self._write(STOP_AT, CLEARED)
        self._write(VISIT_AT, b"\0")

    def record_interrupt(self, call: int) -> None:
        """Write the number of the call that SIGINT is about to interrupt."""
        self._write(SLOT_SIZE - CALL_NUMBER.size, CALL_NUMBER.pack(call))

    def request_visit(self) -> None:
        """Let the next request for stacks open a prompt."""
        self._write(VISIT_AT, b"\1")

    def read_heartbeat_time(self) -> float | None:
        """Return only the time of the last heartbeat, None if there was none. This is faster than `read_heartbeat`."""
        (heartbeat_at,) = HEARTBEAT_TIME.unpack(os.pread(self._fd, HEARTBEAT_TIME.size, self._start + HEARTBEAT_AT))
        return heartbeat_at or None

    def read_heartbeat(self) -> HeartbeatSample:
        """Return the last heartbeat and report. Leave out a report whose checksum is wrong."""
        for _ in range(MAX_READS):
            data = os.pread(self._fd, HEARTBEAT_SIZE, self._start + HEARTBEAT_AT)
            (heartbeat_at,) = HEARTBEAT_TIME.unpack_from(data)
            checksum, length = REPORT_HEADER.unpack_from(data, HEARTBEAT_TIME.size)
            body = data[NO_REPORT.size :][:length]
            if length and len(body) == length and crc32(body) == checksum:
                return HeartbeatSample(heartbeat_at or None, Report(*marshal.loads(body)))
            if not length:
                break
        return HeartbeatSample(heartbeat_at or None, None)

    def _write(self, at: int, data: bytes) -> None:
        os.pwrite(self._fd, data, self._start + at)

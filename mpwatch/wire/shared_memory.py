"""The memory that the watcher shares with each rank.

    one anonymous file for all ranks of a run:  [ slot of rank 0 ][ slot of rank 1 ]...
    a slot:  [ four words for stop_step.py ][ interrupted call ][ visit ][ heartbeat ][ checksum and length ][ report ]

What comes before the report are words of eight bytes. In native byte order each is read and written at once. The watcher
reads the slot even when the rank is dead. The rank keeps it even if user code closes all descriptors.

- Before the watcher interrupts a call with SIGINT, it writes the number of this call. So a SIGINT that arrives between two
  calls can be ignored: its number is not that of the next call.
- If another program wants a debugger's prompt, the watcher sets `visit` to 1, and sends the signal that asks for stacks.
- A heartbeat is one write to memory, so a rank can send heartbeats in its innermost loop, from any thread.
- While the rank writes a report, the report's checksum is wrong, and the watcher reads it again.
"""

from __future__ import annotations

import marshal
import math
import mmap
import os
import struct
from binascii import crc32

from mpwatch.os_support.clock import monotonic
from mpwatch.wire.stop_step import (
    AGREED,
    AGREED_STEP,
    ASKED,
    HOLD,
    NO_STEP,
    NOTHING_ASKED,
    STATE,
    STOPPED,
    WORD,
    StopReader,
)

SLOT_SIZE = 1 << 16  # bytes: a multiple of each page size, for mmap; only pages that are written take memory
INTERRUPTED, VISIT, HEARTBEAT, HEADER, REPORT = range(STATE + 1, STATE + 6)  # the words after those of stop_step.py
# A time of CLOCK_MONOTONIC. It is 0 before the first heartbeat, and infinity if no heartbeat will follow.
HEARTBEAT_TIME = struct.Struct("d")
REPORT_HEADER = struct.Struct("=II")  # checksum and length of the report
CLEARED = NOTHING_ASKED + bytes(REPORT * WORD.size - len(NOTHING_ASKED))
HEARTBEAT_AT, HEADER_AT, REPORT_AT = (word * WORD.size for word in (HEARTBEAT, HEADER, REPORT))
MAX_REPORT_SIZE = 4080  # bytes
MAX_READS = 100  # attempts to read a complete report; writing one takes less than a microsecond


class Report:
    """What a rank passed to `mpwatch.report()`. `at` is the time of the call, by CLOCK_MONOTONIC."""

    def __init__(self, at: float, step: int | None, total: int | None, metrics: dict[str, float]) -> None:
        self.at = at
        self.step = step
        self.total = total
        self.metrics = metrics


class HeartbeatSample:
    """The last heartbeat of a rank, and its last report, or None."""

    def __init__(self, beat_at: float | None = None, report: Report | None = None) -> None:
        self.beat_at = beat_at
        self.report = report


class RankSlot:
    """In the rank: its own slot, for any thread; `steps` is for one thread alone. Closes `fd`. Raises OSError."""

    def __init__(self, fd: int, number: int) -> None:
        try:
            self._memory = mmap.mmap(fd, SLOT_SIZE, offset=number * SLOT_SIZE)
        finally:
            os.close(fd)
        self._words = memoryview(self._memory).cast("q")  # quicker than `struct`
        self._times = memoryview(self._memory).cast("d")
        self.steps = StopReader(self._words)

    def read_interrupted_call(self) -> int:
        """Return the number of the last call that the watcher has interrupted, or 0."""
        return self._words[INTERRUPTED]

    def take_visit(self) -> bool:
        """Return whether a visit was requested, once."""
        is_requested, self._words[VISIT] = bool(self._words[VISIT]), 0
        return is_requested

    def write_heartbeat(self) -> None:
        self._times[HEARTBEAT] = monotonic()

    def stop_heartbeats(self) -> None:
        """If there were heartbeats, record that none will follow, because the function has returned."""
        if self._times[HEARTBEAT]:
            self._times[HEARTBEAT] = math.inf

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
    """In the watcher: the slot of one rank. `fd` is that of the file."""

    def __init__(self, fd: int, number: int) -> None:
        self._fd, self._start = fd, number * SLOT_SIZE

    def clear(self) -> None:
        """Clear what the previous call of the rank has left."""
        os.pwrite(self._fd, CLEARED, self._start)

    def record_interrupt(self, call: int) -> None:
        """Write the number of the call that SIGINT is about to interrupt."""
        self._write(INTERRUPTED, call)

    def request_visit(self) -> None:
        """Let the next request for stacks open a prompt."""
        self._write(VISIT, 1)

    def read_heartbeat(self) -> HeartbeatSample:
        """Return the last heartbeat and report. Leave out a report whose checksum is wrong."""
        for _ in range(MAX_READS):
            data = os.pread(self._fd, REPORT_AT + MAX_REPORT_SIZE, self._start)
            (beat_at,) = HEARTBEAT_TIME.unpack_from(data, HEARTBEAT_AT)
            checksum, length = REPORT_HEADER.unpack_from(data, HEADER_AT)
            body = data[REPORT_AT:][:length]
            if length and len(body) == length and crc32(body) == checksum:
                return HeartbeatSample(beat_at or None, Report(*marshal.loads(body)))
            if not length:
                break
        return HeartbeatSample(beat_at or None)

    # ---- should_stop, see stop_step.py

    def hold_steps(self) -> None:
        """Make the rank wait at its next call of `should_stop` until `agree_on_step` is called."""
        self._write(STATE, HOLD)

    def agree_on_step(self, step: int | None) -> None:
        """Make the rank stop at its first step after `step`, or at its next call of `should_stop` if `step` is None."""
        self._write(AGREED_STEP, NO_STEP if step is None else step)
        self._write(STATE, AGREED)

    def read_passed_step(self) -> int | None:
        return self._read_step(ASKED)

    def read_stopped_step(self) -> int | None:
        """Return the first step for which `should_stop` has returned True in the rank, or None if there was none."""
        return self._read_step(STOPPED)

    def _read_step(self, word: int) -> int | None:
        step: int = WORD.unpack(os.pread(self._fd, WORD.size, self._start + word * WORD.size))[0]
        return None if step == NO_STEP else step

    def _write(self, word: int, value: int) -> None:
        os.pwrite(self._fd, WORD.pack(value), self._start + word * WORD.size)

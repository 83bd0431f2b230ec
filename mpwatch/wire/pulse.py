"""A rank's pulse: when it was last heard of, and what it last reported, in memory that the watcher looks into at will.

    in a rank's slot (slots.py):  [ last beat ][ checksum, length ][ last report ]

A beat is one store of eight bytes, so a rank may beat in its innermost loop, from any thread, whatever the watcher does. A
report is written in one go; one that is being written while the watcher looks has a wrong checksum, and is read again.
"""

from __future__ import annotations

import marshal
import os
import struct
import time
from binascii import crc32

from .slots import PULSE, SLOT, WORDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap

__all__ = ["Pulse", "Reading", "read_pulse"]

BEAT = struct.Struct("=d")  # of CLOCK_MONOTONIC; 0: none yet
HEAD = struct.Struct("=II")
ROOM = PULSE - BEAT.size - HEAD.size
LOOKS = 100  # a report is written in less than a microsecond


class Reading:
    """What the watcher finds: the time of the last beat, if there was any, and the last report, if there was any."""

    __slots__ = ("beat_at", "report")

    def __init__(self, beat_at: float | None, report: tuple[float, int | None, int | None, dict[str, float]] | None) -> None:
        self.beat_at = beat_at
        self.report = report  # when, step, total, metrics


class Pulse:
    """The rank's side, in the memory of its slot."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def beat(self) -> None:
        """The rank is alive and well."""
        BEAT.pack_into(self._memory, WORDS, time.monotonic())

    def report(self, step: int | None, total: int | None, metrics: dict[str, float]) -> None:
        """So far it has come. Raises ValueError if there is no room for that many metrics."""
        now = time.monotonic()
        body = marshal.dumps((now, step, total, metrics))
        if len(body) > ROOM:
            raise ValueError(f"report() got {len(metrics)} metrics that take {len(body)} bytes; there is room for {ROOM}")
        # in one slice: no other thread of this process comes between
        record = BEAT.pack(now) + HEAD.pack(crc32(body), len(body)) + body
        self._memory[WORDS : WORDS + len(record)] = record


def read_pulse(fd: int, slot: int) -> Reading:
    """The watcher's side: the pulse of the rank of that slot, alive or dead."""
    for _ in range(LOOKS):
        data = os.pread(fd, PULSE, slot * SLOT + WORDS)
        (beat,) = BEAT.unpack_from(data)
        checksum, length = HEAD.unpack_from(data, BEAT.size)
        body = data[BEAT.size + HEAD.size :][:length]
        if length and crc32(body) == checksum:
            return Reading(beat, marshal.loads(body))
        if not length:
            break
    return Reading(beat or None, None)

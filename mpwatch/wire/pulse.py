"""A rank's pulse: when it was last heard of, and what it last reported, in memory that the watcher looks into at will.

    in a rank's slot (slots.py):  [ last beat ][ checksum, length ][ last report: when, step, total, names and numbers ]

A beat is one store of eight bytes, so a rank may beat in its innermost loop, from any thread, whatever the watcher does. A
report is written in one go; one that is being written while the watcher looks has a wrong checksum, and is read again.
"""

from __future__ import annotations

import math
import os
import struct
import time
from binascii import crc32

from .slots import PULSE, SLOT, WORDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap

__all__ = ["Pulse", "Reading", "forget_pulse", "read_beat", "read_pulse"]

BEAT = struct.Struct("d")  # of CLOCK_MONOTONIC; 0: none yet. Native, which is copied as one
HEAD = struct.Struct("=II")
REPORT = struct.Struct("=dqqH")  # when, step, total, number of metrics
METRIC = struct.Struct("=dH")  # value, length of the name, which follows
NO_COUNT = -(1 << 63)
ROOM = PULSE - BEAT.size - HEAD.size
LOOKS = 100  # a report is written in less than a microsecond
ENCODING = ("utf-8", "surrogatepass")


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

    def rest(self) -> None:
        """The function has returned: nothing beats any more. A rank that has never beaten does not begin to."""
        if BEAT.unpack_from(self._memory, WORDS)[0]:
            BEAT.pack_into(self._memory, WORDS, math.inf)

    def report(self, step: int | None, total: int | None, metrics: dict[str, float]) -> None:
        """So far it has come. Raises ValueError for what there is no room for."""
        now = time.monotonic()
        body = _encode(now, step, total, metrics)
        if len(body) > ROOM:
            raise ValueError(f"report() got {len(metrics)} metrics that take {len(body)} bytes; there is room for {ROOM}")
        # in one slice: no other thread of this process comes between
        record = BEAT.pack(now) + HEAD.pack(crc32(body), len(body)) + body
        self._memory[WORDS : WORDS + len(record)] = record


def read_beat(fd: int, slot: int) -> float | None:
    """The watcher's side: when the rank of that slot was last heard of."""
    (beat,) = BEAT.unpack(os.pread(fd, BEAT.size, slot * SLOT + WORDS))
    return beat or None


def read_pulse(fd: int, slot: int) -> Reading:
    """All of the pulse of the rank of that slot, alive or dead. Nothing is believed that does not fit."""
    for _ in range(LOOKS):
        data = os.pread(fd, PULSE, slot * SLOT + WORDS)
        (beat,) = BEAT.unpack_from(data)
        checksum, length = HEAD.unpack_from(data, BEAT.size)
        body = data[BEAT.size + HEAD.size :][:length]
        if length and crc32(body) == checksum:
            return Reading(beat or None, _decode(body))
        if not length:
            break
    return Reading(beat or None, None)


def forget_pulse(fd: int, slot: int) -> None:
    """The rank of that slot, which is idle, has neither beaten nor reported."""
    os.pwrite(fd, bytes(BEAT.size + HEAD.size), slot * SLOT + WORDS)


def _encode(at: float, step: int | None, total: int | None, metrics: dict[str, float]) -> bytes:
    try:
        counts = [NO_COUNT if count is None else count for count in (step, total)]
        parts = [REPORT.pack(at, *counts, len(metrics))]
        for name, value in metrics.items():
            text = name.encode(*ENCODING)
            parts += (METRIC.pack(value, len(text)), text)
    except struct.error as error:
        raise ValueError(f"report() has room for numbers of 64 bits and names of 64 KB: {error}") from None
    return b"".join(parts)


def _decode(body: bytes) -> tuple[float, int | None, int | None, dict[str, float]] | None:
    try:
        at, step, total, count = REPORT.unpack_from(body)
        metrics, end = {}, REPORT.size
        for _ in range(count):
            value, length = METRIC.unpack_from(body, end)
            end += METRIC.size + length
            metrics[body[end - length : end].decode(*ENCODING)] = value
    except (struct.error, UnicodeDecodeError):
        return None
    return at, None if step == NO_COUNT else step, None if total == NO_COUNT else total, metrics

"""Share memory between the watcher and each rank. It needs no channel, and it outlives the rank.

    one anonymous file for all ranks of a run:  [ slot of rank 0 ][ slot of rank 1 ]...
    a slot:        [ black box ][ heartbeat memory ][ number of the interrupted call ]
    black box:     [ frame ][ frame ][ zeros ]
    heartbeats:    [ time of the last one ][ checksum, length ][ last report: time, step, total, metrics ]

- The black box holds answers that cannot go over the channel. An answer is made of frames (messages.py). The header of a
  frame is written last, so a frame that was cut off does not count. The watcher reads the box once the rank is dead.
- A heartbeat is one store of eight bytes. A rank can send heartbeats in its innermost loop, from any thread. The watcher
  reads them at any time. A report that is being written has a wrong checksum, and the watcher reads it again.
- The call's number, counted from 1, is that of the latest call that the watcher has interrupted. A signal does not say
  which call it is meant for, and it can arrive just after that call was answered.

A rank maps its slot and closes the descriptor: code that closes every descriptor (a daemon) does not lose a mapping.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from binascii import crc32

from mpwatch.wire.messages import HEADER, Message, parse_header

SLOT = 1 << 20  # bytes; only pages that are written take memory
PULSE = 4096  # bytes of the heartbeat memory
NUMBER = struct.Struct("Q")
WORDS = SLOT - PULSE - NUMBER.size  # bytes of the black box; the heartbeat memory follows

BEAT = struct.Struct("d")  # of CLOCK_MONOTONIC; 0: none yet. Native byte order, because it is copied in one store
HEAD = struct.Struct("=II")  # checksum and length of the report
REPORT = struct.Struct("=dqqH")  # time, step, total, number of metrics
METRIC = struct.Struct("=dH")  # value, length of the name; the name follows
NO_COUNT = -(1 << 63)
ROOM = PULSE - BEAT.size - HEAD.size  # bytes of a report
MAX_READS = 100  # writing a report takes less than a microsecond
ENCODING = ("utf-8", "surrogatepass")

# The slot


def open_slot(fd: int, slot: int) -> mmap.mmap:
    """Map this rank's slot, in the rank, and close the descriptor. Raises OSError."""
    try:
        return mmap.mmap(fd, SLOT, offset=slot * SLOT)
    finally:
        os.close(fd)


def clear_slot(fd: int, slot: int) -> None:
    """Clear the slot of a dead rank, in the watcher, for the next rank. Pages that were never written stay holes."""
    zeros = bytes(WORDS)
    if os.pread(fd, WORDS, slot * SLOT) != zeros:
        os.pwrite(fd, zeros, slot * SLOT)
    os.pwrite(fd, bytes(SLOT - WORDS), slot * SLOT + WORDS)


def note_interrupt(fd: int, slot: int, call: int) -> None:
    """Write the number of the call to be interrupted, in the watcher, before it sends the signal."""
    os.pwrite(fd, NUMBER.pack(call), (slot + 1) * SLOT - NUMBER.size)


def interrupted_call(memory: mmap.mmap) -> int:
    """Read the number of the interrupted call, in the rank. It is 0 if there was none."""
    number: int = NUMBER.unpack_from(memory, SLOT - NUMBER.size)[0]
    return number


# The black box


class BlackBox:
    """The rank's side of the black box.

    Args:
        memory: the rank's slot.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._used = 0

    def leave(self, frame: bytes) -> bool:
        """Append a frame. Return False if there is no room for it."""
        start, end = self._used, self._used + len(frame)
        if end > WORDS:
            return False
        body = start + HEADER.size
        self._memory[body:end] = frame[HEADER.size :]
        self._memory[start:body] = frame[: HEADER.size]
        self._used = end
        return True


def read_answer(fd: int, slot: int) -> list[Message]:
    """Read the black box of a dead rank, in the watcher. Raises ValueError if its content was overwritten."""
    messages = []
    at, end = slot * SLOT, slot * SLOT + WORDS
    while len(head := os.pread(fd, min(HEADER.size, end - at), at)) == HEADER.size and any(head):
        kind, stamp, length = parse_header(head)
        at += HEADER.size
        messages.append(Message(kind, stamp, os.pread(fd, min(length, end - at), at)))
        at += length
        if at > end:
            raise ValueError(f"a message of {length} bytes in a slot of {SLOT}")
    return messages


# Heartbeats and reports


class HeartbeatSample:
    """A sample of the heartbeat memory: the time of the last heartbeat, if any, and the last report, if any."""

    __slots__ = ("beat_at", "report")

    def __init__(self, beat_at: float | None, report: tuple[float, int | None, int | None, dict[str, float]] | None) -> None:
        self.beat_at = beat_at
        self.report = report  # time, step, total, metrics


class HeartbeatWriter:
    """The rank's side of the heartbeat memory.

    Args:
        memory: the rank's slot.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def beat(self) -> None:
        """Write a heartbeat."""
        BEAT.pack_into(self._memory, WORDS, time.monotonic())

    def rest(self) -> None:
        """Write that no heartbeat follows: the function has returned. A rank without any heartbeat stays without."""
        if BEAT.unpack_from(self._memory, WORDS)[0]:
            BEAT.pack_into(self._memory, WORDS, math.inf)

    def report(self, step: int | None, total: int | None, metrics: dict[str, float]) -> None:
        """Write a report, which is a heartbeat, too. Raises ValueError if there is no room for it."""
        now = time.monotonic()
        body = _encode(now, step, total, metrics)
        if len(body) > ROOM:
            raise ValueError(f"report() got {len(metrics)} metrics that take {len(body)} bytes; there is room for {ROOM}")
        # in one slice, so that no other thread of this process writes in between
        record = BEAT.pack(now) + HEAD.pack(crc32(body), len(body)) + body
        self._memory[WORDS : WORDS + len(record)] = record


def read_beat(fd: int, slot: int) -> float | None:
    """Read the time of the last heartbeat, in the watcher."""
    (beat,) = BEAT.unpack(os.pread(fd, BEAT.size, slot * SLOT + WORDS))
    return beat or None


def read_pulse(fd: int, slot: int) -> HeartbeatSample:
    """Read the last heartbeat and report, in the watcher. A report that does not fit its checksum is left out."""
    for _ in range(MAX_READS):
        data = os.pread(fd, PULSE, slot * SLOT + WORDS)
        (beat,) = BEAT.unpack_from(data)
        checksum, length = HEAD.unpack_from(data, BEAT.size)
        body = data[BEAT.size + HEAD.size :][:length]
        if length and crc32(body) == checksum:
            return HeartbeatSample(beat or None, _decode(body))
        if not length:
            break
    return HeartbeatSample(beat or None, None)


def forget_pulse(fd: int, slot: int) -> None:
    """Clear the heartbeat memory of an idle rank, in the watcher."""
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

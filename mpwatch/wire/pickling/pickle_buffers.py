"""Pickles and their large buffers, for another process: bytes while they are small, else an anonymous file.

    [ pickle ][ pickle ]...  [ buffer ]  [ buffer ]...  [ place of each buffer ][ their number, mark ]
                             `-- each on pages of its own --'

Pickle writes straight into it. Who gets the file maps it, and what is made of the buffers (arrays, tensors, memoryviews) has
its memory there: the pages are the same for all who have them until somebody writes to his, and are given back when
nobody has any. Runs on both sides, and imports nothing that small bundles do not need.
"""

from __future__ import annotations

import io
import mmap
import os
import struct

from mpwatch.os_support.descriptors import anonymous_file, map_private, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable
    from typing import Any

# Bytes from which on a buffer goes beside the pickle: what it then takes, a page and a half on average and its share of a
# mapping, is little against a copy for each rank. No more than pickle's frames (64 KiB), beyond which it would write a
# PickleBuffer itself, which has no length.
LARGE = 1 << 16
PLACE = struct.Struct("<QQ")  # offset, size
END = struct.Struct("<Q4s")
MARK = b"mpwb"


class PickleBundle:
    """A bundle in the making, and then made: `body`, or where that is empty, `file`, which it owns. Closed when dropped.

    Args:
        name: of the file, for whoever looks into /proc.
        limit: bytes up to which it has no file, if it has no large buffers.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.file: io.FileIO | None = None
        self._buffers: list[memoryview] = []  # to be written after the pickles
        self.body = b""
        self._name = name
        self._limit = limit
        self._small = bytearray()

    def write(self, data: bytes | bytearray) -> None:
        """For pickle, which comes with frames of 64 KiB, and with large bytes as they are. Raises OSError."""
        if self.file is None and len(self._small) + len(data) <= self._limit:
            self._small += data
        else:
            write_all(self._spilt(), data)

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """For pickle: whether it shall write this buffer itself, as it does with small ones."""
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        self._buffers.append(raw)
        return False

    def finish(self) -> None:
        """After the last pickle. Raises OSError."""
        places = [self._add(buffer) for buffer in self._buffers]
        end = b"".join(PLACE.pack(*place) for place in places) + END.pack(len(places), MARK)
        self._buffers.clear()
        if self.file is None:
            self.body = bytes(self._small + end)
        else:
            write_all(self.file.fileno(), end)

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.body) if self.file is None else os.fstat(self.file.fileno()).st_size

    def close(self) -> None:
        """Give the file back, and let go of what was to be written."""
        if self.file is not None:
            self.file.close()
        self._buffers.clear()

    __del__ = close

    def _spilt(self) -> int:
        if self.file is None:
            self.file = anonymous_file(self._name)
            write_all(self.file.fileno(), self._small)
            self._small.clear()
        return self.file.fileno()

    def _add(self, buffer: memoryview) -> tuple[int, int]:
        fd = self._spilt()
        at = -(-os.lseek(fd, 0, os.SEEK_CUR) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.lseek(fd, at, os.SEEK_SET)
        write_all(fd, buffer)
        return at, buffer.nbytes


class NullBundle:
    """In place of a bundle, where only the exception matters that pickling may raise."""

    def write(self, _: object) -> None:
        """For pickle."""

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """For pickle."""
        buffer.raw()
        return False


def mapped(fd: int) -> memoryview:
    """The bundle in this file, for `opened`. Raises OSError.

    Without buffers it is mapped as Python does it, which costs no import; that keeps a descriptor for as long.
    """
    size = os.fstat(fd).st_size
    number, _ = END.unpack(os.pread(fd, END.size, size - END.size))
    return map_private(fd, size) if number else memoryview(mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ))


def opened(bundle: bytes | memoryview) -> tuple[Reader | io.BytesIO, list[memoryview]]:
    """What pickle reads the pickles from, and the buffers for it. Raises ValueError if this is no bundle."""
    data = memoryview(bundle)
    number, mark = END.unpack(data[-END.size :]) if len(data) >= END.size else (0, b"")
    if mark != MARK:
        raise ValueError("not a bundle of mpwatch")
    if not number and isinstance(bundle, bytes):
        return io.BytesIO(bundle), []
    if number and data.readonly:  # it is short and was copied, or came through a black box, see slots.py
        data = memoryview(bytearray(data))
    places = data[len(data) - END.size - number * PLACE.size : len(data) - END.size]
    return Reader(data), [data[at : at + size] for at, size in PLACE.iter_unpack(places)]


class Reader:
    """A file over bytes in memory. An mmap is one, too, but without `readinto` a large object would be copied twice."""

    def __init__(self, data: memoryview) -> None:
        self._rest = data

    def read(self, size: int) -> bytes:
        """So many bytes, or what there is."""
        return bytes(self._take(size))

    def readinto(self, room: memoryview) -> int:
        """The same into memory that is there."""
        taken = self._take(len(room))
        room[: len(taken)] = taken
        return len(taken)

    def readline(self) -> bytes:
        """Pickle wants to have it, and does not use it: there are no lines in protocol 5."""
        raise NotImplementedError

    def _take(self, size: int) -> memoryview:
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def _reduce_view(view: memoryview) -> Any:
    import pickle

    if not view.c_contiguous:
        raise TypeError("cannot pickle a memoryview that is not contiguous; pass a copy of it")
    try:
        memoryview(bytes(view.itemsize)).cast(view.format)  # type: ignore[call-overload]
    except ValueError:  # of ctypes, say, or of several values together
        raise TypeError(f"cannot pickle a memoryview of the format {view.format!r}; pass what it is a view of") from None
    return _view, (pickle.PickleBuffer(view), view.format, view.shape)


def _view(buffer: bytes | bytearray | memoryview, form: Any, shape: tuple[int, ...]) -> memoryview:
    view = memoryview(buffer)
    return view.cast(form, shape) if view.nbytes else view  # there is no cast of nothing


REDUCERS: dict[type, Callable[[Any], Any]] = {memoryview: _reduce_view}  # how to pickle what pickle cannot

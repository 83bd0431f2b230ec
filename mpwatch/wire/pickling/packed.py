"""Pickles with their large buffers beside them: a few bytes, or one memory file that all receivers map.

    [ pickle ][ pickle ]...  [ buffer ]  [ buffer ]...  [ index ][ trailer ]
                             `-- each begins a new page

Each pickle can be loaded without the others. A large array, tensor or memoryview then uses the mapped memory, which all
receivers share. If a receiver writes to a page, the kernel copies this page for it.

This module runs in the watcher and in the ranks.
"""

from __future__ import annotations

import marshal
import mmap
import os
import pickle
import struct

from mpwatch.os_support.descriptors import map_private, open_anonymous_file, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    import io
    from collections.abc import Callable
    from typing import Any, Self

# Bytes. A buffer beside its pickle takes a page and a half more on average, and a part of a mapping. The size must not
# exceed that of pickle's frames (64 KiB), or pickle would write larger PickleBuffers itself, as objects without a length.
MIN_BUFFER_SIZE = 1 << 16
TRAILER = struct.Struct("<QQ")  # size of the index, number of buffers


class Packed:
    """What pickle writes. After `finish` it is in `body`, or in `file` if `body` is empty: more than `limit` bytes go into a
    file, as all large buffers do. `name` is its name in /proc.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.file: io.FileIO | None = None
        self.body = b""
        self._name = name
        self._limit = limit
        self._small = bytearray()
        self._size = 0
        self._pickles: list[tuple[int, list[int]]] = []  # the end of each, and the numbers of its buffers
        self._buffers: list[memoryview] = []  # written after the pickles
        self._owners: dict[int, int] = {}  # the number of the buffer of an object, such as an array, by id
        self._numbers: list[int] = []  # of the buffers of the pickle that is written now

    def write(self, data: bytes | bytearray) -> None:
        self._size += len(data)
        if self.file is None and len(self._small) + len(data) <= self._limit:
            self._small += data
        else:
            write_all(self._open_file(), data)

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a large buffer, once for all pickles. If the result is True, pickle writes the bytes into the pickle."""
        raw = buffer.raw()  # raises if the buffer is not contiguous
        if raw.nbytes < MIN_BUFFER_SIZE:
            return True
        number = self._owners.setdefault(id(raw.obj), len(self._buffers))
        if number == len(self._buffers):
            self._buffers.append(raw)
        self._numbers.append(number)
        return False

    def end_pickle(self) -> None:
        self._pickles.append((self._size, self._numbers))
        self._numbers = []

    def finish(self, about: str = "") -> Self:
        index = marshal.dumps((about, self._pickles, [self._write_buffer(buffer) for buffer in self._buffers]))
        end = index + TRAILER.pack(len(index), len(self._buffers))
        self._buffers.clear()
        if self.file is None:
            self.body = bytes(self._small + end)
        else:
            write_all(self.file.fileno(), end)
        return self

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        self._buffers.clear()

    __del__ = close

    def _open_file(self) -> int:
        if self.file is None:
            self.file = open_anonymous_file(self._name)
            write_all(self.file.fileno(), self._small)
            self._small.clear()
        return self.file.fileno()

    def _write_buffer(self, buffer: memoryview) -> tuple[int, int]:
        fd = self._open_file()
        at = -(-os.lseek(fd, 0, os.SEEK_CUR) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.lseek(fd, at, os.SEEK_SET)
        write_all(fd, buffer)
        return at, buffer.nbytes


def map_packed(fd: int) -> memoryview:
    """Map the file of a `Packed` into memory. Raises OSError."""
    size = os.fstat(fd).st_size
    _, buffers = TRAILER.unpack(os.pread(fd, TRAILER.size, size - TRAILER.size))
    if buffers:
        return map_private(fd, size)  # imports ctypes if Python is older than 3.13
    return memoryview(mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ))  # soon unmapped: it holds a descriptor


class Unpacked:
    """The content of a `Packed`: its body, or the mapped file."""

    def __init__(self, content: bytes | memoryview) -> None:
        data = memoryview(content)
        end = len(data) - TRAILER.size
        size, buffers = TRAILER.unpack(data[end:])
        if buffers and data.readonly:  # the file was copied into a message
            data = memoryview(bytearray(data))
        self._data = data
        self.about, self._pickles, self._places = marshal.loads(data[end - size : end])

    def __len__(self) -> int:
        return len(self._pickles)

    def load(self, number: int = -1) -> Any:
        """Load one pickle, the last one by default. This runs user code, so it can raise any exception."""
        number %= len(self)
        start = self._pickles[number - 1][0] if number else 0
        end, numbers = self._pickles[number]
        places = [self._places[each] for each in numbers]
        return pickle.loads(self._data[start:end], buffers=[self._data[at : at + size] for at, size in places])


def _reduce_view(view: memoryview) -> Any:
    if not view.c_contiguous:
        raise TypeError("cannot pickle a memoryview that is not contiguous; pass a copy of it")
    try:
        memoryview(bytes(view.itemsize)).cast(view.format)  # type: ignore[call-overload]
    except ValueError:  # for example, the format is one of ctypes, or has several values
        raise TypeError(f"cannot pickle a memoryview of the format {view.format!r}; pass what it is a view of") from None
    return _rebuild_view, (pickle.PickleBuffer(view), view.format, view.shape)


def _rebuild_view(buffer: bytes | bytearray | memoryview, form: Any, shape: tuple[int, ...]) -> memoryview:
    view = memoryview(buffer)
    return view.cast(form, shape) if view.nbytes else view  # an empty view cannot be cast


VIEW_REDUCERS: dict[type, Callable[[Any], Any]] = {memoryview: _reduce_view}  # pickle has no reducer for it

"""Pickle bundles: pickles and their large buffers, as bytes if they are small, else in an anonymous file.

    [ pickle ][ pickle ]...  [ buffer ]  [ buffer ]...  [ position of each buffer ][ number of buffers, magic number ]
                             `-- each begins a new page

The sender lets pickle write directly into the bundle. The receiver maps the file. Unpickled arrays, tensors and memoryviews
have their memory in that mapping. All receivers share its pages; a write copies the page and is seen only by the process
that wrote. A page is freed when no process uses it.

Runs in the watcher and in the ranks. The imports that only large bundles need are in functions.
"""

from __future__ import annotations

import io
import mmap
import os
import struct

from mpwatch.os_support.descriptors import map_private, open_anonymous_file, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable
    from typing import Any

# Bytes. A buffer of this size or more is written beside the pickle. Its overhead (on average a page and a half, and
# its share of a mapping) is small compared with one copy for each rank. It must not exceed the size of pickle's frames (64
# KiB): pickle would write a larger PickleBuffer itself, as an object that has no length.
MIN_BUFFER_SIZE = 1 << 16
BUFFER_POSITION = struct.Struct("<QQ")  # offset, size
TRAILER = struct.Struct("<Q4s")  # number of buffers, magic number
MAGIC = b"mpwb"


class PickleBundle:
    """A bundle that pickle writes to, and that `finish` completes. Then it is in `body` or, if that is empty, in `file`.

    The bundle owns its file, and closes it when it is garbage-collected.


    Args:
        name: the name of the file in /proc.
        limit: a bundle without large buffers has no file up to this number of bytes.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.file: io.FileIO | None = None
        self._buffers: list[memoryview] = []  # written after the pickles
        self.body = b""
        self._name = name
        self._limit = limit
        self._small = bytearray()

    def write(self, data: bytes | bytearray) -> None:
        """Write bytes; pickle calls it. Raises OSError."""
        if self.file is None and len(self._small) + len(data) <= self._limit:
            self._small += data
        else:
            write_all(self._open_file(), data)

    def keep_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether pickle shall write this buffer itself; pickle calls it. The bundle takes the large ones."""
        raw = buffer.raw()
        if raw.nbytes < MIN_BUFFER_SIZE:
            return True
        self._buffers.append(raw)
        return False

    def finish(self) -> None:
        """Complete the bundle after the last pickle. Raises OSError."""
        places = [self._write_buffer(buffer) for buffer in self._buffers]
        end = b"".join(BUFFER_POSITION.pack(*place) for place in places) + TRAILER.pack(len(places), MAGIC)
        self._buffers.clear()
        if self.file is None:
            self.body = bytes(self._small + end)
        else:
            write_all(self.file.fileno(), end)

    @property
    def size(self) -> int:
        """The size in bytes."""
        return len(self.body) if self.file is None else os.fstat(self.file.fileno()).st_size

    def close(self) -> None:
        """Close the file, and release the buffers."""
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


class NullBundle:
    """A replacement for a bundle that discards what it gets. It shows whether pickling raises an exception."""

    def write(self, _: object) -> None:
        """Discard bytes; pickle calls it."""

    def keep_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        buffer.raw()  # raises for a buffer that is not contiguous
        return False


def map_bundle(fd: int) -> memoryview:
    """Map the bundle in this file, for `open_bundle`. Raises OSError.

    A bundle without buffers is mapped by the module mmap. That needs no further import, but keeps a descriptor open until
    the bundle is unpickled.
    """
    size = os.fstat(fd).st_size
    number, _ = TRAILER.unpack(os.pread(fd, TRAILER.size, size - TRAILER.size))
    return map_private(fd, size) if number else memoryview(mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ))


def open_bundle(bundle: bytes | memoryview) -> tuple[BundleReader | io.BytesIO, list[memoryview]]:
    """Return a file-like object for pickle to read from, and the buffers. Raises ValueError if this is not a bundle."""
    data = memoryview(bundle)
    number, mark = TRAILER.unpack(data[-TRAILER.size :]) if len(data) >= TRAILER.size else (0, b"")
    if mark != MAGIC:
        raise ValueError("not a bundle of mpwatch")
    if not number and isinstance(bundle, bytes):
        return io.BytesIO(bundle), []
    if number and data.readonly:  # it is short and was copied, or came through a black box, see wire/shared_memory.py
        data = memoryview(bytearray(data))
    places = data[len(data) - TRAILER.size - number * BUFFER_POSITION.size : len(data) - TRAILER.size]
    return BundleReader(data), [data[at : at + size] for at, size in BUFFER_POSITION.iter_unpack(places)]


class BundleReader:
    """A file-like object over memory. An mmap object is one, too, but it has no `readinto`: pickle would copy twice."""

    def __init__(self, data: memoryview) -> None:
        self._rest = data

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes."""
        return bytes(self._take(size))

    def readinto(self, target: memoryview) -> int:
        """Fill this memory as far as there are bytes. Return their number."""
        taken = self._take(len(target))
        target[: len(taken)] = taken
        return len(taken)

    def readline(self) -> bytes:
        """Raise NotImplementedError. Pickle requires this method, but protocol 5 has no lines."""
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
    except ValueError:  # a format of ctypes, for example, or one of several values
        raise TypeError(f"cannot pickle a memoryview of the format {view.format!r}; pass what it is a view of") from None
    return _rebuild_view, (pickle.PickleBuffer(view), view.format, view.shape)


def _rebuild_view(buffer: bytes | bytearray | memoryview, form: Any, shape: tuple[int, ...]) -> memoryview:
    view = memoryview(buffer)
    return view.cast(form, shape) if view.nbytes else view  # an empty view cannot be cast


VIEW_REDUCERS: dict[type, Callable[[Any], Any]] = {memoryview: _reduce_view}  # pickle has no reducer for it

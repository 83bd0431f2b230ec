"""A pickle bundle contains pickles, and the large buffers of the pickled objects.

A small bundle is stored in a bytes object. A large bundle is stored in an anonymous file.

    [ pickles ][ part 0 ][ part 1 ]...  [ buffer ]  [ buffer ]...  [ positions of buffers ][ positions of parts ][ trailer ]
                                        `-- each buffer begins a new page

A bundle begins with the common pickles, which are for all receivers. Each part contains additional pickles for one receiver.

The receiver of a large bundle maps the bundle's file into memory. When the receiver unpickles a large array, tensor or
memoryview, the new object uses the mapped memory directly, so its bytes are not copied. All receivers share the memory pages
of the file. If a receiver writes to a page, the kernel copies the page for this receiver.

This module runs in the watcher and in the ranks. Some modules are imported inside functions, because only large bundles need
these modules.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
from itertools import islice, pairwise

from mpwatch.os_support.descriptors import map_private, open_anonymous_file, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

# Bytes. A buffer of this size or more is written beside the pickle. The buffer then needs a page and a half more on average,
# and a part of a mapping. That is little compared with one copy for each rank. This constant must not exceed the size of
# pickle's frames (64 KiB). Otherwise pickle would write larger PickleBuffers itself, as objects that have no length.
MIN_BUFFER_SIZE = 1 << 16
BUFFER_POSITION = struct.Struct("<QQ")  # offset, size
PART_POSITION = struct.Struct("<QQ")  # offset, number of the part's first buffer
TRAILER = struct.Struct("<QQ4s")  # number of buffers, number of parts, magic number
MAGIC = b"mpwb"
PLAIN_TRAILER = TRAILER.pack(0, 0, MAGIC)  # of a bundle that has neither buffers nor parts


class PickleBundle:
    """A bundle into which pickle writes. After `finish`, the bundle is in `body`, or in `file` if `body` is empty.

    The bundle owns the file, and closes it when the bundle is garbage-collected.

    Args:
        name: the name of the file in /proc.
        limit: if the pickles have more bytes than this, the bundle has a file. A bundle with large buffers always has a
            file.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.file: io.FileIO | None = None
        self._buffers: list[memoryview] = []  # written after the pickles
        self._parts: list[tuple[int, int]] = []
        self._pickle_size = 0
        self.body = b""
        self._name = name
        self._limit = limit
        self._small = bytearray()

    def write(self, data: bytes | bytearray) -> None:
        """Write bytes into the bundle. pickle calls this method. Raises OSError."""
        self._pickle_size += len(data)
        if self.file is None and len(self._small) + len(data) <= self._limit:
            self._small += data
        else:
            write_all(self._open_file(), data)

    def keep_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep the buffer for `finish` if it is large. Return whether the buffer is small.

        pickle calls this method for each buffer. If the result is True, pickle writes the buffer's bytes into the pickle.
        """
        raw = buffer.raw()
        if raw.nbytes < MIN_BUFFER_SIZE:
            return True
        self._buffers.append(raw)
        return False

    def begin_part(self) -> None:
        """Begin a new part, to which the next pickles belong."""
        self._parts.append((self._pickle_size, len(self._buffers)))

    def finish(self) -> None:
        """Complete the bundle after the last pickle. Raises OSError."""
        places = self._write_buffers()
        end = b"".join(BUFFER_POSITION.pack(*place) for place in places)
        end += b"".join(PART_POSITION.pack(*part) for part in self._parts)
        end += TRAILER.pack(len(places), len(self._parts), MAGIC)
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
        """Close the bundle's file, and release the buffers."""
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

    def _write_buffers(self) -> list[tuple[int, int]]:
        """Write all buffers into the file, and return the offset and the size of each buffer.

        If objects in several parts share memory, such as slices of one tensor, this memory is written only once. Two buffers
        of the same part are written separately even if they share memory, so the receiver can change one of them without
        changing the other one.
        """
        starts = [first for _, first in self._parts]
        common_end = starts[0] if starts else len(self._buffers)
        places = [self._write_buffer(buffer) for buffer in self._buffers[:common_end]]
        written: dict[tuple[int, int], tuple[int, int]] = {}  # by address and size
        for start, end in pairwise([*starts, len(self._buffers)]):
            in_part: set[tuple[int, int]] = set()
            for buffer in self._buffers[start:end]:
                memory = _get_address(buffer), buffer.nbytes
                place = self._write_buffer(buffer) if memory in in_part or memory not in written else written[memory]
                in_part.add(memory)
                written[memory] = place
                places.append(place)
        return places

    def _write_buffer(self, buffer: memoryview) -> tuple[int, int]:
        fd = self._open_file()
        at = -(-os.lseek(fd, 0, os.SEEK_CUR) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.lseek(fd, at, os.SEEK_SET)
        write_all(fd, buffer)
        return at, buffer.nbytes


def _get_address(buffer: memoryview) -> int:
    """Return the address of the buffer's memory, or the id of the buffer object if the buffer is read-only."""
    import ctypes

    return id(buffer) if buffer.readonly else ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class NullBundle:
    """Replaces a PickleBundle, but discards all bytes that pickle writes.

    `probe` pickles an object into a NullBundle to check whether the object can be pickled.
    """

    def write(self, _: object) -> None:
        """Discard the bytes that pickle writes."""

    def keep_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        buffer.raw()  # raises if the buffer is not contiguous
        return False


def map_bundle(fd: int) -> memoryview:
    """Map the bundle in this file into memory, so that `OpenBundle` can read the bundle. Raises OSError.

    `map_bundle` uses `map_private` only for a bundle with large buffers, because `map_private` imports ctypes if Python is
    older than 3.13. The mapping of a bundle without large buffers keeps a descriptor open, but only until the bundle has
    been unpickled.
    """
    size = os.fstat(fd).st_size
    number, _, _ = TRAILER.unpack(os.pread(fd, TRAILER.size, size - TRAILER.size))
    return map_private(fd, size) if number else memoryview(mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ))


class OpenBundle:
    """A bundle from which an unpickler reads.

    To make the unpickler, call `pickle.Unpickler(bundle.stream, buffers=bundle.buffers)`. First load the common pickles with
    this unpickler. Then call `open_part`, and use the same unpickler to load the pickles of a part. The constructor raises
    ValueError if the data are not a bundle.
    """

    def __init__(self, bundle: bytes | memoryview) -> None:
        if isinstance(bundle, bytes) and bundle.endswith(PLAIN_TRAILER):
            self._parts: list[tuple[int, int]] = []
            self.buffers: Iterator[memoryview] = iter(())
            self.stream: io.BytesIO | BundleReader = io.BytesIO(bundle)
            return
        data = memoryview(bundle)
        trailer_at = len(data) - TRAILER.size
        buffers, parts, mark = TRAILER.unpack(data[trailer_at:]) if trailer_at >= 0 else (0, 0, b"")
        parts_at = trailer_at - parts * PART_POSITION.size
        buffers_at = parts_at - buffers * BUFFER_POSITION.size
        if mark != MAGIC or buffers_at < 0:
            raise ValueError("not a bundle of mpwatch")
        if buffers and data.readonly:  # the bundle is short and was copied, or came through a black box (shared_memory.py)
            data = memoryview(bytearray(data))
        places = list(BUFFER_POSITION.iter_unpack(data[buffers_at:parts_at]))
        self._parts = list(PART_POSITION.iter_unpack(data[parts_at:trailer_at]))
        self._common_buffers = self._parts[0][1] if parts else buffers
        self.buffers = iter([data[at : at + size] for at, size in places])
        self.stream = io.BytesIO(bundle) if not buffers and isinstance(bundle, bytes) else BundleReader(data)

    @property
    def number_of_parts(self) -> int:
        return len(self._parts)

    def open_part(self, number: int) -> None:
        """Make the unpickler read this part next.

        Call `open_part` only once, after the unpickler has loaded all common pickles.
        """
        position, first_buffer = self._parts[number]
        self.stream.seek(position)
        for _ in islice(self.buffers, first_buffer - self._common_buffers):
            pass


class BundleReader:
    """A file-like object that reads from memory.

    A BundleReader has the method `readinto`, which an mmap object lacks. Without `readinto`, pickle would copy all bytes
    twice.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def seek(self, position: int) -> None:
        """Make the next `read` begin at this position."""
        self._position = position

    def tell(self) -> int:
        """Return the position of the next byte to read."""
        return self._position

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes."""
        return bytes(self._take(size))

    def readinto(self, target: memoryview) -> int:
        """Copy the next bytes into `target`, and return the number of bytes copied."""
        taken = self._take(len(target))
        target[: len(taken)] = taken
        return len(taken)

    def readline(self) -> bytes:
        """Raise NotImplementedError. pickle requires this method, but never calls it for protocol 5."""
        raise NotImplementedError

    def _take(self, size: int) -> memoryview:
        start, self._position = self._position, self._position + size
        return self._data[start : self._position]


def _reduce_view(view: memoryview) -> Any:
    import pickle

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


class LazyReducers(dict[type, "Callable[[Any], Any]"]):
    """The `dispatch_table` of a pickler. The table is filled when the pickler looks up a class for the first time.

    pickle needs no `dispatch_table` for functions, strings and lists. For example, if pickle writes a list of strings,
    `collect` is not called.

    Args:
        collect: the function that returns the reducers.
    """

    def __init__(self, collect: Callable[[], Mapping[type, Callable[[Any], Any]]]) -> None:
        super().__init__()
        self._collect = collect

    def __missing__(self, cls: type) -> Any:
        if not self:
            self.update(self._collect())
            if cls in self:
                return self[cls]
        raise KeyError(cls)

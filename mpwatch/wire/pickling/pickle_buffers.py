"""Pickle bundles: pickles and their large buffers, as bytes if they are small, else in an anonymous file.

    [ pickles ][ part 0 ][ part 1 ]...  [ buffer ]  [ buffer ]...  [ positions of buffers ][ positions of parts ][ trailer ]
                                        `-- each begins a new page

All receivers read the first pickles. A bundle can also have parts: more pickles, of which each receiver reads one part only.
The trailer has the numbers of buffers and of parts, and a magic number.

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
from itertools import islice, pairwise

from mpwatch.os_support.descriptors import map_private, open_anonymous_file, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

# Bytes. A buffer of this size or more is written beside the pickle. Its overhead (on average a page and a half, and
# its share of a mapping) is small compared with one copy for each rank. It must not exceed the size of pickle's frames (64
# KiB): pickle would write a larger PickleBuffer itself, as an object that has no length.
MIN_BUFFER_SIZE = 1 << 16
BUFFER_POSITION = struct.Struct("<QQ")  # offset, size
PART_POSITION = struct.Struct("<QQ")  # offset, number of its first buffer
TRAILER = struct.Struct("<QQ4s")  # number of buffers, number of parts, magic number
MAGIC = b"mpwb"
PLAIN_TRAILER = TRAILER.pack(0, 0, MAGIC)  # of a bundle that has neither buffers nor parts


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
        self._parts: list[tuple[int, int]] = []
        self._pickle_size = 0
        self.body = b""
        self._name = name
        self._limit = limit
        self._small = bytearray()

    def write(self, data: bytes | bytearray) -> None:
        """Write bytes; pickle calls it. Raises OSError."""
        self._pickle_size += len(data)
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

    def begin_part(self) -> None:
        """Let the next pickles be a part of their own."""
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

    def _write_buffers(self) -> list[tuple[int, int]]:
        """Write all buffers, and return the position of each.

        Memory that several parts need, such as a tensor of which each part has a slice, is written once. Within a part, and
        in the common pickles, each buffer has a position of its own: a receiver can write to it.
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
    """Return the address of the memory. For memory that is not writable: a number that no other buffer has."""
    import ctypes

    return id(buffer) if buffer.readonly else ctypes.addressof(ctypes.c_char.from_buffer(buffer))


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
    number, _, _ = TRAILER.unpack(os.pread(fd, TRAILER.size, size - TRAILER.size))
    return map_private(fd, size) if number else memoryview(mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ))


class OpenBundle:
    """A bundle to unpickle from: `pickle.Unpickler(bundle.stream, buffers=bundle.buffers)`.

    One unpickler loads the common pickles and then, after `open_part`, those of one part. Raises ValueError if the data is
    not a bundle.
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
        if buffers and data.readonly:  # it is short and was copied, or came through a black box, see wire/shared_memory.py
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
        """Let the unpickler go on with this part. It must have loaded all common pickles, and no part."""
        position, first_buffer = self._parts[number]
        self.stream.seek(position)
        for _ in islice(self.buffers, first_buffer - self._common_buffers):
            pass


class BundleReader:
    """A file-like object over memory. An mmap object is one, too, but it has no `readinto`: pickle would copy twice."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def seek(self, position: int) -> None:
        """Read from this position on."""
        self._position = position

    def tell(self) -> int:
        """Return the position of the next byte to read."""
        return self._position

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
        start, self._position = self._position, self._position + size
        return self._data[start : self._position]


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


class LazyReducers(dict[type, "Callable[[Any], Any]"]):
    """A `dispatch_table` that is filled when pickle first looks something up. Most pickles need none of it.

    Args:
        collect: returns the reducers.
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

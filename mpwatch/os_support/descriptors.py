"""Functions for memory mappings, and for file descriptors of anonymous files, pipes, sockets and standard streams.

This module runs in the watcher and in the ranks. A module that only a few functions need is imported inside these functions.
"""

from __future__ import annotations

import _socket
import errno
import os
import stat
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from io import FileIO

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any


STDERR = 2
SIZE_OF_INT = struct.calcsize("i")
PEER = struct.Struct("iII")  # struct ucred of unix(7)
MSG_CMSG_CLOEXEC: int = getattr(_socket, "MSG_CMSG_CLOEXEC", 0)
MSG_NOSIGNAL: int = getattr(_socket, "MSG_NOSIGNAL", 0)  # necessary if SIGPIPE has its default action
LINE_BUFFERED = 1  # _IOLBF of stdio.h, on Linux, macOS and the BSDs
MAP_FIXED = 0x10  # of mmap(2), on Linux, macOS and the BSDs. The mmap module does not export it


def open_regular_file(path: str, flags: int) -> int:
    """An `opener` for `open` that never waits for a FIFO, and follows no symbolic link at `path`. Raises OSError."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, "No regular file", path)  # as for a FIFO without a reader
    os.set_blocking(fd, True)
    return fd


def open_anonymous_file(name: str) -> FileIO:
    """Create a file without a name: a memfd if possible, to which the limit of /dev/shm does not apply. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return FileIO(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "rb+")
    import tempfile

    fd, path = tempfile.mkstemp(prefix=name)
    os.unlink(path)
    return FileIO(fd, "rb+")


def seal(fd: int) -> None:
    """Keep all processes from shortening this file, if the system can: reading a mapped page that is gone is a SIGBUS."""
    import fcntl

    if hasattr(os, "memfd_create"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)


def map_private(fd: int, size: int) -> memoryview:
    """Map the beginning of a file until its last memoryview is deleted. Keeps no descriptor open. Raises OSError."""
    import mmap

    kind, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    if sys.version_info >= (3, 13):
        return memoryview(mmap.mmap(fd, size, kind, access, trackfd=False))
    import ctypes

    # An mmap object without a file keeps no descriptor, so the file is mapped over the object's pages. The object ends the
    # mapping. weakref.finalize would end it too early: it runs before the finalizers of a cycle, which may still read the
    # memory.
    room = mmap.mmap(-1, size, kind | mmap.MAP_ANONYMOUS, access)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    if _libc().mmap(address, size, access, kind | MAP_FIXED, fd, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return memoryview(room)


@cache
def _libc() -> Any:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_int
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long)
    return libc


def grow_pipe(fd: int, size: int) -> int:
    """Return the capacity after trying to increase it to `size`, or 0 if it is unknown."""
    import fcntl

    holds = 0
    if hasattr(fcntl, "F_GETPIPE_SZ"):
        with suppress(OSError):  # more than pipe-max-size, or pipe-user-pages-soft for all pipes of a user; or a sandbox
            holds = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
            if holds < size:
                holds = fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)
    return holds


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def receive_with_fds(channel: socket.socket, size: int, max_fds: int) -> tuple[bytes, list[int], bool]:
    """Return the bytes, the descriptors, and whether some were dropped, as this process has too many. Raises OSError."""
    room = _socket.CMSG_SPACE(max_fds * SIZE_OF_INT)
    data, ancillary, flags, _ = channel.recvmsg(size, room, MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, numbers in ancillary:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            fds += (number for (number,) in struct.iter_unpack("i", numbers[: len(numbers) - len(numbers) % SIZE_OF_INT]))
    if not MSG_CMSG_CLOEXEC:
        for fd in fds:
            os.set_inheritable(fd, False)
    return data, fds, bool(flags & _socket.MSG_CTRUNC)


def read_peer(connection: socket.socket) -> tuple[int, int] | None:
    """Return pid and effective uid of the program at the other end of a Unix socket, or None where only Linux can tell."""
    if not hasattr(_socket, "SO_PEERCRED"):
        return None
    pid, uid, _ = PEER.unpack(connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, PEER.size))
    return pid, uid


def line_buffer_c_stdout() -> Callable[[], object]:
    """Return what flushes C's `stdout` alone: a thread that reads from `stdin` holds the lock of that."""
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        stream = ctypes.c_void_p.in_dll(libc, "stdout")
        libc.setvbuf(stream, None, LINE_BUFFERED, 0)
    except (ImportError, OSError, ValueError, AttributeError):
        return bool
    return partial(libc.fflush, stream)

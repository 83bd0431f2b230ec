"""The only file that asks which system this is: Linux first, other POSIX systems by the same calls where they have them.

Runs in the watcher and in the ranks, so what only few calls need is imported by these; imports of mpwatch only cgroups.py.
"""

from __future__ import annotations

import _socket  # numbers, where the module socket has enums, whose arithmetic is in Python
import errno
import os
import signal
import struct
import sys
import time
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as c_signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from io import FileIO

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

__all__ = [
    "DUMP_SIGNAL",
    "MSG_NOSIGNAL",
    "ProcessState",
    "ProcessUsage",
    "anonymous_file",
    "await_end_of_thread",
    "bytes_in",
    "c_stdout_by_lines",
    "die_with_writer",
    "end_silent_connection",
    "gpus_may_exist",
    "group_exists",
    "group_members",
    "handlers_in_python",
    "has_descriptor",
    "map_private",
    "open_pidfd",
    "peek_exit",
    "pipe_size",
    "receive",
    "seal",
    "set_handler",
    "standard_descriptors",
    "state_of_process",
    "usable_cpus",
    "usage_of_process",
    "write_all",
]

# Each NVIDIA GPU has a node of the first kind, ROCm and WSL one of the others; a container that may use a GPU shows it.
GPU_NODES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
LAST_STANDARD = 2
SIZE_OF_INT = struct.calcsize("i")
MSG_CMSG_CLOEXEC: int = getattr(_socket, "MSG_CMSG_CLOEXEC", 0)
MSG_NOSIGNAL: int = getattr(_socket, "MSG_NOSIGNAL", 0)  # should SIGPIPE be at its default
LINE_BUFFERED = 1  # _IOLBF of stdio.h, on Linux, macOS and the BSDs
MAP_FIXED = 0x10  # of mmap(2), on Linux, macOS and the BSDs; the module mmap does not tell
SIGNALS = [int(number) for number in signal.valid_signals()]
# Asks a rank for its stacks. A real-time signal, since programs have uses of their own for the others; None: none is sent.
DUMP_SIGNAL: int | None = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None


def usable_cpus() -> int:
    """The CPUs this process may use: its affinity, and the quota of its cgroup (v2), rounded up; at least 1."""
    from .cgroups import cpu_quota

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, cpu_quota() or allowed))


def gpus_may_exist() -> bool:
    """False where there can be no GPU, so that nobody imports torch (a second) only to hear that there is none."""
    from glob import glob

    return sys.platform != "linux" or any(glob(pattern) for pattern in GPU_NODES)


def die_with_writer(pipe: int) -> None:
    """Have the kernel kill this process's group when nobody holds the writing end of this pipe any more (Linux).

    Unlike the kernel's death signal for parents (PR_SET_PDEATHSIG) it follows the process that holds the pipe and not the
    thread that has started us, it reaches the whole group, and asks for no ctypes. Nothing happens where it cannot be had.
    """
    import fcntl
    import select

    if not hasattr(fcntl, "F_SETSIG"):
        return
    try:
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:  # a sandbox's own kernel
        return
    poll = select.poll()
    poll.register(pipe, 0)
    if poll.poll(0):  # it was too late: hung up already
        os.killpg(0, signal.SIGKILL)


def await_end_of_thread(native_id: int, seconds: float) -> None:
    """Until the kernel knows nothing of it any more, which takes some microseconds after it could be joined.

    Python 3.12 asks the kernel for the number of threads when a program forks, and warns of more than one.
    """
    deadline = time.monotonic() + seconds
    while os.path.exists(f"/proc/self/task/{native_id}") and time.monotonic() < deadline:
        os.sched_yield()


def anonymous_file(name: str) -> FileIO:
    """An empty file that has no name in any folder and is gone with its last descriptor.

    A memfd where there are such: unlike /dev/shm it has no cap of its own. Raises OSError.
    """
    if hasattr(os, "memfd_create"):
        # one call of C: between two bytecodes an exception could be thrown at us, and the descriptor be nobody's
        (file,) = map(FileIO, map(os.memfd_create, [name], [os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING]), ["rb+"])
        return file
    import tempfile

    fd, path = tempfile.mkstemp(prefix=name)
    os.unlink(path)
    return FileIO(fd, "rb+")


def seal(fd: int) -> None:
    """See to it that nobody can shorten this anonymous file, since who has it mapped would die of SIGBUS where it ended.

    Raises OSError, also for a descriptor of anything else. Where files cannot be sealed nothing happens.
    """
    import fcntl

    if hasattr(os, "memfd_create"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)


def map_private(fd: int, size: int) -> memoryview:
    """The first `size` bytes of a file, writable: what is written there is ours alone, and costs a copy of its page.

    It stays without the descriptor where that can be done, and goes with the last view of it. Raises OSError.
    """
    import mmap

    kind, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    if sys.version_info >= (3, 13):
        return memoryview(mmap.mmap(fd, size, kind, access, trackfd=False))
    try:
        import ctypes
    except ImportError:  # a Python built without it: each mapping keeps a descriptor
        return memoryview(mmap.mmap(fd, size, kind, access))
    # An object for a mapping of no file keeps none, and ours is put in its place. Without an object to end the mapping,
    # weakref.finalize would have to: it is called before the finalisers in a cycle, and these may still look at the memory.
    room = mmap.mmap(-1, size, kind | mmap.MAP_ANONYMOUS, access)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    if _libc().mmap(address, size, access, kind | MAP_FIXED, fd, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return memoryview(room)


def pipe_size(fd: int) -> int:
    """How many bytes this pipe holds (Linux); 0 if it is none, or nobody knows."""
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) if hasattr(fcntl, "F_GETPIPE_SZ") else 0
    except OSError:
        return 0


def bytes_in(pipe: int) -> int:
    """How many bytes of a pipe nobody has read yet. Raises OSError."""
    import fcntl
    import termios

    number = bytearray(SIZE_OF_INT)
    fcntl.ioctl(pipe, termios.FIONREAD, number)
    return int.from_bytes(number, sys.byteorder)


def c_stdout_by_lines() -> Callable[[], object]:
    """Have C's stdout flushed at the end of each line, where it is known by that name. Returns what flushes it at once.

    It alone: to flush all streams takes the lock of each, which a thread has that waits for something to read.
    """
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        stream = ctypes.c_void_p.in_dll(libc, "stdout")
        libc.setvbuf(stream, None, LINE_BUFFERED, 0)
    except (ImportError, OSError, ValueError, AttributeError):
        return bool
    return partial(libc.fflush, stream)


@cache
def _libc() -> Any:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_int
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long)
    return libc


def receive(line: socket.socket, size: int, most: int) -> tuple[bytes, list[int], bool]:
    """What has come over a socket: bytes, descriptors (room for about `most`), and whether some of these were lost, for
    there was no room for them in this process. Raises OSError.
    """
    room = _socket.CMSG_SPACE(most * SIZE_OF_INT)
    data, ancillary, flags, _ = line.recvmsg(size, room, MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, numbers in ancillary:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            fds += (number for (number,) in struct.iter_unpack("i", numbers[: len(numbers) - len(numbers) % SIZE_OF_INT]))
    return data, fds, bool(flags & _socket.MSG_CTRUNC)


def end_silent_connection(connection: socket.socket, seconds: float) -> None:
    """Have the kernel end a TCP connection whose other end is silent for so long, in whole seconds; later where it cannot
    be told how long what was sent may go without being confirmed. Raises OSError.
    """
    whole = max(1, int(seconds))
    every = max(1, whole // 4)  # TCP_KEEPALIVE is how macOS calls TCP_KEEPIDLE
    times = {
        "TCP_KEEPIDLE": every,
        "TCP_KEEPALIVE": every,
        "TCP_KEEPINTVL": every,
        "TCP_KEEPCNT": max(1, whole // every - 1),
    }
    connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_KEEPALIVE, 1)
    for name, value in {**times, "TCP_USER_TIMEOUT": whole * 1000}.items():
        if hasattr(_socket, name):
            connection.setsockopt(_socket.IPPROTO_TCP, getattr(_socket, name), value)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """All of it, in as many pieces as it takes. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


@contextmanager
def standard_descriptors() -> Iterator[None]:
    """Have 0, 1 and 2 open, if on nothing: a program that runs without them would give their numbers to what it opens next,
    and whoever it starts would take that for its stdin, stdout or stderr.
    """
    made = []
    try:
        for fd in range(LAST_STANDARD + 1):
            if not _is_open(fd):
                made.append(os.open(os.devnull, os.O_RDWR))  # the lowest number that is free
                os.set_inheritable(fd, True)
        yield
    finally:
        for fd in made:
            os.close(fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when this child ends (Linux 5.3), or None.

    A child that has been reaped behind our back (SIGCHLD ignored) has none: its descriptor would be somebody else's.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.ESRCH):  # old kernel, a sandbox's filter, reaped
            return None
        raise


def group_exists(pgid: int) -> bool:
    """Whether a process group has any members, zombies among them."""
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def group_members(pgid: int) -> list[int]:
    """The pids in a process group, where there is a /proc to find them in; else none."""
    found = []
    for entry in os.listdir("/proc") if sys.platform == "linux" else ():
        if entry.isdigit():
            try:
                if os.getpgid(int(entry)) == pgid:
                    found.append(int(entry))
            except ProcessLookupError:
                continue
    return found


def set_handler(number: int, handler: Any) -> None:
    """Have a signal handled so: by a function, signal.SIG_DFL or SIG_IGN. In the main thread alone."""
    c_signal(number, handler if callable(handler) else int(handler))


def handlers_in_python() -> dict[int, Any]:
    """The signals that have a handler in Python.

    As quick as `set_handler`: what the module signal makes of these functions of C makes enums of numbers each time.
    """
    return {number: handler for number in SIGNALS if callable(handler := getsignal(number))}


class ProcessState:
    """What the kernel says of a process: the letter of its state (R, S, D, T, Z, ...: see proc(5)), and what it catches."""

    def __init__(self, letter: str, caught: int) -> None:
        self.letter = letter
        self._caught = caught

    def catches(self, signum: int) -> bool:
        """Whether it has a handler for this signal."""
        return bool(self._caught >> (signum - 1) & 1)


def state_of_process(pid: int) -> ProcessState | None:
    """None where there is no /proc to read it from, or no such process."""
    try:
        with FileIO(f"/proc/{pid}/status") as file:  # closes itself, should an exception be thrown at us
            status = file.read(1 << 14)
    except OSError:
        return None
    letter, caught = (status.partition(name)[2].split(None, 1)[0] for name in (b"\nState:", b"\nSigCgt:"))
    return ProcessState(letter.decode(), int(caught, 16))


class ProcessUsage:
    """What a process uses by itself, without those that it has started: bytes in memory, and CPU time so far, in seconds."""

    __slots__ = ("cpu_seconds", "memory")

    def __init__(self, memory: int, cpu_seconds: float) -> None:
        self.memory = memory
        self.cpu_seconds = cpu_seconds


def usage_of_process(pid: int) -> ProcessUsage | None:
    """None where there is no /proc to read it from, or no such process; a dead one that is not reaped uses no memory."""
    try:
        with FileIO(f"/proc/{pid}/stat") as file:
            fields = file.read(1 << 12).rpartition(b")")[2].split()  # from the third on; the second is any text
        user, system, pages = (int(fields[n - 3]) for n in (14, 15, 24))  # as proc(5) numbers them
        return ProcessUsage(pages * os.sysconf("SC_PAGE_SIZE"), (user + system) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None


def has_descriptor(pid: int, fd: int, of: int) -> bool:
    """Whether that descriptor of another process is of the same file or pipe as `of` is here; False if nobody can tell."""
    try:
        there, here = os.stat(f"/proc/{pid}/fd/{fd}"), os.fstat(of)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def peek_exit(pid: int, *, block: bool = False) -> int | None:
    """The exit code of an ended child (negative: the signal), None while it runs. It stays a zombie, so its pid stays taken.

    Raises ChildProcessError where nobody can know any more: it was reaped by somebody else, or SIGCHLD is ignored.
    """
    if not hasattr(os, "waitid"):
        ended, status = os.waitpid(pid, 0 if block else os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None
    seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG))
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

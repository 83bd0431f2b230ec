"""Uses /proc, waitid and pidfds to find the states of processes, Unix process groups and threads.

This module runs in the watcher.
"""

import errno
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from io import FileIO
from typing import Any, NamedTuple

from mpwatch.os_support.clock import monotonic

THREAD_EXIT_SECONDS = 1.0  # the kernel needs only microseconds to remove a thread that has ended


class ProcessState(NamedTuple):
    """The state letter of a process, such as R, S, D, T or Z (see proc(5)), and the signals that the process catches."""

    letter: str
    caught: int

    def catches(self, signum: int) -> bool:
        return bool(self.caught >> (signum - 1) & 1)


class ProcessUsage(NamedTuple):
    """The memory (in bytes) and the CPU time (in seconds) of one process. Child processes are not included."""

    memory: int
    cpu_seconds: float


def read_process_state(pid: int) -> ProcessState | None:
    try:
        with FileIO(f"/proc/{pid}/status") as file:  # FileIO closes the descriptor if a signal handler raises now
            status = file.read(1 << 14)
    except OSError:
        return None
    letter, caught = (status.partition(name)[2].split(None, 1)[0] for name in (b"\nState:", b"\nSigCgt:"))
    return ProcessState(letter.decode(), int(caught, 16))


def read_process_usage(pid: int) -> ProcessUsage | None:
    """Return memory and CPU time of a process; the memory of a zombie is 0. None: there is no such process, or no /proc."""
    try:
        fields = _read_stat(f"/proc/{pid}/stat")
        user, system, pages = (int(fields[n - 3]) for n in (14, 15, 24))  # as proc(5) numbers them
        return ProcessUsage(pages * os.sysconf("SC_PAGE_SIZE"), (user + system) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None


def is_ending(pid: int) -> bool:
    """Return whether others may have noticed the end of this process: PF_EXITING is set before its files are closed."""
    try:
        return bool(int(_read_stat(f"/proc/{pid}/task/{pid}/stat")[6]) & 0x4)
    except (OSError, ValueError, IndexError):
        return False


def _read_stat(path: str) -> list[bytes]:
    """Return the fields from the third one on, as the second may be any text."""
    with FileIO(path) as file:
        return file.read(1 << 12).rpartition(b")")[2].split()


def has_descriptor(pid: int, fd: int, of: int) -> bool:
    """Return whether descriptor `fd` of process `pid` is the same file as `of` here, or False if that cannot be read."""
    try:
        there, here = os.stat(f"/proc/{pid}/fd/{fd}"), os.fstat(of)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def start_process(
    command: list[str],
    env: Mapping[str, str],
    passed_fds: Collection[int],
    *,
    stdout: int | None,
    stderr: int,
    leads_group: bool = False,
) -> int:
    """Start a program that inherits only 0, 1, 2 and `passed_fds`, and return its pid. Raises OSError.

    Not with subprocess.Popen, which reads a pipe until its end, and waits for a fork of another thread that holds it.
    """
    closed = _list_inheritable_fds() - {0, 1, 2, *passed_fds}
    actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_CLOSE, fd) for fd in closed]
    for fd in passed_fds:  # by way of 0: until glibc 2.29, to duplicate a descriptor onto itself does not pass it
        actions += [(os.POSIX_SPAWN_DUP2, fd, 0), (os.POSIX_SPAWN_DUP2, 0, fd)]
    actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    actions += [(os.POSIX_SPAWN_DUP2, fd, target) for fd, target in ((stdout, 1), (stderr, 2)) if fd is not None]
    group: dict[str, Any] = {"setpgroup": 0} if leads_group else {}
    pid = os.posix_spawnp(os.fsdecode(command[0]), command, env, file_actions=actions, **group)
    if type(pid) is not int or pid <= 1:  # a signal to these numbers, or to their negatives, reaches many processes
        raise OSError(f"os.posix_spawnp returned {pid!r}, which is not the pid of a new process; do not mock it here")
    return pid


def _list_inheritable_fds() -> set[int]:
    fds = set()
    limit = os.sysconf("SC_OPEN_MAX")  # posix_spawn refuses to close a descriptor that is above a limit lowered later
    try:
        candidates: Iterable[int] = map(int, os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))
    except OSError:  # no /proc
        candidates = range(3, min(limit, 1 << 16))
    for fd in candidates:
        with suppress(OSError):  # closed meanwhile
            if fd < limit and os.get_inheritable(fd):
                fds.add(fd)
    return fds


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when this child ends, or None if it was reaped or there are no pidfds."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.ESRCH):  # an old kernel, a sandbox's filter, a reaped child
            return None
        raise


def peek_exit_code(pid: int, *, block: bool = False) -> int | None:
    """Return the exit code of a child, negative after a signal, or None while it runs. Only without waitid is it reaped.

    Raises ChildProcessError if other code has reaped it, or if it ended while SIGCHLD was ignored.
    """
    if not hasattr(os, "waitid"):
        ended, status = os.waitpid(pid, 0 if block else os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None
    seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG))
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


def group_exists(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    except Exception:  # noqa: BLE001, S110  PermissionError, or what an audit hook raises
        pass
    return True


def reap_adopted(pgid: int) -> None:
    """Reap the helpers that a dead rank has left to this process, if it is PID 1 of a container or a subreaper."""
    with suppress(ChildProcessError):
        while os.waitpid(-pgid, os.WNOHANG)[0]:
            pass


def group_members(pgid: int) -> list[int]:
    """Return the pids of a process group, or none if there is no /proc. Raises OSError."""
    found = []
    for entry in os.listdir("/proc") if sys.platform == "linux" else ():
        with suppress(ValueError, ProcessLookupError):
            if os.getpgid(int(entry)) == pgid:
                found.append(int(entry))
    return found


def wait_for_thread_exit(native_id: int, seconds: float = THREAD_EXIT_SECONDS) -> None:
    """Wait until the kernel has removed a thread, just after `Thread.join`: `os.fork` counts it till then, and warns."""
    deadline = monotonic() + seconds
    while os.path.exists(f"/proc/self/task/{native_id}") and monotonic() < deadline:
        os.sched_yield()

"""Removes files that torch leaves in /dev/shm if a process is killed while it shares a tensor.

This module runs in the watcher thread.

A process shares a tensor, as a DataLoader worker does, through a file `/dev/shm/torch_<its pid>_<random>_<number>`:

    strategy file_descriptor (the default): create and open, set the size, map, unlink.
        If the process is killed before the unlink, the file stays.
    strategy file_system: create and open, set the size, map, count its users in its first bytes, close.
        The process torch_shm_manager, which torch starts, unlinks the file 2 s after the death of the last user.

mpwatch need not remove files of multiprocessing from /dev/shm. After the death of a process, multiprocessing's resource
tracker removes files of `multiprocessing.shared_memory`, and semaphores of the spawn context. Semaphores of the fork context
have no name in /dev/shm.

`remove_left_files` removes a file only if all five conditions hold:

1. the file's name has the pid of one of these processes: the rank, a process that the rank has started by multiprocessing
   (`read_child_pids`), or a process that was in the rank's group when that group was killed (`find_makers`)
2. the process with this pid is dead
3. the file belongs to this user, and is not older than the rank
4. no process of this machine has opened or mapped the file (`is_used_elsewhere`)
5. the file's count of users is 0

The kernel can give the pid of a dead process to a new process. Also, two containers that share /dev/shm can each have a
process with the same pid. So a living process can still need a file for which conditions 1 to 3 hold. Conditions 4 and 5
ensure that mpwatch removes no file that a process still needs. With the strategy file_descriptor, the process that makes a
file keeps the file open until it unlinks the file. With the strategy file_system, the first bytes of a file contain a
count, and this count is above 0 while a process uses the file.

If the watcher cannot find out whether it may remove a file, the file stays in /dev/shm. If the watcher itself is killed, all
files stay in /dev/shm.
"""

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress

from mpwatch.os_support.descriptors import is_used_elsewhere
from mpwatch.os_support.processes import read_process_state

FOLDER = "/dev/shm"  # noqa: S108  where shm_open makes files on Linux
PREFIX = "torch_"
COUNT_SIZE = 4  # bytes of the count of users, an int


def find_makers(pgid: int) -> set[int]:
    """Return the pids of processes that are in the Unix process group `pgid` and have files of torch in /dev/shm."""
    return {pid for pid, _ in _list_files() if _is_in_group(pid, pgid)}


def remove_left_files(makers: Collection[int], since: float) -> None:
    """Remove the files of torch that these dead processes have left in /dev/shm.

    Args:
        makers: pids of the processes.
        since: when the rank was started, by the wall clock.
    """
    for pid, path in _list_files():
        if pid in makers and _is_dead(pid):
            with suppress(OSError):
                _remove_if_unused(path, since)


def _list_files() -> Iterator[tuple[int, str]]:
    """Yield a pair for each file of torch: the pid that is in the file's name, and the path of the file."""
    try:
        names = os.listdir(FOLDER)
    except OSError:  # another system than Linux, or no descriptor is left
        return
    for name in names:
        if name.startswith(PREFIX):
            pid, separator, _ = name[len(PREFIX) :].partition("_")
            if separator and pid.isdecimal():
                yield int(pid), f"{FOLDER}/{name}"


def _is_in_group(pid: int, pgid: int) -> bool:
    try:
        return os.getpgid(pid) == pgid
    except (OSError, OverflowError):
        return False


def _is_dead(pid: int) -> bool:
    state = read_process_state(pid)
    return state is None or state.letter in "ZX"


def _remove_if_unused(path: str, since: float) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        is_of_rank = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_mtime >= since
        if is_of_rank and not any(os.pread(fd, COUNT_SIZE, 0)) and not is_used_elsewhere(fd):
            os.unlink(path)
    finally:
        os.close(fd)

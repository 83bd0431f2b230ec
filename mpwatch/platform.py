"""The only file that asks which system this is: Linux first, other POSIX systems by the same calls where they have them.

Runs in the watcher and in the ranks, so what only few calls need is imported by these; imports nothing of mpwatch.
"""

import errno
import os
import sys

__all__ = [
    "anonymous_file",
    "gpus_may_exist",
    "group_exists",
    "group_members",
    "open_pidfd",
    "peek_exit",
    "usable_cpus",
]

# Each NVIDIA GPU has a node of the first kind, ROCm and WSL one of the others; a container that may use a GPU shows it.
GPU_NODES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
CPU_QUOTA = "/sys/fs/cgroup{}/cpu.max"


def usable_cpus() -> int:
    """The CPUs this process may use: its affinity, and the quota of its cgroup (v2), rounded up; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _cgroup_cpus() or allowed))


def _cgroup_cpus() -> int | None:
    """The tightest `cpu.max` on the way from this process's cgroup to the root; None without one (kernel: cgroup-v2.rst)."""
    try:
        with open("/proc/self/cgroup") as lines:
            path = next(line[3:].strip() for line in lines if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    quotas = []
    while path:
        path = path.rstrip("/")
        try:
            with open(CPU_QUOTA.format(path)) as text:
                quota, period = text.read().split()
        except OSError:
            pass  # the root group has no such file, nor has a group without the cpu controller
        else:
            if quota != "max":
                quotas.append(-(-int(quota) // int(period)))
        path = path.rpartition("/")[0]
    return min(quotas, default=None)


def gpus_may_exist() -> bool:
    """False where there can be no GPU, so that nobody imports torch (a second) only to hear that there is none."""
    from glob import glob

    return sys.platform != "linux" or any(glob(pattern) for pattern in GPU_NODES)


def anonymous_file(name: str) -> int:
    """A descriptor of an empty file that has no name in any folder and is gone with its last descriptor.

    A memfd where there are such: unlike /dev/shm it has no cap of its own. Raises OSError.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import tempfile

    fd, path = tempfile.mkstemp(prefix=name)
    os.unlink(path)
    return fd


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

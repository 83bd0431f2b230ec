"""Linux control groups, as they concern this process: how much CPU it may use, and whom the kernel killed for memory.

Files are read where there are any; elsewhere nothing is known. Imports nothing of mpwatch; loaded by the watcher alone.
"""

import os
from collections.abc import Iterator

__all__ = ["cpu_quota", "oom_kills", "oom_kills_of_machine"]

MOUNTS = "/proc/self/mountinfo"
GROUPS = "/proc/self/cgroup"
# Where the kernel counts the processes of a group that its out-of-memory killer has killed, for whatever limit: v2, v1.
COUNTERS = ("memory.events", "memory.oom_control")


def cpu_quota() -> int | None:
    """The tightest `cpu.max` (v2) on the way from this process's group to the root, rounded up; None without one."""
    quotas = []
    for own in _folders("", "cgroup2"):
        folder = own
        while folder.startswith("/sys/fs/cgroup"):
            text = _read(f"{folder}/cpu.max")  # not there for the root of all, nor without the cpu controller
            if text and not text.startswith("max"):
                quota, period = map(int, text.split())
                quotas.append(-(-quota // period))
            folder = folder.rpartition("/")[0]
    return min(quotas, default=None)


def oom_kills() -> dict[str, int]:
    """How many processes of this one's memory group the kernel has killed for memory so far, by the file that says so."""
    found = {}
    for folder in (*_folders("memory", "cgroup"), *_folders("", "cgroup2")):
        for name in COUNTERS:
            count = _field(f"{folder}/{name}", "oom_kill")
            if count is not None:
                found[f"{folder}/{name}"] = count
    return found


def oom_kills_of_machine() -> int:
    """The same for all of the machine, be it in groups that cannot be seen from here; 0 if it is not told."""
    return _field("/proc/vmstat", "oom_kill") or 0


def _folders(controller: str, kind: str) -> Iterator[str]:
    """Where this process's group in the hierarchy of this controller is to be seen; v2 has one for all.

    A container may see its own group as the root of the mount, whatever path it is told.
    """
    path = next((path for controllers, path in _groups() if controller in controllers), None)
    if path is None:
        return
    for line in _read(MOUNTS).splitlines():
        mount, _, rest = line.partition(" - ")
        root, point = mount.split()[3:5]
        words = rest.split()
        if words[0] == kind and (kind == "cgroup2" or controller in words[2].split(",")):
            for inner in (path, path.removeprefix(root)):
                folder = os.path.normpath(f"{point}/{inner}")
                if os.path.isdir(folder):
                    yield folder
                    break


def _groups() -> Iterator[tuple[list[str], str]]:
    for line in _read(GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        yield controllers.split(","), path


def _field(file: str, name: str) -> int | None:
    words = (line.split() for line in _read(file).splitlines())
    return next((int(pair[1]) for pair in words if len(pair) == 2 and pair[0] == name), None)  # noqa: PLR2004  a name, a number


def _read(file: str) -> str:
    try:
        with open(file) as text:
            return text.read()
    except (OSError, ValueError):
        return ""

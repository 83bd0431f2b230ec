"""Reads the Linux control groups of this process: its CPU quota, and the number of out-of-memory kills.

If the files under /proc and /sys are missing, `read_cpu_quota` returns None, and `count_oom_kills` returns an empty dict.
This module runs in the watcher.
"""

import os

MOUNTS = "/proc/self/mountinfo"
GROUPS = "/proc/self/cgroup"
# Files in which the kernel counts the processes of a group that its out-of-memory killer has killed, for cgroup v2 and v1.
COUNTERS = ("memory.events", "memory.oom_control")


def read_cpu_quota() -> int | None:
    """Return how many CPUs the cgroup v2 and its parents allow, rounded up, or None."""
    quotas = []
    folder = _find_folder("", "cgroup2") or ""
    while folder.startswith("/sys/fs/cgroup"):
        text = _read_file(f"{folder}/cpu.max")  # the root group, and a group without the cpu controller, have no such file
        if text and not text.startswith("max"):
            quota, period = map(int, text.split())
            quotas.append(-(-quota // period))
        folder = folder.rpartition("/")[0]
    return min(quotas, default=None)


def count_oom_kills() -> dict[str, int]:
    """Return the kills of the out-of-memory killer in this process's memory cgroup, by the paths of the counters."""
    found = {}
    for folder in (_find_folder("memory", "cgroup"), _find_folder("", "cgroup2")):
        for name in COUNTERS if folder is not None else ():
            count = _read_field(f"{folder}/{name}", "oom_kill")
            if count is not None:
                found[f"{folder}/{name}"] = count
    return found


def _find_folder(controller: str, kind: str) -> str | None:
    """Return the folder of this process's cgroup. `controller` chooses a hierarchy of cgroup v1; it is empty for v2.

    In a container, often only a part is mounted. If that is `/docker/1`, the folder of `/docker/1/job` is `job` below the
    mount point. The full path is tried first.
    """
    groups = (line.split(":", 2) for line in _read_file(GROUPS).splitlines())
    path = next((path for _, controllers, path in groups if controller in controllers.split(",")), None)
    if path is None:
        return None
    for line in _read_file(MOUNTS).splitlines():
        mount, _, rest = line.partition(" - ")
        root, point = mount.split()[3:5]
        words = rest.split()
        if words[0] == kind and (kind == "cgroup2" or controller in words[2].split(",")):
            for inner in (path, path.removeprefix(root)):
                folder = os.path.normpath(f"{point}/{inner}")
                if os.path.isdir(folder):
                    return folder
    return None


def _read_field(file: str, name: str) -> int | None:
    lines = (line.partition(" ") for line in _read_file(file).splitlines())
    return next((int(count) for key, _, count in lines if key == name), None)


def _read_file(file: str) -> str:
    try:
        with open(file) as text:
            return text.read()
    except (OSError, ValueError):
        return ""

"""Linux control groups of this process: its CPU quota, and how many processes the kernel has killed for memory.

Reads files under /proc and /sys. Where these files are missing, each function returns the value that means "not known". Runs
in the watcher.
"""

import os
from collections.abc import Iterator

MOUNTS = "/proc/self/mountinfo"
GROUPS = "/proc/self/cgroup"
# Files in which the kernel counts the processes of a group that its out-of-memory killer has killed: v2, v1.
COUNTERS = ("memory.events", "memory.oom_control")


def read_cpu_quota() -> int | None:
    """Return the smallest `cpu.max` (v2) of this process's group and its parents, rounded up; None if there is none."""
    quotas = []
    folder = _find_folder("", "cgroup2") or ""
    while folder.startswith("/sys/fs/cgroup"):
        text = _read_file(f"{folder}/cpu.max")  # missing in the root group, and without the cpu controller
        if text and not text.startswith("max"):
            quota, period = map(int, text.split())
            quotas.append(-(-quota // period))
        folder = folder.rpartition("/")[0]
    return min(quotas, default=None)


def count_oom_kills() -> dict[str, int]:
    """Count the processes of this process's memory group that the kernel has killed for memory. The keys are its files."""
    found = {}
    for folder in (_find_folder("memory", "cgroup"), _find_folder("", "cgroup2")):
        for name in COUNTERS if folder is not None else ():
            count = _read_field(f"{folder}/{name}", "oom_kill")
            if count is not None:
                found[f"{folder}/{name}"] = count
    return found


def count_oom_kills_of_machine() -> int:
    """Count the processes of the whole machine that the kernel has killed for memory; 0 if the count is not known.

    The whole machine includes the groups outside this container.
    """
    return _read_field("/proc/vmstat", "oom_kill") or 0


def _find_folder(controller: str, kind: str) -> str | None:
    """Return the folder of this process's group in the hierarchy of this controller; v2 has one hierarchy for all.

    If the hierarchy is mounted several times, it is a folder of the first mount. In a container, this process's group may be
    the root of the mount, whatever path the kernel reports.
    """
    path = next((path for controllers, path in _read_groups() if controller in controllers), None)
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


def _read_groups() -> Iterator[tuple[list[str], str]]:
    for line in _read_file(GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        yield controllers.split(","), path


def _read_field(file: str, name: str) -> int | None:
    words = (line.split() for line in _read_file(file).splitlines())
    return next((int(pair[1]) for pair in words if len(pair) == 2 and pair[0] == name), None)  # noqa: PLR2004  a name, a number


def _read_file(file: str) -> str:
    try:
        with open(file) as text:
            return text.read()
    except (OSError, ValueError):
        return ""

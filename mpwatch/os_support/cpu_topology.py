"""Finds the CPUs, the package (socket) and the NUMA node of each physical core. This module runs in the watcher.

In some containers and virtual machines the files under /sys are missing or invalid. A CPU without valid files under /sys
counts as a separate core in package 0 and NUMA node 0.
"""

import os
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import NamedTuple

CPU_LIMIT = 1 << 16  # no kernel supports so many CPUs, so a list with larger numbers is invalid
# Files with the weaker cores of Intel's hybrid processors: the first file for cores of kind 1, the second file for kind 2.
WEAKER_CORES = ("cpu_atom", "cpu_lowpower")


class Core(NamedTuple):
    """A physical core that this process may use."""

    cpus: tuple[int, ...]
    """The numbers of the core's allowed CPUs (hardware threads), in ascending order."""
    package: int = 0
    node: int = 0
    """The number of the core's NUMA node."""
    kind: int = 0
    """The kind is 0 for a performance core, and if the processor has only one kind. Efficiency cores have other kinds."""


def read_cores(allowed: AbstractSet[int], root: str = "/") -> list[Core]:
    """Return the physical cores of the CPUs in `allowed`, sorted by package and NUMA node.

    Args:
        allowed: the CPUs that this process may use.
        root: the folder that contains `sys`.
    """
    devices = os.path.join(root, "sys/devices")
    nodes = _read_nodes(f"{devices}/system/node")
    kinds = [_read_cpu_list(f"{devices}/{name}/cpus") for name in WEAKER_CORES]
    cpus_by_core: dict[tuple[int, int, int], list[int]] = {}
    for cpu in sorted(allowed):
        cpus_by_core.setdefault(_read_core_key(cpu, f"{devices}/system/cpu/cpu{cpu}/topology"), []).append(cpu)
    keys_and_cores = []
    for key, cpus in cpus_by_core.items():
        first = cpus[0]
        package = _read_int(f"{devices}/system/cpu/cpu{first}/topology/physical_package_id") or 0
        kind = next((number for number, members in enumerate(kinds, start=1) if first in members), 0)
        core = Core(tuple(cpus), package, nodes.get(first, 0), kind)
        keys_and_cores.append(((core.package, core.node, *key), core))
    return [core for _, core in sorted(keys_and_cores)]


def _read_core_key(cpu: int, topology: str) -> tuple[int, int, int]:
    """Return a key that identifies the physical core of a CPU. All CPUs of one core have the same key.

    `read_cores` sorts the cores of a NUMA node by the keys that `_read_core_key` returns.
    """
    siblings = _read_cpu_list(f"{topology}/thread_siblings_list")
    if cpu in siblings:
        return 0, min(siblings), 0
    package, core = _read_int(f"{topology}/physical_package_id"), _read_int(f"{topology}/core_id")
    if package is not None and core is not None and package >= 0 and core >= 0:
        return 1, package, core
    return 2, cpu, 0


def _read_nodes(folder: str) -> dict[int, int]:
    """Return a dict from each CPU to its NUMA node."""
    found: dict[int, int] = {}
    with suppress(OSError):
        for name in os.listdir(folder):
            number = name.removeprefix("node")
            if name.startswith("node") and number.isdecimal():
                found |= dict.fromkeys(_read_cpu_list(f"{folder}/{name}/cpulist"), int(number))
    return found


def _read_cpu_list(file: str) -> set[int]:
    """Return the CPU numbers in a file that contains a text such as "0-3,8"."""
    numbers: set[int] = set()
    with suppress(OSError, ValueError):
        with open(file, encoding="ascii") as text:
            ranges = [part.partition("-") for part in text.read().split(",") if part.strip()]
        for first, _, last in ranges:
            end = int(last or first)
            if not 0 <= end < CPU_LIMIT:
                return set()
            numbers.update(range(int(first), end + 1))
        return numbers
    return set()


def _read_int(file: str) -> int | None:
    with suppress(OSError, ValueError), open(file, encoding="ascii") as text:
        return int(text.read())
    return None

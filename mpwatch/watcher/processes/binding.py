"""Chooses the CPUs of each rank of this machine, for the option `placement`. Runs in the watcher.

"cores" deals the physical cores out as contiguous shares, "numa" does what the mode "node" of `torch.numa` does. torch's own
code is of no use here: it asks CUDA for the GPU, which the watcher must not initialise, and it needs the command numactl.

In containers and virtual machines, files under /sys may be missing. Such a CPU is a core of its own, in node 0.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Literal, NamedTuple

from mpwatch.options.validation import check_cpus
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.hardware import format_cpus


class Core(NamedTuple):
    cpus: tuple[int, ...]
    """The allowed hardware threads, in ascending order."""
    node: int = 0
    """The NUMA node."""


class Binding(NamedTuple):
    """The CPUs of a rank, and its share of them if other ranks are bound to the same ones. A share is at least 1."""

    cpus: frozenset[int]
    core_share: int
    cpu_share: int


def read_cores(allowed: AbstractSet[int], root: str = "/") -> list[Core]:
    """Return the physical cores of the allowed CPUs. The cores of a NUMA node follow each other."""
    system = os.path.join(root, "sys/devices/system")
    nodes: dict[int, int] = {}
    with suppress(OSError):
        for name in os.listdir(f"{system}/node"):
            if re.fullmatch(r"node\d+", name):
                nodes |= dict.fromkeys(_read_cpu_list(f"{system}/node/{name}/cpulist"), int(name[4:]))
    cpus_by_core: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(allowed):
        siblings = _read_cpu_list(f"{system}/cpu/cpu{cpu}/topology/thread_siblings_list")
        first = min(siblings) if cpu in siblings else cpu
        cpus_by_core.setdefault((nodes.get(first, 0), first), []).append(cpu)
    return [Core(tuple(cpus), node) for (node, _), cpus in sorted(cpus_by_core.items())]


def bind_rank(
    bind: Literal["cores", "numa"] | Callable[[Worker], Iterable[int]],
    worker: Worker,
    cores: Sequence[Core],
    gpu_nodes: Sequence[int | None],
) -> Binding:
    """Return the CPUs of a rank. `gpu_nodes` are the NUMA nodes of the GPUs of this machine's ranks, None if there is none.

    The CPUs that a user's function returns count as the rank's alone. Raises ValueError or TypeError if they do not exist or
    are too few, and what the function raises.
    """
    if callable(bind):
        allowed = frozenset(cpu for core in cores for cpu in core.cpus)
        cpus = check_cpus(f"what the function in placement returned for rank {worker.rank}", bind(worker), allowed)
        parts, number = [cpus], 0
    else:
        parts = split_cores(cores, worker.local_world_size) if bind == "cores" else choose_nodes(cores, gpu_nodes)
        number = worker.local_rank
    own = parts[number]
    users = sum(not own.isdisjoint(part) for part in parts)
    core_count = sum(not own.isdisjoint(core.cpus) for core in cores)
    return Binding(own, max(1, core_count // users), max(1, len(own) // users))


def split_cores(cores: Sequence[Core], ranks: int) -> list[frozenset[int]]:
    """Deal the cores out in order; the first ranks get the rest. With fewer cores than ranks, deal out their CPUs."""
    units = [core.cpus for core in cores] if len(cores) >= ranks else [(cpu,) for core in cores for cpu in core.cpus]
    if len(units) < ranks:
        raise ValueError(
            f"Placement: cpus='cores' needs a CPU for each of the {ranks} ranks of this machine, but this process may use "
            f"only {format_cpus(cpu for cpus in units for cpu in cpus)}; use nprocs={len(units)} at most, or leave cpus out"
        )
    size, more = divmod(len(units), ranks)
    starts = [rank * size + min(rank, more) for rank in range(ranks + 1)]
    return [frozenset(cpu for cpus in units[starts[rank] : starts[rank + 1]] for cpu in cpus) for rank in range(ranks)]


def choose_nodes(cores: Sequence[Core], gpu_nodes: Sequence[int | None]) -> list[frozenset[int]]:
    """Give each rank the NUMA node of its GPU. A rank without a usable one gets its share of all nodes, but at least one."""
    cpus_by_node: dict[int, set[int]] = {}
    for core in cores:
        cpus_by_node.setdefault(core.node, set()).update(core.cpus)
    nodes, ranks = list(cpus_by_node), len(gpu_nodes)
    chosen = []
    for rank, node in enumerate(gpu_nodes):
        first = rank * len(nodes) // ranks
        share = nodes[first : max(first + 1, (rank + 1) * len(nodes) // ranks)]
        own = share if node is None or node not in cpus_by_node else [node]
        chosen.append(frozenset(cpu for each in own for cpu in cpus_by_node[each]))
    return chosen


def _read_cpu_list(file: str) -> set[int]:
    with suppress(OSError, ValueError), open(file) as text:
        ranges = [part.partition("-") for part in text.read().split(",")]
        return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
    return set()

"""Chooses the CPUs of each rank of this machine, for the option `placement`. This module reads no file. Runs in the watcher.

    read_cores (os_support/cpu_topology.py) --> cores that this process may use --> bind_rank --> Binding --> RankSetup

The values "cores" and "numa" of `Placement.cpus` are similar to modes of `torch.numa.binding`, which torchrun uses. "numa"
does what torch's mode "node" does. However, if the NUMA node of a GPU is unknown, torch binds the rank to node 0, but
mpwatch treats the rank like a rank without a GPU (`choose_nodes`). The value "cores" divides whole cores among the ranks, as
torch's mode "exclusive" does. The mode "exclusive" needs a GPU, but the value "cores" also works without a GPU, and divides
the CPUs of all NUMA nodes.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from mpwatch.options.validation import check_cpus
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.cpu_affinity import format_cpus
from mpwatch.os_support.cpu_topology import Core


class Binding(NamedTuple):
    """The CPUs of a rank. If several ranks are bound to the same CPUs, each rank has an equal share of these CPUs."""

    cpus: frozenset[int]
    core_share: int
    """How many physical cores the rank gets if all ranks on a core share the core equally. At least 1."""
    cpu_share: int
    """How many CPUs the rank gets if all ranks on a CPU share the CPU equally. At least 1."""


def bind_rank(
    bind: Literal["cores", "numa"] | Callable[[Worker], Iterable[int]],
    worker: Worker,
    cores: Sequence[Core],
    gpu_nodes: Sequence[int | None],
) -> Binding:
    """Return the CPUs of a rank.

    If `bind` is a function, mpwatch does not know the CPUs of the other ranks. So mpwatch treats the rank as the only user
    of its CPUs.

    Args:
        bind: the option.
        worker: the rank.
        cores: all cores that this process may use, in the order of `read_cores`.
        gpu_nodes: the NUMA node of the GPU of each rank of this machine. None stands for no GPU, or for an unknown node.

    Raises:
        ValueError, TypeError: the CPUs do not exist, or there are too few CPUs.
        Exception: any exception of the user's function.
    """
    if callable(bind):
        allowed = frozenset(cpu for core in cores for cpu in core.cpus)
        cpus = check_cpus(f"what the function in placement returned for rank {worker.rank}", bind(worker), allowed)
        return _make_binding(cores, [cpus], 0)
    if bind == "cores":
        return _make_binding(cores, split_cores(cores, worker.local_world_size), worker.local_rank)
    return _make_binding(cores, choose_nodes(cores, gpu_nodes), worker.local_rank)


def split_cores(cores: Sequence[Core], ranks: int) -> list[frozenset[int]]:
    """Divide all CPUs equally among the ranks. Return the CPUs of each rank.

    - A physical core belongs to one rank, unless there are fewer cores than ranks.
    - If the cores cannot be divided equally, some ranks get one extra core. If all cores are of one kind, `_choose_sizes`
      decides which ranks get the extra core.
    - On a hybrid processor, which has several kinds of cores, each rank gets its share of each kind.

    Raises ValueError if there are fewer CPUs than ranks.
    """
    single_cpus = [core._replace(cpus=(cpu,)) for core in cores for cpu in core.cpus]
    if len(single_cpus) < ranks:
        raise ValueError(
            f"Placement: cpus='cores' needs a CPU for each of the {ranks} ranks of this machine, but this process may use "
            "only "
            f"{format_cpus(core.cpus[0] for core in single_cpus)}; use nprocs={len(single_cpus)} at most, or leave cpus out"
        )
    units = single_cpus if len(cores) < ranks else cores
    parts: list[set[int]] = [set() for _ in range(ranks)]
    kinds = sorted({unit.kind for unit in units})
    first = 0  # the rank that gets one more core of the next kind
    for kind in kinds:
        members = [unit for unit in units if unit.kind == kind]
        base, surplus = divmod(len(members), ranks)
        if len(kinds) == 1:
            sizes = _choose_sizes(tuple((unit.package, unit.node) for unit in members), ranks)
        else:
            sizes = tuple(base + ((rank - first) % ranks < surplus) for rank in range(ranks))
        for part, (start, end) in zip(parts, pairwise(accumulate(sizes, initial=0)), strict=True):
            part.update(cpu for unit in members[start:end] for cpu in unit.cpus)
        first += surplus
    return [frozenset(part) for part in parts]


@lru_cache(maxsize=1)  # the arguments are the same for each rank
def _choose_sizes(places: tuple[tuple[int, int], ...], ranks: int) -> tuple[int, ...]:
    """Return the number of cores of each rank.

    This function minimises the number of ranks whose cores are on different packages or different NUMA nodes. If several
    choices are equally good, the first ranks get the extra cores.

    Args:
        places: the package and the NUMA node of each core. There are at least as many cores as ranks.
        ranks: the number of ranks.
    """
    base, surplus = divmod(len(places), ranks)
    # How many of the ranks from `rank` on span two places at least, if `left` of these ranks have one core more than `base`.
    spans: list[list[float]] = [[math.inf] * (surplus + 1) for _ in range(ranks)] + [[0, *[math.inf] * surplus]]

    def count_spans(rank: int, left: int, more: int) -> float:
        if more > left:
            return math.inf
        start = rank * base + surplus - left
        return spans[rank + 1][left - more] + (places[start] != places[start + base + more - 1])

    for rank in reversed(range(ranks)):
        for left in range(max(0, surplus - rank), min(surplus, ranks - rank) + 1):
            spans[rank][left] = min(count_spans(rank, left, 0), count_spans(rank, left, 1))
    sizes, left = [], surplus
    for rank in range(ranks):
        more = int(count_spans(rank, left, 1) <= count_spans(rank, left, 0))
        sizes.append(base + more)
        left -= more
    return tuple(sizes)


def choose_nodes(cores: Sequence[Core], gpu_nodes: Sequence[int | None]) -> list[frozenset[int]]:
    """Return the CPUs of each rank: all CPUs of the NUMA node to which the rank's GPU belongs.

    If a rank has no GPU, it gets all CPUs of one or more NUMA nodes. For example, with 2 ranks on a machine with 4 NUMA
    nodes, the first rank gets the CPUs of the first two nodes. If there are fewer nodes than ranks, several ranks share a
    node. If the NUMA node of the GPU is unknown or has no usable CPU, the rank counts as a rank without a GPU.
    """
    cpus_by_node: dict[int, set[int]] = {}
    for core in cores:
        cpus_by_node.setdefault(core.node, set()).update(core.cpus)
    nodes, ranks = list(cpus_by_node), len(gpu_nodes)
    chosen = []
    for rank, node in enumerate(gpu_nodes):
        first = rank * len(nodes) // ranks
        block = nodes[first : max(first + 1, (rank + 1) * len(nodes) // ranks)]
        own = [node] if node is not None and node in cpus_by_node else block
        chosen.append(frozenset(cpu for each in own for cpu in cpus_by_node[each]))
    return chosen


def _make_binding(cores: Sequence[Core], sets: Sequence[frozenset[int]], rank: int) -> Binding:
    """Return the Binding of this rank: its CPUs, its share of the cores, and its share of the CPUs."""
    own, counts = sets[rank], Counter(sets)

    def count_users(cpus: Collection[int]) -> int:
        return sum(count for other, count in counts.items() if not other.isdisjoint(cpus))

    users_of_cores = Counter(count_users(core.cpus) for core in cores if not own.isdisjoint(core.cpus))
    users_of_cpus = Counter(count_users((cpu,)) for cpu in own)
    return Binding(own, _add_shares(users_of_cores), _add_shares(users_of_cpus))


def _add_shares(users: Counter[int]) -> int:
    """Return the sum of the rank's shares of cores or of CPUs. Return at least 1.

    Example: the rank uses 4 cores alone, and shares 6 cores with one other rank. For this example, `users` is {1: 4, 2: 6},
    and the result is 4 + 6 // 2 = 7.
    """
    return max(1, sum(count // ranks for ranks, count in users.items()))

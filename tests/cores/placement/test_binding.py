"""The CPUs of each rank, on machines that are simulated as folders and on any machine that hypothesis can think of."""

import os

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from cores.placement.simulated_machine import SimulatedMachine
from mpwatch import Worker
from mpwatch.watcher.processes.binding import Core, bind_rank, choose_nodes, read_cores, split_cores


@pytest.fixture
def machine(tmp_path):
    return SimulatedMachine(tmp_path)


def read(machine, cpus):
    return read_cores(frozenset(cpus), machine.root)


def worker(rank, ranks):
    sizes = {"world_size": ranks, "local_world_size": ranks, "role_world_size": ranks}
    return Worker(rank=rank, local_rank=rank, role_rank=rank, **sizes, run_id="test", master_addr="here", master_port=1)


def test_cores_of_one_node_are_neighbours_even_if_numbers_alternate(machine):
    """Some firmware numbers CPUs in turn: the even ones are in package 0."""
    machine.add_node(0, "0,2,4,6").add_node(1, "1,3,5,7")
    assert [core.cpus[0] for core in read(machine, range(8))] == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("text", ["", "all", "3-1", "0,,1"])
def test_odd_files_never_raise(machine, text):
    machine.add_sockets(1, 3, threads=2)
    for file in filter(os.path.isfile, machine.folder.rglob("*")):
        file.write_text(text)
    assert sorted(cpu for core in read(machine, range(6)) for cpu in core.cpus) == list(range(6))


@pytest.mark.parametrize(
    ("sizes", "allowed", "parts"),
    [
        ((2, 2, 2), range(8), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ((1, 5, 2), range(10), [[0, 1, 5, 6], [2, 7], [3, 8], [4, 9]]),  # the first ranks have one core more
        ((1, 3, 2), range(6), [[0, 3], [1, 4], [2], [5]]),  # neighbours are together
        ((2, 8, 2), {4, 5, 6, 7, 20, 21}, [[4, 5, 20, 21], [6, 7]]),
        ((0, 0, 1), {2, 3, 5, 7, 11}, [[2, 3, 5], [7, 11]]),  # no files in /sys
    ],
)
def test_the_cores_of_a_machine_are_split(machine, sizes, allowed, parts):
    packages, cores, threads = sizes
    machine.add_sockets(packages, cores, threads=threads)
    assert [sorted(part) for part in split_cores(read(machine, allowed), len(parts))] == parts


def test_the_error_of_too_few_cpus_says_how_many_ranks_are_possible():
    with pytest.raises(ValueError, match=r"each of the 3 ranks .* only CPUs 0, 4; use nprocs=2 at most, or leave cpus out"):
        split_cores([Core((0, 4))], 3)


@pytest.mark.parametrize(
    ("gpu_nodes", "nodes"),
    [([1, 1, 0, 0], [[1], [1], [0], [0]]), ([None, 9], [[0, 1], [2, 3]]), ([None] * 6, [[0], [0], [1], [2], [2], [3]])],
)
def test_each_rank_has_the_numa_node_of_its_gpu_or_a_share_of_all(gpu_nodes, nodes):
    four_nodes = [Core((cpu,), cpu // 2) for cpu in range(8)]
    expected = [{cpu for node in own for cpu in (2 * node, 2 * node + 1)} for own in nodes]
    assert choose_nodes(four_nodes, gpu_nodes) == expected


def bind(cores, option, ranks, gpu_nodes=None):
    return [bind_rank(option, worker(rank, ranks), cores, gpu_nodes or [None] * ranks) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("option", "ranks", "gpu_nodes", "shares"),
    [
        ("cores", 4, None, [(4, 8)] * 4),
        ("numa", 2, None, [(8, 16)] * 2),
        ("numa", 4, [0, 0, 0, 1], [(2, 5)] * 3 + [(8, 16)]),
    ],
)
def test_ranks_on_the_same_cpus_share_them(machine, option, ranks, gpu_nodes, shares):
    cores = read(machine.add_sockets(2, 8, threads=2), range(32))
    assert [(b.core_share, b.cpu_share) for b in bind(cores, option, ranks, gpu_nodes)] == shares


TWO_CORES = [Core((0, 1)), Core((2, 3))]


@pytest.mark.parametrize("returned", [[2, 1, 0, 0], iter((0, 1, 2)), np.arange(3)])
def test_a_function_may_return_any_collection_of_cpus(returned):
    binding = bind_rank(lambda _: returned, worker(0, 1), TWO_CORES, [])
    assert (binding.cpus, binding.core_share, binding.cpu_share) == ({0, 1, 2}, 2, 3)


@pytest.mark.parametrize(
    ("returned", "error", "text"),
    [
        ((), ValueError, "has no CPU"),
        (range(9), ValueError, "has CPUs 4-8"),
        (None, TypeError, "must be a set of CPU numbers, not None"),
    ],
)
def test_what_a_function_returns_is_checked(returned, error, text):
    text = rf"what the function in placement returned for rank 1 {text}; this process may use CPUs 0-3"
    with pytest.raises(error, match=text):
        bind_rank(lambda _: returned, worker(1, 2), TWO_CORES, [])


def make_cores(rows):
    starts = [sum(threads for _, threads in rows[:n]) for n in range(len(rows))]
    return [Core((*range(start, start + threads),), node) for start, (node, threads) in zip(starts, rows, strict=True)]


ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=40)
MACHINES = ROWS.map(sorted).map(make_cores)


@hypothesis.given(MACHINES, st.data())
def test_any_split_has_each_cpu_once_and_is_fair(cores, data):
    cpus = sorted(cpu for core in cores for cpu in core.cpus)
    ranks = data.draw(st.integers(1, len(cpus)))
    parts = split_cores(cores, ranks)
    assert [cpu for part in parts for cpu in sorted(part)] == cpus
    counts = list(map(len, parts))
    if ranks <= len(cores):
        assert all(part.issuperset(core.cpus) or part.isdisjoint(core.cpus) for part in parts for core in cores)
        counts = [sum(part.issuperset(core.cpus) for core in cores) for part in parts]
    assert len(parts) == ranks
    assert max(counts) - min(counts) <= 1


@hypothesis.given(MACHINES, st.lists(st.none() | st.integers(0, 7), min_size=1, max_size=20))
def test_any_choice_of_nodes_is_of_whole_nodes_and_its_shares_fit_into_the_machine(cores, gpu_nodes):
    cpus_of_node = {}
    for core in cores:
        cpus_of_node.setdefault(core.node, set()).update(core.cpus)
    for part, node in zip(choose_nodes(cores, gpu_nodes), gpu_nodes, strict=True):
        assert part
        assert all(part.issuperset(cpus) or part.isdisjoint(cpus) for cpus in cpus_of_node.values())
        assert node not in cpus_of_node or part == cpus_of_node[node]
    bindings = bind(cores, "numa", len(gpu_nodes), gpu_nodes)
    used = set().union(*(binding.cpus for binding in bindings))
    assert sum(binding.cpu_share for binding in bindings if binding.cpu_share > 1) <= len(used)
    assert all(1 <= binding.core_share <= binding.cpu_share <= len(binding.cpus) for binding in bindings)

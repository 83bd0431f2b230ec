"""The CPUs of each rank, on machines that are simulated as folders and on any machine that hypothesis can think of."""

import itertools
from collections import Counter

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mpwatch import Worker
from mpwatch.os_support.cpu_topology import Core, read_cores
from mpwatch.watcher.processes.binding import bind_rank, choose_nodes, split_cores
from support.simulated_machine import SimulatedMachine


@pytest.fixture
def machine(tmp_path):
    return SimulatedMachine(tmp_path)


def split(machine, cpus, ranks):
    return [sorted(part) for part in split_cores(read_cores(frozenset(cpus), machine.root), ranks)]


def worker(local_rank=0, ranks=1):
    numbers = {"rank": local_rank, "local_rank": local_rank, "world_size": ranks, "local_world_size": ranks}
    return Worker(
        **numbers, role_rank=local_rank, role_world_size=ranks, run_id="test", master_addr="127.0.0.1", master_port=1
    )


def test_two_sockets_with_two_threads_on_each_core(machine):
    machine.add_sockets(2, 4, threads=2)
    assert split(machine, range(16), 1) == [list(range(16))]
    assert split(machine, range(16), 2) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert split(machine, range(16), 4) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert split(machine, range(16), 8) == [[core, core + 8] for core in range(8)]


def test_the_first_ranks_have_one_core_more(machine):
    machine.add_sockets(1, 5, threads=2)
    assert split(machine, range(10), 2) == [[0, 1, 2, 5, 6, 7], [3, 4, 8, 9]]
    assert split(machine, range(10), 4) == [[0, 1, 5, 6], [2, 7], [3, 8], [4, 9]]


def test_fewer_cores_than_ranks(machine):
    """Threads of one core are then in several ranks, and neighbours are still together."""
    machine.add_sockets(1, 3, threads=2)
    assert split(machine, range(6), 4) == [[0, 3], [1, 4], [2], [5]]
    assert split(machine, range(6), 6) == [[0], [3], [1], [4], [2], [5]]


def test_a_rank_is_in_one_numa_node_where_that_is_possible(machine):
    machine.add_sockets(2, 5)
    assert split(machine, range(10), 4) == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]
    assert split(machine, range(10), 3) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_hybrid_cores_are_split_by_kind(machine):
    machine.add_hybrid(8, 16)
    assert split(machine, range(32), 4) == [
        [4 * rank, 4 * rank + 1, 4 * rank + 2, 4 * rank + 3, *range(16 + 4 * rank, 20 + 4 * rank)] for rank in range(4)
    ]


def test_surplus_cores_of_two_kinds_go_to_different_ranks(machine):
    machine.add_hybrid(4, 8)
    parts = split(machine, range(16), 3)
    assert parts == [[0, 1, 2, 3, 8, 9], [4, 5, 10, 11, 12], [6, 7, 13, 14, 15]]


def test_only_allowed_cpus_are_split(machine):
    machine.add_sockets(2, 8, threads=2)
    assert split(machine, {4, 5, 6, 7, 20, 21}, 2) == [[4, 5, 20, 21], [6, 7]]
    assert split(machine, {8, 24, 9}, 2) == [[8, 24], [9]]


def test_without_sysfs_the_cpus_are_split_evenly(machine):
    assert split(machine, {2, 3, 5, 7, 11}, 2) == [[2, 3, 5], [7, 11]]


def test_fewer_cpus_than_ranks(machine):
    text = (
        r"Placement: cpus='cores' needs a CPU for each of the 3 ranks of this machine, but this process may use only CPUs 0, 4; "
        "use nprocs=2 at most, or leave cpus out"
    )
    with pytest.raises(ValueError, match=text):
        split(machine, {0, 4}, 3)


def choose(machine, cpus, gpu_nodes):
    return [sorted(part) for part in choose_nodes(read_cores(frozenset(cpus), machine.root), gpu_nodes)]


def test_each_rank_has_the_numa_node_of_its_gpu(machine):
    machine.add_sockets(2, 2)
    assert choose(machine, range(4), [1, 1, 0, 0]) == [[2, 3], [2, 3], [0, 1], [0, 1]]


def test_without_gpus_the_numa_nodes_are_dealt_out(machine):
    machine.add_sockets(2, 4, nodes_per_package=2)
    nodes = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert choose(machine, range(8), [None] * 4) == nodes
    assert choose(machine, range(8), [None] * 8) == [node for node in nodes for _ in range(2)]
    assert choose(machine, range(8), [None] * 6) == [nodes[rank * 4 // 6] for rank in range(6)]
    assert choose(machine, range(8), [None] * 2) == [nodes[0] + nodes[1], nodes[2] + nodes[3]]
    assert choose(machine, range(8), [None]) == [list(range(8))]


def test_a_node_without_allowed_cpus_is_treated_as_unknown(machine):
    machine.add_sockets(2, 4)
    assert choose(machine, {4, 5, 6}, [0, 1]) == [[4, 5, 6], [4, 5, 6]]
    machine.add_node(2, "")  # a node of memory alone
    assert choose(machine, range(8), [2, None]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def bind(cores, option, ranks, gpu_nodes=None):
    gpu_nodes = gpu_nodes or [None] * ranks
    return [bind_rank(option, worker(rank, ranks), cores, gpu_nodes) for rank in range(ranks)]


def test_ranks_on_the_same_cpus_share_them(machine):
    machine.add_sockets(2, 8, threads=2)
    cores = read_cores(frozenset(range(32)), machine.root)
    assert [(b.core_share, b.cpu_share) for b in bind(cores, "cores", 4)] == [(4, 8)] * 4
    assert [(b.core_share, b.cpu_share) for b in bind(cores, "numa", 2)] == [(8, 16)] * 2
    assert [(b.core_share, b.cpu_share) for b in bind(cores, "numa", 4, [0, 0, 0, 1])] == [(2, 5)] * 3 + [(8, 16)]
    assert [(b.core_share, b.cpu_share) for b in bind(cores, "numa", 64)] == [(1, 1)] * 64


def test_the_cpus_of_a_function(machine):
    machine.add_sockets(1, 4, threads=2)
    cores = read_cores(frozenset(range(8)), machine.root)
    for returned in ({1, 5, 2}, [1, 2, 5, 5], iter((5, 2, 1)), dict.fromkeys((1, 2, 5))):
        binding = bind_rank(lambda _, cpus=returned: cpus, worker(), cores, [])
        assert (binding.cpus, binding.core_share, binding.cpu_share) == ({1, 2, 5}, 2, 3)
    bindings = bind(cores, lambda w: range(2 * w.local_rank, 2 * w.local_rank + 2), 3)
    assert [set(binding.cpus) for binding in bindings] == [{0, 1}, {2, 3}, {4, 5}]


def test_the_cpus_of_a_function_may_be_numpy_integers():
    assert bind_rank(lambda _: np.arange(2), worker(), [Core((0,)), Core((1,))], []).cpus == {0, 1}


@pytest.mark.parametrize(
    ("returned", "error", "text"),
    [
        ((), ValueError, "has no CPU"),
        ({4}, ValueError, "has CPU 4"),
        ([1, -1], ValueError, "has CPU -1"),
        (range(9), ValueError, "has CPUs 4-8"),
        (None, TypeError, "must be a set of CPU numbers, not None"),
        (1, TypeError, "must be a set of CPU numbers, not 1"),
        ("0-1", TypeError, "must be a set of CPU numbers, not '0-1'"),
        (b"\0", TypeError, r"must be a set of CPU numbers, not b'\\x00'"),
        ([0, "1"], TypeError, "must be a set of CPU numbers, but it has '1'"),
        ([True], TypeError, "must be a set of CPU numbers, but it has True"),
        ([0.0], TypeError, "must be a set of CPU numbers, but it has 0.0"),
    ],
)
def test_what_a_function_returns_is_checked(returned, error, text):
    text = rf"what the function in placement returned for rank 1 {text}; this process may use CPUs 0-3"
    with pytest.raises(error, match=text):
        bind_rank(lambda _: returned, worker(1, 2), [Core((0, 1)), Core((2, 3))], [])


# ---- any machine

MACHINES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=40
).map(lambda rows: [*make_cores(sorted(rows))])
UNIFORM_MACHINES = MACHINES.map(lambda cores: [core._replace(kind=0) for core in cores])


def make_cores(rows):
    numbers = itertools.count()
    for package, node, kind, threads in rows:
        yield Core(tuple(itertools.islice(numbers, threads)), package, 3 * package + node, kind)


def count_spanning(cores, sizes):
    """How many ranks have cores of several NUMA nodes, if their cores are contiguous and these are their numbers."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return sum(len({core.node for core in cores[start:end]}) > 1 for start, end in itertools.pairwise(ends))


@hypothesis.given(MACHINES, st.integers(1, 50))
def test_any_split_has_each_cpu_once(cores, ranks):
    cpus = sorted(cpu for core in cores for cpu in core.cpus)
    hypothesis.assume(len(cpus) >= ranks)
    parts = split_cores(cores, ranks)
    assert len(parts) == ranks
    assert all(parts)
    assert sorted(cpu for part in parts for cpu in part) == cpus


@hypothesis.given(MACHINES, st.data())
def test_any_split_of_enough_cores_is_of_whole_cores_and_fair(cores, data):
    ranks = data.draw(st.integers(1, len(cores)))
    parts = split_cores(cores, ranks)
    assert all(part.issuperset(core.cpus) or part.isdisjoint(core.cpus) for part in parts for core in cores)
    for kinds in [{0}, {1}, {2}, {0, 1, 2}]:
        counts = [sum(part.issuperset(core.cpus) for core in cores if core.kind in kinds) for part in parts]
        assert max(counts) - min(counts) <= 1


@hypothesis.given(MACHINES, st.data())
def test_any_split_of_too_few_cores_is_fair(cores, data):
    cpus = sum(len(core.cpus) for core in cores)
    hypothesis.assume(cpus > len(cores))
    parts = split_cores(cores, data.draw(st.integers(len(cores) + 1, cpus)))
    sizes = list(map(len, parts))
    assert max(sizes) - min(sizes) <= 1


@hypothesis.given(UNIFORM_MACHINES, st.data())
def test_any_split_of_equal_cores_is_contiguous_and_spans_few_nodes(cores, data):
    ranks = data.draw(st.integers(1, len(cores)))
    parts = split_cores(cores, ranks)
    owners = [next(rank for rank, part in enumerate(parts) if part.issuperset(core.cpus)) for core in cores]
    assert owners == sorted(owners)
    base, surplus = divmod(len(cores), ranks)
    sizes = [Counter(owners)[rank] for rank in range(ranks)]
    assert count_spanning(cores, sizes) <= count_spanning(cores, [base + (rank < surplus) for rank in range(ranks)])


@pytest.mark.parametrize(("first", "second", "third"), list(itertools.product(range(1, 5), repeat=3)))
def test_no_split_spans_fewer_nodes(first, second, third):
    """Compared with all ways to give `surplus` ranks one core more. Among the best ones, the first ranks have most."""
    cores = list(make_cores((0, node, 0, 1) for node, count in enumerate((first, second, third)) for _ in range(count)))
    for ranks in range(1, len(cores) + 1):
        base, surplus = divmod(len(cores), ranks)
        chosen = itertools.combinations(range(ranks), surplus)
        ways = [tuple(base + (rank in more) for rank in range(ranks)) for more in map(set, chosen)]
        best = min(ways, key=lambda sizes: (count_spanning(cores, sizes), [-size for size in sizes]))
        assert tuple(map(len, split_cores(cores, ranks))) == best


@hypothesis.given(MACHINES, st.lists(st.none() | st.integers(0, 7), min_size=1, max_size=20))
def test_any_choice_of_nodes_is_of_whole_nodes(cores, gpu_nodes):
    cpus_of_node = {}
    for core in cores:
        cpus_of_node.setdefault(core.node, set()).update(core.cpus)
    for part, node in zip(choose_nodes(cores, gpu_nodes), gpu_nodes, strict=True):
        assert part
        assert all(part.issuperset(cpus) or part.isdisjoint(cpus) for cpus in cpus_of_node.values())
        assert node not in cpus_of_node or part == cpus_of_node[node]


@hypothesis.given(MACHINES, st.integers(1, 20))
def test_dealt_nodes_have_each_cpu(cores, ranks):
    parts = choose_nodes(cores, [None] * ranks)
    assert set().union(*parts) == {cpu for core in cores for cpu in core.cpus}
    uses = Counter(frozenset(part) for part in parts)
    assert max(uses.values()) - min(uses.values()) <= 1


@hypothesis.given(MACHINES, st.lists(st.none() | st.integers(0, 7), min_size=1, max_size=20))
def test_shares_of_any_ranks_fit_into_the_machine(cores, gpu_nodes):
    bindings = bind(cores, "numa", len(gpu_nodes), gpu_nodes)
    cpus = set().union(*(binding.cpus for binding in bindings))
    assert sum(binding.cpu_share for binding in bindings if binding.cpu_share > 1) <= len(cpus)
    assert all(1 <= binding.core_share <= binding.cpu_share <= len(binding.cpus) for binding in bindings)

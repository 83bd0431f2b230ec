"""The physical cores and NUMA nodes of machines that are simulated as folders, and of this machine."""

import os

import pytest

from mpwatch.os_support.cpu_topology import Core, read_cores
from support.simulated_machine import SimulatedMachine


@pytest.fixture
def machine(tmp_path):
    return SimulatedMachine(tmp_path)


def read(machine, cpus):
    return read_cores(frozenset(cpus), machine.root)


def test_two_sockets_with_two_threads_on_each_core(machine):
    machine.add_sockets(2, 4, threads=2)
    cores = read(machine, range(16))
    assert [core.cpus for core in cores] == [(core, core + 8) for core in range(8)]
    assert [(core.package, core.node, core.kind) for core in cores] == [(0, 0, 0)] * 4 + [(1, 1, 0)] * 4


def test_several_numa_nodes_in_a_package(machine):
    machine.add_sockets(2, 4, nodes_per_package=2)
    assert [(core.package, core.node) for core in read(machine, range(8))] == [
        *[(0, 0), (0, 0), (0, 1), (0, 1)],
        *[(1, 2), (1, 2), (1, 3), (1, 3)],
    ]


def test_cores_of_one_package_are_neighbours_even_if_numbers_alternate(machine):
    """Some firmware numbers CPUs in turn: the even ones are in package 0."""
    for cpu in range(8):
        machine.add_cpu(cpu, package=cpu % 2, core=cpu // 2)
    machine.add_node(0, "0,2,4,6").add_node(1, "1,3,5,7")
    assert [core.cpus[0] for core in read(machine, range(8))] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_only_allowed_cpus_count(machine):
    machine.add_sockets(2, 4, threads=2)
    assert [core.cpus for core in read(machine, {2, 9, 1, 14, 10})] == [(1, 9), (2, 10), (14,)]


def test_a_core_whose_first_thread_is_not_allowed_keeps_its_place(machine):
    machine.add_sockets(1, 4, threads=2)
    assert [core.cpus for core in read(machine, {1, 2, 3, 4})] == [(4,), (1,), (2,), (3,)]


def test_a_hybrid_processor(machine):
    machine.add_hybrid(2, 4)
    cores = read(machine, range(8))
    assert [core.cpus for core in cores] == [(0, 1), (2, 3), (4,), (5,), (6,), (7,)]
    assert [core.kind for core in cores] == [0, 0, 1, 1, 1, 1]


def test_low_power_cores_are_a_kind_of_their_own(machine):
    machine.add_hybrid(1, 4).write("sys/devices/cpu_atom/cpus", "2-3").write("sys/devices/cpu_lowpower/cpus", "4-5")
    assert [core.kind for core in read(machine, range(6))] == [0, 1, 1, 2, 2]


def test_without_sysfs_each_cpu_is_a_core(machine):
    assert read(machine, {3, 1}) == [Core((1,)), Core((3,))]


def test_without_lists_of_siblings_the_numbers_of_cores_are_used(machine):
    machine.add_sockets(1, 2, threads=2)
    for file in machine.folder.rglob("thread_siblings_list"):
        file.unlink()
    assert [core.cpus for core in read(machine, range(4))] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    "text", ["", "\n", "all", "0-", "-1", "3-1", "0-99999999999999999999", "0-7:2/4", "1", "\xff", "0x3", "0,,1"]
)
def test_odd_lists_never_raise(machine, text):
    """The CPUs are all there, each in one core."""
    machine.add_sockets(2, 2)
    for file in [*machine.folder.rglob("thread_siblings_list"), *machine.folder.rglob("cpulist")]:
        file.write_bytes(text.encode("latin-1"))
    for name in ("cpu_core", "cpu_atom"):
        machine.write(f"sys/devices/{name}/cpus", text)
    cores = read(machine, range(4))
    assert sorted(cpu for core in cores for cpu in core.cpus) == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["", "-1", "none"])
def test_odd_numbers_never_raise(machine, text):
    machine.add_sockets(2, 2)
    for name in ("physical_package_id", "core_id", "thread_siblings_list"):
        for file in machine.folder.rglob(name):
            file.write_text(text)
    assert sorted(core.cpus for core in read(machine, range(4))) == [(0,), (1,), (2,), (3,)]


def test_a_folder_in_place_of_a_file_never_raises(machine):
    machine.folder.joinpath("sys/devices/system/cpu/cpu0/topology/thread_siblings_list").mkdir(parents=True)
    machine.write("sys/devices/system/node", "a file")
    assert read(machine, {0}) == [Core((0,))]


def test_the_cores_of_this_machine_have_all_cpus_once():
    allowed = os.sched_getaffinity(0)
    assert sorted(cpu for core in read_cores(allowed) for cpu in core.cpus) == sorted(allowed)

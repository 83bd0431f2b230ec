"""The physical cores and NUMA nodes that are read from /sys, on machines that are simulated as folders."""

import os

import pytest

from cores.placement.simulated_machine import SimulatedMachine
from mpwatch.os_support.cpu_topology import read_cores


@pytest.fixture
def machine(tmp_path):
    return SimulatedMachine(tmp_path)


def read(machine, cpus):
    return read_cores(frozenset(cpus), machine.root)


def cpus_of(cores):
    return [core.cpus for core in cores]


def test_two_sockets_with_two_threads_on_each_core(machine):
    cores = read(machine.add_sockets(2, 4, threads=2), range(16))
    assert cpus_of(cores) == [(core, core + 8) for core in range(8)]
    assert [(core.package, core.node, core.kind) for core in cores] == [(0, 0, 0)] * 4 + [(1, 1, 0)] * 4


def test_cores_of_one_package_are_neighbours_even_if_numbers_alternate(machine):
    """Some firmware numbers CPUs in turn: the even ones are in package 0."""
    for cpu in range(8):
        machine.add_cpu(cpu, package=cpu % 2, core=cpu // 2)
    machine.add_node(0, "0,2,4,6").add_node(1, "1,3,5,7")
    assert [core.cpus[0] for core in read(machine, range(8))] == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize(
    ("allowed", "cores"),
    [
        ({2, 9, 1, 14, 10}, [(1, 9), (2, 10), (14,)]),
        ({9, 1, 2, 8}, [(8,), (1, 9), (2,)]),  # a core whose first thread is not allowed keeps its place
    ],
)
def test_only_allowed_cpus_count(machine, allowed, cores):
    assert cpus_of(read(machine.add_sockets(2, 4, threads=2), allowed)) == cores


def test_the_kinds_of_cores_of_a_hybrid_processor(machine):
    cores = read(machine.add_hybrid(2, 4), range(8))
    assert cpus_of(cores) == [(0, 1), (2, 3), (4,), (5,), (6,), (7,)]
    assert [core.kind for core in cores] == [0, 0, 1, 1, 1, 1]
    machine.write("sys/devices/cpu_atom/cpus", "4-5").write("sys/devices/cpu_lowpower/cpus", "6-7")
    assert [core.kind for core in read(machine, range(8))] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("text", ["", "\n", "all", "0-", "-1", "3-1", "0-99999999999999999999", "0-7:2/4", "\xff", "0,,1"])
def test_odd_files_never_raise(machine, text):
    """The CPUs are all there, each in one core."""
    machine.add_hybrid(2, 2)
    for file in filter(os.path.isfile, machine.folder.rglob("*")):
        file.write_bytes(text.encode("latin-1"))
    assert sorted(cpu for core in read(machine, range(6)) for cpu in core.cpus) == list(range(6))


def test_the_cores_of_this_machine_have_all_cpus_once():
    allowed = os.sched_getaffinity(0)
    assert sorted(cpu for core in read_cores(allowed) for cpu in core.cpus) == sorted(allowed)

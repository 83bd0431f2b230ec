"""The GPUs of machines that are simulated as folders."""

import pytest

from mpwatch.os_support.gpus import Gpu, list_amd_gpus, list_nvidia_gpus
from support.simulated_machine import SimulatedMachine


@pytest.fixture
def machine(tmp_path):
    return SimulatedMachine(tmp_path)


def test_nvidia_gpus_are_in_the_order_of_their_pci_addresses(machine):
    machine.add_nvidia_gpu("0000:c1:00.0", 0, node=1).add_nvidia_gpu("0000:07:00.0", 1, node=0)
    machine.add_nvidia_gpu("10000:01:00.0", 2)
    gpus = list_nvidia_gpus(machine.root)
    assert [gpu.uuid[:8] for gpu in gpus] == ["GPU-1111", "GPU-0000", "GPU-2222"]
    assert [gpu.node for gpu in gpus] == [0, 1, None]
    assert {gpu.model for gpu in gpus} == {"NVIDIA H100 80GB HBM3"}


def test_gpus_without_a_device_file_and_excluded_gpus_cannot_be_used(machine):
    machine.add_nvidia_gpus([0, 0]).add_nvidia_gpu("0000:f0:00.0", 7, device=False)
    machine.add_nvidia_gpu("0000:f1:00.0", 8, excluded="Yes")
    assert [gpu.uuid[4] for gpu in list_nvidia_gpus(machine.root)] == ["1", "0"]


def test_device_files_count_if_the_driver_has_no_folder(machine):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        machine.write(f"dev/{name}", "")
    assert list_nvidia_gpus(machine.root) == [Gpu()] * 3


def test_odd_files_never_raise(machine):
    machine.write("proc/driver/nvidia/gpus/0000:07:00.0/information", "\xff: \n:::\n")
    machine.write("sys/bus/pci/devices/0000:07:00.0/numa_node", "first\n")
    machine.write("sys/class/kfd/kfd/topology/nodes/1/properties", "simd_count many\n").write("dev/kfd", "")
    machine.write("sys/class/kfd/kfd/topology/nodes/first/properties", "")
    assert list_nvidia_gpus(machine.root) == list_amd_gpus(machine.root) == []


def test_amd_gpus_are_in_the_order_of_the_driver(machine):
    machine.add_amd_gpus([0, 1, -1], without_device=[1])
    assert [(gpu.uuid, gpu.node) for gpu in list_amd_gpus(machine.root)] == [
        ("GPU-0000000000000001", 0),
        ("GPU-0000000000000003", None),
    ]


def test_a_machine_without_gpus(machine):
    assert list_nvidia_gpus(machine.root) == list_amd_gpus(machine.root) == []

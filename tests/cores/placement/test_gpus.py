"""The GPUs that ranks see, and the NUMA nodes of these, on machines that are simulated as folders."""

import os

import pytest

from cores.placement.simulated_machine import SimulatedMachine, uuid_of
from mpwatch import Placement, WorkerSpec
from mpwatch.watcher.processes.devices import (
    DEVICE_VARIABLES,
    find_gpu_nodes,
    find_visible_devices,
    list_nvidia_gpus,
)
from mpwatch.watcher.processes.rank_environment import build_rank_setups, build_workers

UUIDS = [uuid_of(number ^ 1) for number in range(8)]  # see add_nvidia_gpus
MIG = "MIG-d1e0c5a3-0000-0000-0000-000000000000"
ALLOWED = sorted(os.sched_getaffinity(0))
THREADS = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
CUDA, HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
ZE = "ZE_AFFINITY_MASK"


class Machine(SimulatedMachine):
    """A simulated machine, with the environment and the torch of the caller. The caller has none of the variables."""

    def __init__(self, folder, monkeypatch):
        super().__init__(folder / "machine")
        monkeypatch.setattr("mpwatch.os_support.hardware.GPU_DEVICE_FILES", (f"{self.root}/dev/nvidia[0-9]*",))
        self.packages, self._monkeypatch = folder, monkeypatch
        for name in (*DEVICE_VARIABLES, "ACCELERATE_USE_CPU", *THREADS):
            monkeypatch.delenv(name, raising=False)

    def set_variables(self, variables):
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)

    def add_torch(self, kind, *packages):
        """Let a torch of this kind be found first: "cuda", "hip", "xpu" or "cpu"."""
        self._monkeypatch.syspath_prepend(self.packages)
        for name in ("torch", *packages):
            self.packages.joinpath(name).mkdir()
            self.packages.joinpath(name, "__init__.py").touch()
        versions = {name: "13.0" if name == kind else None for name in ("cuda", "hip", "xpu")}
        lines = ["__version__ = '2.13.0'", *(f"{name}: Optional[str] = {version!r}" for name, version in versions.items())]
        self.packages.joinpath("torch", "version.py").write_text("\n".join([*lines, "# \xff"]), "latin-1")
        return self


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def build(machine, ranks=2, built=None, **options):
    spec = WorkerSpec(fn=print, nprocs=ranks, **options)
    workers = build_workers(spec, built or range(ranks), 29500, run_id="test", restart_count=0)
    return build_rank_setups(spec, workers, machine.root)


def device_variables(machine, ranks=2, **options):
    """Return the variables of devices in the environment of each rank."""
    setups = build(machine, ranks, placement=Placement(gpus="own"), **options)
    return [{name: setup.env[name] for name in DEVICE_VARIABLES if name in setup.env} for setup in setups]


# ---- the list of GPUs


def test_nvidia_gpus_are_in_the_order_of_their_pci_addresses(machine):
    machine.add_nvidia_gpu("0000:c1:00.0", 0, node=1).add_nvidia_gpu("0000:07:00.0", 1, node=0)
    machine.add_nvidia_gpu("0000:f1:00.0", 2).add_nvidia_gpu("0000:f0:00.0", 7, device=False)
    gpus = list_nvidia_gpus(machine.root)
    assert [(gpu.uuid[:8], gpu.node) for gpu in gpus] == [("GPU-1111", 0), ("GPU-0000", 1), ("GPU-2222", None)]


def test_a_machine_without_gpus_or_with_odd_files_has_none(machine):
    machine.write("sys/class/kfd/kfd/topology/nodes/1/properties", "simd_count many\n").write("dev/kfd", "")
    machine.write("proc/driver/nvidia/gpus/0000:07:00.0/information", "\xff: \n:::\n")
    assert [find_visible_devices({}, {kind}, machine.root).entries for kind in ("cuda", "hip", "xpu", "cpu")] == [[]] * 4


# ---- Placement(gpus="own")


MIGS = MIG, f"MIG-{UUIDS[0]}/1/0"
SET_ZE = "there is no GPU that the ranks can see; set ZE_AFFINITY_MASK to a list such as '0,1', or leave"
ONE = r"there is only 1 GPU that the ranks can see \(the environment has CUDA_VISIBLE_DEVICES='1'\); use nprocs=1 at most"


@pytest.mark.parametrize(
    ("kind", "variables", "expected"),
    [
        # the variable and the values of both ranks
        ("cuda", {}, (CUDA, "0", "1")),
        ("cuda", {CUDA: "2,3"}, (CUDA, "2", "3")),
        ("cuda", {CUDA: "GPU-2222,GPU-3333"}, (CUDA, "GPU-2222", "GPU-3333")),
        ("cuda", {CUDA: ",".join(MIGS)}, (CUDA, *MIGS)),
        ("hip", {}, (HIP, "0", "1")),
        ("hip", {HIP: "3,2"}, (HIP, "3", "2")),
        ("hip", {CUDA: "3,2"}, (CUDA, "3", "2")),
        ("xpu", {ZE: "0.0,0.1"}, (ZE, "0.0", "0.1")),
        # fewer GPUs than ranks
        ("cuda", {CUDA: "1"}, ONE),
        ("cuda", {CUDA: "0,x,1"}, "there is only 1 GPU"),
        (
            "cuda",
            {CUDA: ""},
            r"there is no GPU .*CUDA_VISIBLE_DEVICES=''\); set CUDA_VISIBLE_DEVICES to a list such as '0,1', or",
        ),
        ("xpu", {}, SET_ZE),
        ("xpu", {ZE: "0"}, "there is only 1 GPU"),
    ],
)
def test_each_rank_sees_one_gpu_of_the_list(machine, kind, variables, expected):
    machine.add_torch(kind).add_nvidia_gpus([0] * 4)
    if kind == "hip":
        machine.add_amd_gpus([0, 0, 1, 1])
    machine.set_variables(variables)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"needs 2 GPUs, one for each rank of this machine, but {expected}"):
            device_variables(machine)
    else:
        variable, *values = expected
        assert device_variables(machine) == [{variable: value} for value in values]


def test_env_may_choose_the_device_of_a_rank(machine):
    machine.add_torch("cuda").add_nvidia_gpus([0])
    first, no_device = {CUDA: "0"}, {CUDA: ""}
    assert device_variables(machine, env=first) == [first, first]  # fewer GPUs than ranks, but the user shares them
    machine.add_nvidia_gpus([0, 0])
    assert device_variables(machine, env={CUDA: "1,0"}) == [{CUDA: "1"}, {CUDA: "0"}]
    assert device_variables(machine, env=no_device) == [no_device, no_device]
    assert device_variables(machine, env=lambda worker: {} if worker.rank else first) == [first, {CUDA: "1"}]


# ---- the NUMA nodes of GPUs, and what follows for ranks


@pytest.mark.parametrize(
    ("kind", "gpus", "variables", "nodes"),
    [
        ("cuda", [0, 0, 0, 0, 1, 1, 1, 1], {CUDA: "4,1,5,0"}, [1, 0, 1, 0]),
        ("cuda", [0, 0, 0, 0, 1, 1, 1, 1], {CUDA: f"{UUIDS[6]},{UUIDS[2]}"}, [1, 0]),
        ("cuda", [0, -1], {}, [0, None]),
        ("cuda", [0, -1], {CUDA: ""}, [None, None]),
        ("cuda", [0, -1], {CUDA: MIG}, [None]),
        ("hip", [0, 0, 1, 1], {HIP: "3,0"}, [1, 0]),
        ("hip", [0, 0, 1, 1], {}, [0, 0, 1, 1]),
    ],
)
def test_the_numa_nodes_of_the_gpus_of_ranks(machine, kind, gpus, variables, nodes):
    machine.add_amd_gpus(gpus) if kind == "hip" else machine.add_nvidia_gpus(gpus)
    assert find_gpu_nodes(find_visible_devices(variables, {kind}, machine.root), len(nodes)) == nodes


@pytest.fixture
def two_nodes(machine):
    """A machine with the CPUs of this one, of which the first is in NUMA node 0 and the others are in node 1. It has 4 GPUs."""
    if len(ALLOWED) < 2:
        pytest.skip("it needs two CPUs")
    machine.add_torch("cuda").add_nvidia_gpus([1, 1, 0, 0])
    return machine.add_node(0, ALLOWED[0]).add_node(1, ",".join(map(str, ALLOWED[1:])))


def test_ranks_are_bound_to_the_numa_nodes_of_their_gpus(two_nodes):
    def cpus_of(*args, **options):
        return [sorted(setup.cpus) for setup in build(two_nodes, *args, **options)]

    first, others, own = ALLOWED[:1], ALLOWED[1:], Placement("numa", gpus="own")
    for placement in ("numa", own):
        assert cpus_of(4, placement=placement) == [others, others, first, first]
    assert cpus_of(4, [2], placement=own) == [first]  # it is restarted alone
    one_for_each = {"env": lambda worker: {CUDA: str(3 - worker.local_rank)}}
    assert cpus_of(4, placement="numa", **one_for_each) == [first, first, others, others]
    two_nodes.set_variables({CUDA: "3,0"})
    assert cpus_of(2, placement=own) == [first, others]


# ---- OMP_NUM_THREADS and TORCHINDUCTOR_COMPILE_THREADS


def set_quota(monkeypatch, cpus):
    """Set the quota of CPU time of this process."""
    for module in ("mpwatch.watcher.processes.rank_environment", "mpwatch.os_support.hardware"):
        monkeypatch.setattr(f"{module}.read_cpu_quota", lambda: cpus)


def threads_of(setups):
    return [tuple(int(setup.env[name]) for name in THREADS) for setup in setups]


def test_threads_follow_the_cpus_of_the_rank(two_nodes, monkeypatch):
    set_quota(monkeypatch, None)
    count = len(ALLOWED)
    share = max(1, (count - 1) // 2)  # two ranks share a NUMA node
    assert threads_of(build(two_nodes, 4, placement="numa")) == [(share, share)] * 2 + [(1, 1)] * 2
    assert threads_of(build(two_nodes, 2, placement=lambda worker: ALLOWED)) == [(count, count)] * 2
    assert threads_of(build(two_nodes, 2)) == [(count // 2, count // 2)] * 2
    set_quota(monkeypatch, 1)
    assert threads_of(build(two_nodes, 1, placement="cores")) == [(1, 1)]


def test_values_of_the_user_are_kept(two_nodes):
    values = dict(zip(THREADS, ("9", "8"), strict=True))
    assert threads_of(build(two_nodes, placement="numa", env=values)) == [(9, 8)] * 2
    two_nodes.set_variables(values)
    assert threads_of(build(two_nodes, placement="cores")) == threads_of(build(two_nodes)) == [(9, 8)] * 2


# ---- ACCELERATE_USE_CPU


@pytest.mark.parametrize(
    ("torch", "gpus", "env", "expected"),
    [
        ("cpu", 0, {}, "true"),
        ("cuda", 0, {}, "true"),
        ("cuda", 2, {}, None),
        ("cuda", 2, {CUDA: ""}, "true"),
        ("cpu and torch_npu", 0, {CUDA: ""}, None),
        ("cpu", 0, {"ACCELERATE_USE_CPU": "no"}, "no"),
    ],
)
def test_accelerate_uses_cpus_where_no_rank_has_an_accelerator(machine, torch, gpus, env, expected):
    machine.add_torch(*torch.split(" and ")).add_nvidia_gpus([0] * gpus)
    assert [setup.env.get("ACCELERATE_USE_CPU") for setup in build(machine, env=env)] == [expected] * 2
    assert env or "ACCELERATE_USE_CPU" not in build(machine, 1)[0].env

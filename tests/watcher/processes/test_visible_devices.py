"""The GPUs that ranks see, and the environments and CPUs that follow from them, on machines that are simulated as folders."""

import os

import pytest

from mpwatch import Placement, WorkerSpec
from mpwatch.watcher.processes.rank_environment import build_rank_setups, build_workers
from mpwatch.watcher.processes.visible_devices import DEVICE_VARIABLES, find_gpu_nodes, find_visible_devices
from support.simulated_machine import SimulatedMachine

# The GPU with the lowest PCI address has the minor number 1, see add_nvidia_gpus.
UUIDS = [f"GPU-{f'{number ^ 1}' * 8}-0000-0000-0000-000000000000" for number in range(8)]
MIG = "MIG-d1e0c5a3-0000-0000-0000-000000000000"
ALLOWED = sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch):
    for name in (*DEVICE_VARIABLES, "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(tmp_path):
    return SimulatedMachine(tmp_path / "machine")


@pytest.fixture
def torch_build(tmp_path, monkeypatch):
    """Let a torch of this kind be found first: "cuda", "hip", "xpu" or "cpu"."""

    def make(kind):
        folder = tmp_path / "packages" / "torch"
        folder.mkdir(parents=True)
        folder.joinpath("__init__.py").touch()
        lines = (f"{name} = {'1.0' if name == kind else None!r}\n" for name in ("cuda", "hip", "xpu"))
        folder.joinpath("version.py").write_text("".join(lines).replace("= 1.0", "= '1.0'"))
        monkeypatch.syspath_prepend(folder.parent)

    return make


def build(machine, ranks=2, local_ranks=None, **options):
    spec = WorkerSpec(fn=print, nprocs=ranks, **options)
    workers = build_workers(spec, local_ranks or range(ranks), 29500, run_id="test", restart_count=0)
    return build_rank_setups(spec, workers, machine.root)


def device_variables(machine, ranks=2, **options):
    """Return the variables of devices in the environment of each rank."""
    setups = build(machine, ranks, placement=Placement(gpus="own"), **options)
    return [{name: setup.env[name] for name in DEVICE_VARIABLES if name in setup.env} for setup in setups]


def test_each_rank_sees_the_gpu_of_its_number(machine, torch_build):
    torch_build("cuda")
    machine.add_nvidia_gpus([0] * 8)
    assert device_variables(machine, 8) == [{"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(8)]
    assert device_variables(machine, 2) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    setups = build(machine, 8, placement=Placement(gpus="own"))
    assert [setup.env["LOCAL_RANK"] for setup in setups] == [str(rank) for rank in range(8)]


def test_without_the_option_no_variable_is_set(machine, torch_build):
    torch_build("cuda")
    machine.add_nvidia_gpus([0, 0])
    assert not any(DEVICE_VARIABLES & setup.env.keys() for setup in build(machine))


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        ("2,3", ["2", "3"]),
        ("7, 0 ,1", ["7", "0"]),
        ("+3,01", ["3", "1"]),
        (f"{UUIDS[3]},{UUIDS[0]}", [UUIDS[3], UUIDS[0]]),
        ("GPU-2222,GPU-3333", ["GPU-2222", "GPU-3333"]),
        (f"{MIG},MIG-{UUIDS[0]}/1/0", [MIG, f"MIG-{UUIDS[0]}/1/0"]),
        ("0,1,-1,2", ["0", "1"]),
    ],
)
def test_the_list_of_the_caller_keeps_its_form(machine, torch_build, monkeypatch, value, entries):
    torch_build("cuda")
    machine.add_nvidia_gpus([0] * 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert device_variables(machine) == [{"CUDA_VISIBLE_DEVICES": entry} for entry in entries]


def test_env_may_choose_the_device_of_a_rank(machine, torch_build):
    torch_build("cuda")
    machine.add_nvidia_gpus([0])
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    assert device_variables(machine, env=env) == [env, env]  # fewer GPUs than ranks, but the user shares them
    machine.add_nvidia_gpus([0, 0])
    assert device_variables(machine, env=lambda worker: {} if worker.rank else env) == [env, {"CUDA_VISIBLE_DEVICES": "1"}]


def test_a_list_in_env_is_narrowed(machine, torch_build):
    torch_build("cuda")
    machine.add_nvidia_gpus([0] * 8)
    env = {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert device_variables(machine, env=env) == [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "3"}]
    with pytest.raises(ValueError, match=r"there are only 2 GPUs .*\(the environment has CUDA_VISIBLE_DEVICES='2,3'\)"):
        device_variables(machine, 3, env=env)


def test_no_device_in_env_stays_none(machine, torch_build):
    torch_build("cuda")
    machine.add_nvidia_gpus([0, 0])
    env = {"CUDA_VISIBLE_DEVICES": ""}
    assert device_variables(machine, env=env) == [env, env]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "there are only 2 GPUs that the ranks can see; use nprocs=2 at most"),
        (
            "1",
            r"there is only 1 GPU that the ranks can see \(the environment has CUDA_VISIBLE_DEVICES='1'\); use nprocs=1 at most",
        ),
        ("0,1,2", "there are only 2 GPUs"),
        ("0,x,1", "there is only 1 GPU"),
        ("0,0,1", "there is no GPU"),
        (
            "",
            r"there is no GPU that the ranks can see \(the environment has CUDA_VISIBLE_DEVICES=''\); leave gpus",
        ),
        ("-1", "there is no GPU"),
        ("NoDevFiles", "there is no GPU"),
        (f"{UUIDS[0]},{MIG}", "there is only 1 GPU"),
    ],
)
def test_fewer_gpus_than_ranks(machine, torch_build, monkeypatch, value, found):
    torch_build("cuda")
    machine.add_nvidia_gpus([0, 0])
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    text = rf"Placement\(gpus='own'\) needs 3 GPUs, one for each rank of this machine, but {found}"
    with pytest.raises(ValueError, match=text):
        build(machine, 3, placement=Placement(gpus="own"))


@pytest.mark.parametrize("value", [None, "0,1"])
@pytest.mark.parametrize("kind", ["cuda", "hip", "cpu"])
def test_no_gpu_at_all(machine, torch_build, monkeypatch, kind, value):
    torch_build(kind)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(ValueError, match="but there is no GPU that the ranks can see"):
        build(machine, placement=Placement(gpus="own"))


def test_gpus_that_cannot_be_counted(machine, torch_build, monkeypatch):
    """The Linux subsystem of Windows has one device file for all GPUs."""
    torch_build("cuda")
    machine.write("dev/dxg", "")
    with pytest.raises(
        ValueError, match=r"mpwatch cannot count the GPUs here; set CUDA_VISIBLE_DEVICES to a list such as '0,1'"
    ):
        build(machine, placement=Placement(gpus="own"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert device_variables(machine) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"HIP_VISIBLE_DEVICES": "1"}),
        ({"HIP_VISIBLE_DEVICES": "3,2"}, {"HIP_VISIBLE_DEVICES": "2"}),
        ({"CUDA_VISIBLE_DEVICES": "3,2"}, {"CUDA_VISIBLE_DEVICES": "2"}),
        ({"ROCR_VISIBLE_DEVICES": "3,2"}, {"ROCR_VISIBLE_DEVICES": "3,2", "HIP_VISIBLE_DEVICES": "1"}),
        (
            {"ROCR_VISIBLE_DEVICES": "3,2,1", "HIP_VISIBLE_DEVICES": "2,0"},
            {"ROCR_VISIBLE_DEVICES": "3,2,1", "HIP_VISIBLE_DEVICES": "0"},
        ),
        (
            {"HIP_VISIBLE_DEVICES": "3,2", "CUDA_VISIBLE_DEVICES": "3,2"},
            {"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "2"},
        ),
        (
            {"HIP_VISIBLE_DEVICES": "3,2", "CUDA_VISIBLE_DEVICES": "0,1"},
            {"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0,1"},
        ),
    ],
)
def test_amd_gpus(machine, torch_build, monkeypatch, variables, expected):
    torch_build("hip")
    machine.add_amd_gpus([0, 0, 1, 1])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert device_variables(machine)[1] == expected


def test_a_torch_for_cpus_leaves_the_kind_of_gpus_to_the_machine(machine, torch_build):
    """Ranks may use another library than torch."""
    torch_build("cpu")
    machine.add_amd_gpus([0, 0])
    assert device_variables(machine)[1] == {"HIP_VISIBLE_DEVICES": "1"}
    machine.add_nvidia_gpus([0, 0])
    assert device_variables(machine)[1] == {"CUDA_VISIBLE_DEVICES": "1"}


def test_rocr_lists_fewer_gpus_than_ranks(machine, torch_build, monkeypatch):
    torch_build("hip")
    machine.add_amd_gpus([0, 0])
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,1")
    text = r"only 1 GPU .*\(the environment has HIP_VISIBLE_DEVICES='0,1', ROCR_VISIBLE_DEVICES='1'\)"
    with pytest.raises(ValueError, match=text):
        build(machine, placement=Placement(gpus="own"))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ZE_AFFINITY_MASK": "2, 3"}, {"ZE_AFFINITY_MASK": "3"}),
        ({"ZE_AFFINITY_MASK": "0.0,0.1"}, {"ZE_AFFINITY_MASK": "0.1"}),
        (
            {"ZE_AFFINITY_MASK": "2,3", "ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"},
            {"ZE_AFFINITY_MASK": "3", "ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"},
        ),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:4,5"}, {"ONEAPI_DEVICE_SELECTOR": "level_zero:5"}),
        (
            {"ZE_AFFINITY_MASK": "2,3", "ONEAPI_DEVICE_SELECTOR": "level_zero:1,0"},
            {"ZE_AFFINITY_MASK": "2,3", "ONEAPI_DEVICE_SELECTOR": "level_zero:0"},
        ),
    ],
)
def test_intel_gpus_that_the_caller_lists(machine, torch_build, monkeypatch, variables, expected):
    torch_build("xpu")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert device_variables(machine)[1] == expected


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "cannot count the GPUs here; set ZE_AFFINITY_MASK to a list such as '0,1'"),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:0.1"}, "here, with ONEAPI_DEVICE_SELECTOR='level_zero:0.1'; set ZE_AFF"),
        ({"ZE_AFFINITY_MASK": "0,1", "ONEAPI_DEVICE_SELECTOR": "!level_zero:0"}, "cannot count the GPUs here, with ONEAPI"),
        ({"ZE_AFFINITY_MASK": "0"}, "there is only 1 GPU"),
        ({"ZE_AFFINITY_MASK": ""}, "there is no GPU"),
    ],
)
def test_intel_gpus_that_the_caller_does_not_list(machine, torch_build, monkeypatch, variables, found):
    torch_build("xpu")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=found):
        build(machine, placement=Placement(gpus="own"))


# ---- the NUMA nodes of GPUs


def nodes_of(machine, ranks=8, **env):
    return find_gpu_nodes(find_visible_devices(env, {"cuda"}, machine.root), ranks)


def test_the_numa_nodes_of_eight_gpus(machine):
    machine.add_nvidia_gpus([0, 0, 0, 0, 1, 1, 1, 1])
    assert nodes_of(machine) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert nodes_of(machine, 4, CUDA_VISIBLE_DEVICES="4,1,5,0") == [1, 0, 1, 0]
    assert nodes_of(machine, 2, CUDA_VISIBLE_DEVICES=f"{UUIDS[6]},{UUIDS[2]}") == [1, 0]
    assert nodes_of(machine, 2, CUDA_VISIBLE_DEVICES="gpu-7777,GPU-0000") == [None, None]  # CUDA ignores the first one
    assert nodes_of(machine, 2, CUDA_VISIBLE_DEVICES="GPU-7777,GPU-0000") == [1, 0]
    assert nodes_of(machine, 4, CUDA_VISIBLE_DEVICES="5") == [1] * 4
    assert nodes_of(machine, 3, CUDA_VISIBLE_DEVICES="0,4") == [0, 1, 0]


def test_numa_nodes_that_are_not_known(machine):
    machine.add_nvidia_gpus([0, -1])
    assert nodes_of(machine, 2) == [0, None]
    assert nodes_of(machine, 2, CUDA_VISIBLE_DEVICES="") == [None, None]
    assert nodes_of(machine, 2, CUDA_VISIBLE_DEVICES="GPU-,GPU-9") == [None, None]  # ambiguous, and unknown
    assert nodes_of(machine, 2, CUDA_VISIBLE_DEVICES=f"{MIG},MIG-{UUIDS[0]}/1/0") == [None, 0]


def test_the_order_of_different_models_is_known_only_if_cuda_sorts_by_address(machine):
    machine.add_nvidia_gpu("0000:05:00.0", 0, node=0).add_nvidia_gpu("0000:85:00.0", 1, node=1, model="NVIDIA T4")
    assert nodes_of(machine, 2) == [None, None]
    assert nodes_of(machine, 2, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [0, 1]
    assert nodes_of(machine, 2, CUDA_VISIBLE_DEVICES="GPU-1111,GPU-0000") == [1, 0]


def test_the_numa_nodes_of_amd_gpus(machine):
    machine.add_amd_gpus([0, 0, 1, 1])

    def nodes(**env):
        return find_gpu_nodes(find_visible_devices(env, {"hip"}, machine.root), 2)

    assert nodes() == [0, 0]
    assert nodes(HIP_VISIBLE_DEVICES="3,0") == [1, 0]
    assert nodes(ROCR_VISIBLE_DEVICES="2,0") == [1, 0]
    assert nodes(ROCR_VISIBLE_DEVICES="2,0", HIP_VISIBLE_DEVICES="1,0") == [0, 1]
    assert nodes(ROCR_VISIBLE_DEVICES="GPU-0000000000000004,1") == [1, 1]


@pytest.fixture
def two_nodes(machine, torch_build):
    """A machine with the CPUs of this one, of which the first is in NUMA node 0 and the others are in node 1. It has 4 GPUs."""
    if len(ALLOWED) < 2:
        pytest.skip("it needs two CPUs")
    torch_build("cuda")
    for cpu in ALLOWED:
        machine.add_cpu(cpu)
    machine.add_node(0, ALLOWED[0]).add_node(1, ",".join(map(str, ALLOWED[1:])))
    return machine.add_nvidia_gpus([1, 1, 0, 0])


def cpus_of(setups):
    return [sorted(setup.cpus) for setup in setups]


def test_ranks_are_bound_to_the_numa_nodes_of_their_gpus(two_nodes, monkeypatch):
    first, others = ALLOWED[:1], ALLOWED[1:]
    assert cpus_of(build(two_nodes, 4, placement="numa")) == [others, others, first, first]
    assert cpus_of(build(two_nodes, 4, placement=Placement("numa", gpus="own"))) == [others, others, first, first]
    assert cpus_of(build(two_nodes, 4, [2], placement=Placement("numa", gpus="own"))) == [first]  # it is restarted alone
    one_for_each = {"env": lambda worker: {"CUDA_VISIBLE_DEVICES": str(3 - worker.local_rank)}}
    assert cpus_of(build(two_nodes, 4, placement="numa", **one_for_each)) == [first, first, others, others]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0")
    assert cpus_of(build(two_nodes, 2, placement=Placement("numa", gpus="own"))) == [first, others]


def threads_of(setups):
    return [(int(setup.env["OMP_NUM_THREADS"]), int(setup.env["TORCHINDUCTOR_COMPILE_THREADS"])) for setup in setups]


@pytest.fixture
def quota(monkeypatch):
    """Set the quota of CPU time of this process, in CPUs. Without a call there is none."""

    def set_quota(cpus):
        for module in ("mpwatch.watcher.processes.rank_environment", "mpwatch.os_support.hardware"):
            monkeypatch.setattr(f"{module}.read_cpu_quota", lambda: cpus)

    set_quota(None)
    return set_quota


def test_threads_follow_the_cpus_of_the_rank(two_nodes, quota):
    count = len(ALLOWED)
    share = max(1, (count - 1) // 2)  # two ranks share a NUMA node
    assert threads_of(build(two_nodes, 4, placement="numa")) == [(share, share)] * 2 + [(1, 1)] * 2
    assert threads_of(build(two_nodes, 1, placement="cores")) == [(count, count)]
    assert threads_of(build(two_nodes, 2, placement=lambda worker: ALLOWED)) == [(count, count)] * 2
    assert threads_of(build(two_nodes, 2)) == [(count // 2, count // 2)] * 2  # as without `bind`


def test_threads_are_on_cores_and_compilers_on_cpus(machine, quota):
    machine.add_cpu(ALLOWED[0], siblings=",".join(map(str, ALLOWED)))
    for cpu in ALLOWED[1:]:
        machine.add_cpu(cpu, siblings=",".join(map(str, ALLOWED)))
    assert threads_of(build(machine, 1, placement="cores")) == [(1, len(ALLOWED))]


def test_a_quota_limits_threads(two_nodes, quota):
    quota(1)
    assert threads_of(build(two_nodes, 1, placement="cores")) == [(1, 1)]
    quota(3)
    assert threads_of(build(two_nodes, 2, placement=lambda worker: ALLOWED)) == [(1, 1)] * 2


def test_values_of_the_user_are_kept(two_nodes, monkeypatch):
    env = {"OMP_NUM_THREADS": "9", "TORCHINDUCTOR_COMPILE_THREADS": "8"}
    assert threads_of(build(two_nodes, placement="numa", env=env)) == [(9, 8)] * 2
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert threads_of(build(two_nodes, placement="cores")) == threads_of(build(two_nodes)) == [(9, 8)] * 2


def test_at_most_32_compilers(machine, monkeypatch, quota):
    monkeypatch.setattr("mpwatch.watcher.processes.rank_environment.count_usable_cpus", lambda: 200)
    assert [threads_of(build(machine, ranks))[0] for ranks in (1, 4, 8)] == [(200, 32), (50, 32), (25, 25)]

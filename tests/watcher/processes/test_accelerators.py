"""Tests of ACCELERATE_USE_CPU: a rank gets it if torch's files and the device files show that there is no accelerator."""

import pytest

from mpwatch import WorkerSpec
from mpwatch.watcher.processes.rank_environment import build_rank_setups, build_workers

CPU_BUILD = "cuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = None\n"
CUDA_BUILD = CPU_BUILD.replace("cuda: Optional[str] = None", "cuda: Optional[str] = '13.0'")
HIP_BUILD = CPU_BUILD.replace("hip: Optional[str] = None", "hip: Optional[str] = '7.1.25424'")
XPU_BUILD = CPU_BUILD.replace("xpu: Optional[str] = None", "xpu: Optional[str] = '20250301'")
OLD_CUDA_BUILD = "cuda = '12.1'\nhip = None\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Make a machine with this build of torch, this number of GPUs and these packages."""

    def make(build, gpus=0, packages=()):
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr("mpwatch.os_support.hardware.GPU_DEVICE_FILES", (f"{tmp_path}/nvidia[0-9]*",))
        for name in ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        for name in ("torch", *packages):
            tmp_path.joinpath(name).mkdir()
            tmp_path.joinpath(name, "__init__.py").touch()
        tmp_path.joinpath("torch", "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{build}")
        for gpu in range(gpus):
            tmp_path.joinpath(f"nvidia{gpu}").touch()

    return make


def use_cpu(nprocs=2, env=None):
    """Return ACCELERATE_USE_CPU of each rank."""
    spec = WorkerSpec(fn=print, nprocs=nprocs, env=env)
    setups = build_rank_setups(spec, build_workers(spec, range(nprocs), 29500, run_id="test", restart_count=0))
    return [setup.env.get("ACCELERATE_USE_CPU") for setup in setups]


@pytest.mark.parametrize("build", [CPU_BUILD, CUDA_BUILD, HIP_BUILD, OLD_CUDA_BUILD], ids=["cpu", "cuda", "hip", "old cuda"])
def test_ranks_use_cpus_on_a_machine_without_gpus(machine, build):
    machine(build)
    assert use_cpu() == ["true", "true"]


@pytest.mark.parametrize("build", [CUDA_BUILD, HIP_BUILD, OLD_CUDA_BUILD], ids=["cuda", "hip", "old cuda"])
def test_ranks_may_use_gpus_on_a_machine_with_gpus(machine, build):
    machine(build, gpus=2)
    assert use_cpu() == [None, None]
    assert use_cpu(env={"CUDA_VISIBLE_DEVICES": "1,0"}) == [None, None]
    assert use_cpu(env={"CUDA_VISIBLE_DEVICES": "GPU-f1d5"}) == [None, None]


def test_a_cpu_build_of_torch_uses_no_gpus(machine):
    machine(CPU_BUILD, gpus=2)
    assert use_cpu() == ["true", "true"]


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_ranks_use_cpus_if_all_gpus_are_hidden(machine, monkeypatch, hidden):
    machine(CUDA_BUILD, gpus=2)
    assert use_cpu(env={"CUDA_VISIBLE_DEVICES": hidden}) == ["true", "true"]
    assert use_cpu(env=lambda worker: {"HIP_VISIBLE_DEVICES": hidden if worker.rank else "0"}) == [None, "true"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert use_cpu() == ["true", "true"]


def test_ranks_may_use_other_accelerators(machine):
    machine(XPU_BUILD)
    assert use_cpu() == [None, None]


def test_a_cpu_build_of_torch_may_use_the_devices_of_a_plugin(machine):
    machine(CPU_BUILD, packages=("torch_npu",))
    assert use_cpu(env={"CUDA_VISIBLE_DEVICES": ""}) == [None, None]


def test_a_value_of_the_user_is_kept(machine, monkeypatch):
    machine(CPU_BUILD)
    assert use_cpu(env={"ACCELERATE_USE_CPU": "no"}) == ["no", "no"]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "0")
    assert use_cpu() == ["0", "0"]


def test_a_single_rank_gets_no_value(machine):
    machine(CPU_BUILD)
    assert use_cpu(nprocs=1) == [None]


def test_a_version_file_that_is_not_utf8_is_read(machine, tmp_path):
    machine(CPU_BUILD, gpus=2)
    with tmp_path.joinpath("torch", "version.py").open("ab") as file:
        file.write(b"# \xff\n")
    assert use_cpu() == ["true", "true"]


def test_a_torch_without_a_version_file_may_use_gpus(machine, tmp_path):
    machine("", gpus=1)
    tmp_path.joinpath("torch", "version.py").unlink()
    assert use_cpu() == [None, None]
    tmp_path.joinpath("nvidia0").unlink()
    assert use_cpu() == ["true", "true"]

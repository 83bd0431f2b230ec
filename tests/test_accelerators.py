"""When ranks are told to use CPUs: where torch can find nothing else, told by its files and the nodes of devices."""

import pytest

from mpwatch import WorkerSpec
from mpwatch.watcher.processes.rank_environment import environments_of, workers_here

CPU_BUILD = "cuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = None\n"
CUDA_BUILD = CPU_BUILD.replace("cuda: Optional[str] = None", "cuda: Optional[str] = '13.0'")
HIP_BUILD = CPU_BUILD.replace("hip: Optional[str] = None", "hip: Optional[str] = '7.1.25424'")
XPU_BUILD = CPU_BUILD.replace("xpu: Optional[str] = None", "xpu: Optional[str] = '20250301'")
OLD_CUDA_BUILD = "cuda = '12.1'\nhip = None\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """One that has such a torch, so many GPUs, and these packages."""

    def make(build, gpus=0, packages=()):
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr("mpwatch.os_support.hardware.GPU_NODES", (f"{tmp_path}/nvidia[0-9]*",))
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
    """What accelerate finds in each rank."""
    spec = WorkerSpec(fn=print, nprocs=nprocs, env=env)
    places = environments_of(spec, workers_here(spec, range(nprocs), 29500, run_id="test", restart_count=0))
    return [env.get("ACCELERATE_USE_CPU") for _, env in places]


@pytest.mark.parametrize("build", [CPU_BUILD, CUDA_BUILD, HIP_BUILD, OLD_CUDA_BUILD], ids=["cpu", "cuda", "hip", "old cuda"])
def test_there_are_no_gpus(machine, build):
    machine(build)
    assert use_cpu() == ["true", "true"]


@pytest.mark.parametrize("build", [CUDA_BUILD, HIP_BUILD, OLD_CUDA_BUILD], ids=["cuda", "hip", "old cuda"])
def test_there_are_gpus(machine, build):
    machine(build, gpus=2)
    assert use_cpu() == [None, None]
    assert use_cpu(env={"CUDA_VISIBLE_DEVICES": "1,0"}) == [None, None]
    assert use_cpu(env={"CUDA_VISIBLE_DEVICES": "GPU-f1d5"}) == [None, None]


def test_a_torch_for_cpus_does_not_see_gpus(machine):
    machine(CPU_BUILD, gpus=2)
    assert use_cpu() == ["true", "true"]


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_gpus_may_be_hidden(machine, monkeypatch, hidden):
    machine(CUDA_BUILD, gpus=2)
    assert use_cpu(env={"CUDA_VISIBLE_DEVICES": hidden}) == ["true", "true"]
    assert use_cpu(env=lambda worker: {"HIP_VISIBLE_DEVICES": hidden if worker.rank else "0"}) == [None, "true"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert use_cpu() == ["true", "true"]


def test_other_accelerators_are_not_kept_from_being_used(machine):
    machine(XPU_BUILD)
    assert use_cpu() == [None, None]


def test_a_torch_for_cpus_may_have_a_plugin(machine):
    machine(CPU_BUILD, packages=("torch_npu",))
    assert use_cpu(env={"CUDA_VISIBLE_DEVICES": ""}) == [None, None]


def test_what_the_user_has_set_stays(machine, monkeypatch):
    machine(CPU_BUILD)
    assert use_cpu(env={"ACCELERATE_USE_CPU": "no"}) == ["no", "no"]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "0")
    assert use_cpu() == ["0", "0"]


def test_a_single_rank_is_left_to_itself(machine):
    machine(CPU_BUILD)
    assert use_cpu(nprocs=1) == [None]


def test_a_torch_whose_version_is_in_odd_bytes_is_read(machine, tmp_path):
    machine(CPU_BUILD, gpus=2)
    with tmp_path.joinpath("torch", "version.py").open("ab") as file:
        file.write(b"# \xff\n")
    assert use_cpu() == ["true", "true"]


def test_a_torch_that_does_not_say_may_use_gpus(machine, tmp_path):
    machine("", gpus=1)
    tmp_path.joinpath("torch", "version.py").unlink()
    assert use_cpu() == [None, None]
    tmp_path.joinpath("nvidia0").unlink()
    assert use_cpu() == ["true", "true"]

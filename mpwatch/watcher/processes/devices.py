"""Finds accelerators, and the GPUs that a rank can see, and limits a rank to one of them. Runs in the watcher.

No GPU is initialised, and torch is not imported, since that takes a second: files say what there is. If no accelerator is
found, torch can use none; but some are found that torch cannot use, such as an NVIDIA GPU if torch is built for ROCm. The
GPU of a Mac does not count, because no backend of torch.distributed supports it.

The driver of each vendor reads a variable that lists the devices to use:

    torch is built for   variable
    CUDA                 CUDA_VISIBLE_DEVICES: numbers, names of GPUs (GPU-...) or of parts of GPUs (MIG-...)
    ROCm                 HIP_VISIBLE_DEVICES; without it CUDA_VISIBLE_DEVICES
    XPU (Intel)          ZE_AFFINITY_MASK; without it nobody can count the GPUs without loading the driver
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from glob import glob
from importlib.machinery import PathFinder
from itertools import takewhile
from typing import NamedTuple

from mpwatch.options.worker_info import Worker
from mpwatch.os_support.hardware import may_have_gpus
from mpwatch.results.texts import format_count

CUDA, HIP, LEVEL_ZERO = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"
DEVICE_VARIABLES = frozenset({CUDA, HIP, LEVEL_ZERO})
# Packages that add devices to a torch built for CPUs: Cambricon, Gaudi, Moore Threads, Ascend, Tecorigin, Trainium, TPU.
DEVICE_PLUGINS = ("torch_mlu", "habana_frameworks", "torch_musa", "torch_npu", "torch_sdaa", "torch_neuronx", "torch_xla")
# A line of torch/version.py whose value is not None.
GPU_BUILD = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*= *['\"]", re.MULTILINE)
# torch ends the list of devices at an entry that is neither a device's number nor its name. So "", "-1" and "NoDevFiles"
# hide all devices.
DEVICE_ENTRY = re.compile(r"\s*(\d|GPU-|MIG-)")


def find_torch_accelerators() -> set[str]:
    """Return the kinds of accelerators ("gpu", "other") that the installed torch supports and that this machine may have."""
    builds = read_torch_builds()
    found = {"gpu"} if builds - {"xpu"} and may_have_gpus() else set()
    return found | ({"other"} if "xpu" in builds or any(map(PathFinder.find_spec, DEVICE_PLUGINS)) else set())


def is_cpu_only(found: set[str], env: Mapping[str, str]) -> bool:
    """Return whether a process can use only CPUs: no accelerator was found, or `env` hides all accelerators."""
    are_gpus_visible = all(DEVICE_ENTRY.match(env[name]) for name in (CUDA, HIP) if name in env)
    return not found or (found == {"gpu"} and not are_gpus_visible)


def read_torch_builds() -> set[str]:
    """Return the kinds of GPU that the installed torch was built for. Return {"cuda"} if torch/version.py is unreadable."""
    spec = PathFinder.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        try:
            with open(os.path.join(folder, "version.py"), encoding="utf-8", errors="replace") as file:
                return set(GPU_BUILD.findall(file.read()))
        except OSError:  # torch was installed in an unusual way
            continue
    return {"cuda"}


class Gpu(NamedTuple):
    uuid: str = ""
    """Its name for CUDA_VISIBLE_DEVICES, such as "GPU-8a5b...", if it is known."""
    node: int | None = None
    """The NUMA node, if it is known."""


class VisibleDevices(NamedTuple):
    variable: str
    """It has the list."""
    entries: Sequence[str]
    """For each device, the value of this variable that shows only this device."""
    nodes: Sequence[int | None]
    """The NUMA node of each device, if it is known."""


def find_visible_devices(env: Mapping[str, str], builds: Iterable[str], root: str = "/") -> VisibleDevices:
    """Return the GPUs that a process with this environment can see. `builds` is what the installed torch is built for:
    "cuda", "hip" or "xpu".
    """
    gpus: Sequence[Gpu] = ()
    if "xpu" in builds:
        variable = LEVEL_ZERO
    elif "hip" in builds:
        variable = CUDA if CUDA in env and HIP not in env else HIP
        gpus = list_amd_gpus(root)
    else:
        variable, gpus = CUDA, list_nvidia_gpus(root)
    if variable in env:
        entries = list(takewhile(DEVICE_ENTRY.match, map(str.strip, env[variable].split(","))))
    else:
        entries = [str(number) for number in range(len(gpus))]
    return VisibleDevices(variable, entries, [_find_node(entry, gpus) for entry in entries])


def select_own_device(devices: VisibleDevices, worker: Worker, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that limits a rank to its device. Raises ValueError if there are too few."""
    ranks, count, variable = worker.local_world_size, len(devices.entries), devices.variable
    if count < ranks:
        number = f"there {'is' if count == 1 else 'are'} only {format_count(count, 'GPU')}" if count else "there is no GPU"
        found = f" (the environment has {variable}={env[variable]!r})" if variable in env else ""
        use = f"use nprocs={count} at most" if count else f"set {variable} to a list such as '0,1'"
        raise ValueError(
            f"Placement(gpus='own') needs {format_count(ranks, 'GPU')}, one for each rank of this machine, but {number} that"
            f" the ranks can see{found}; {use}, or leave gpus out"
        )
    return {variable: devices.entries[worker.local_rank]}


def find_gpu_nodes(devices: VisibleDevices, ranks: int) -> list[int | None]:
    """Return the NUMA node of each rank's GPU. If there are too few GPUs, several ranks use the same GPU."""
    nodes = devices.nodes or [None]
    return [nodes[rank % len(nodes)] for rank in range(ranks)]


def list_nvidia_gpus(root: str = "/") -> list[Gpu]:
    """Return the NVIDIA GPUs in the order of their PCI addresses, or without names if the driver does not describe them."""
    gpus = []
    for folder in sorted(glob(os.path.join(root, "proc/driver/nvidia/gpus/*"))):
        fields = _read_fields(f"{folder}/information", ":")
        if _may_use(os.path.join(root, f"dev/nvidia{fields.get('Device Minor', '')}")):
            address = os.path.basename(folder).lower()
            gpus.append(Gpu(fields.get("GPU UUID", ""), _read_node(os.path.join(root, "sys/bus/pci/devices", address))))
    return gpus or [Gpu() for file in glob(os.path.join(root, "dev/nvidia[0-9]*")) if _may_use(file)]


def list_amd_gpus(root: str = "/") -> list[Gpu]:
    """Return the GPUs of ROCm, in its order. A CPU has no SIMD units in these files."""
    files = glob(os.path.join(root, "sys/class/kfd/kfd/topology/nodes/*/properties"))
    properties = [_read_fields(file, " ") for file in sorted(files, key=lambda file: int(file.split("/")[-2]))]
    names = [f"renderD{fields.get('drm_render_minor')}" for fields in properties if fields.get("simd_count", "0") != "0"]
    usable = [name for name in names if _may_use(os.path.join(root, "dev/dri", name))]
    return [Gpu(node=_read_node(os.path.join(root, "sys/class/drm", name, "device"))) for name in usable]


def _find_node(entry: str, gpus: Sequence[Gpu]) -> int | None:
    named = (gpu.node for number, gpu in enumerate(gpus) if entry == str(number) or gpu.uuid.startswith(entry))
    return next(named, None)


def _may_use(device_file: str) -> bool:
    # A container often has the driver's files of all GPUs, but the device files of only some; cgroups can forbid them, too.
    return os.access(device_file, os.R_OK | os.W_OK)


def _read_node(device_folder: str) -> int | None:
    with suppress(OSError, ValueError), open(os.path.join(device_folder, "numa_node")) as text:
        node = int(text.read())
        return node if node >= 0 else None  # it is -1 if the firmware does not name the node
    return None


def _read_fields(file: str, separator: str) -> dict[str, str]:
    with suppress(OSError), open(file, encoding="utf-8", errors="replace") as text:
        pairs = [line.partition(separator) for line in text]
        return {name.strip(): value.strip() for name, _, value in pairs}
    return {}

"""Finds the GPUs that a rank can see, and limits a rank to one of these GPUs. Runs in the watcher.

The driver of each vendor reads variables that list the devices to use:

    torch is built for   variables
    CUDA                 CUDA_VISIBLE_DEVICES: numbers, names of GPUs (GPU-...) or of parts of GPUs (MIG-...)
    ROCm                 ROCR_VISIBLE_DEVICES, and among those HIP_VISIBLE_DEVICES; without it CUDA_VISIBLE_DEVICES
    XPU (Intel)          ZE_AFFINITY_MASK, and among those ONEAPI_DEVICE_SELECTOR

For example, if ROCR_VISIBLE_DEVICES is "2,3" and HIP_VISIBLE_DEVICES is "0", a process sees only GPU 2. The driver first
applies ROCR_VISIBLE_DEVICES, and then HIP_VISIBLE_DEVICES. To limit a rank to one GPU, mpwatch changes only the variable
that the driver applies last. If the user has set no list of devices, mpwatch sets CUDA_VISIBLE_DEVICES (for CUDA) or
HIP_VISIBLE_DEVICES (for ROCm). mpwatch cannot count the GPUs of Intel without loading the driver library Level Zero. So for
these GPUs, the user must set a list of devices.

This module initialises no GPU, because it reads only environment variables and files of the drivers (os_support/gpus.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mpwatch.options.worker_info import Worker
from mpwatch.os_support.gpus import Gpu, list_amd_gpus, list_nvidia_gpus, may_have_unlisted_gpus
from mpwatch.results.report import format_count

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
LEVEL_ZERO, SYCL = "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"
DEVICE_VARIABLES = frozenset({CUDA, HIP, ROCR, LEVEL_ZERO, SYCL})
NAME_PREFIXES = ("GPU-", "MIG-")
LEVEL_ZERO_LIST = re.compile(r"level_zero:(\d+(?:,\d+)*)", re.IGNORECASE)


class VisibleDevices(NamedTuple):
    """The GPUs that a process with a certain environment can see, in the order of their numbers."""

    variables: tuple[str, ...]
    """The variables that have the list. There are several if the caller has set all of them to the same value."""
    entries: Sequence[str] = ()
    """For each device, the value of these variables that shows only this device."""
    gpus: Sequence[Gpu | None] = ()
    """The same devices as Gpu objects. None stands for an unknown device."""
    are_unknown: bool = False
    """There may be devices, but they cannot be counted without initialising them."""


def find_visible_devices(env: Mapping[str, str], builds: Iterable[str], root: str = "/") -> VisibleDevices:
    """Return the GPUs that a process with this environment can see.

    Args:
        env: the environment.
        builds: the kinds of GPU that the installed torch is built for: "cuda", "hip" or "xpu". If it is empty, the GPUs of
            this machine decide.
        root: the folder that has `dev`, `proc` and `sys`.
    """
    if "xpu" in builds:
        return _find_intel_devices(env)
    amd = list_amd_gpus(root) if "cuda" not in builds else []
    if "hip" in builds or (amd and not list_nvidia_gpus(root)):
        return _find_amd_devices(env, amd)
    return _find_nvidia_devices(env, list_nvidia_gpus(root), may_be_more=may_have_unlisted_gpus(root))


def select_own_device(devices: VisibleDevices, worker: Worker, env: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that limit a rank to one GPU. For example, local rank 1 sees the second GPU.

    Args:
        devices: the GPUs that the rank can see without these variables.
        worker: the rank.
        env: the environment from which `devices` were found.

    Raises:
        ValueError: there are fewer GPUs than ranks on this machine, or the number of GPUs is unknown.
    """
    ranks, count = worker.local_world_size, len(devices.entries)
    need = f"Placement(gpus='own') needs {format_count(ranks, 'GPU')}, one for each rank of this machine"
    settings = ", ".join(f"{name}={env[name]!r}" for name in sorted(DEVICE_VARIABLES) if name in env)
    if devices.are_unknown:
        name = devices.variables[0]
        found = f", with {settings}" if settings else ""
        raise ValueError(f"{need}, but mpwatch cannot count the GPUs here{found}; set {name} to a list such as '0,1'")
    if count < ranks:
        number = f"there {'is' if count == 1 else 'are'} only {format_count(count, 'GPU')}" if count else "there is no GPU"
        found = f" (the environment has {settings})" if settings else ""
        advice = f"use nprocs={count} at most, or leave gpus out" if count else "leave gpus out"
        raise ValueError(f"{need}, but {number} that the ranks can see{found}; {advice}")
    return dict.fromkeys(devices.variables, devices.entries[worker.local_rank])


def find_gpu_nodes(devices: VisibleDevices, ranks: int) -> list[int | None]:
    """Return a list with the NUMA node of each rank's GPU. If there are too few GPUs, several ranks use the same GPU."""
    gpus = devices.gpus or [None]
    return [gpu.node if (gpu := gpus[rank % len(gpus)]) is not None else None for rank in range(ranks)]


def _find_nvidia_devices(env: Mapping[str, str], gpus: list[Gpu], *, may_be_more: bool) -> VisibleDevices:
    # By default CUDA puts the fastest GPU first. The order of PCI addresses is certain only for GPUs of one model.
    is_order_known = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.model for gpu in gpus}) == 1
    numbered: list[Gpu | None] = [gpu if is_order_known else None for gpu in gpus]
    if CUDA not in env:
        return VisibleDevices((CUDA,), _count_up(numbered), numbered, are_unknown=may_be_more and not gpus)
    if not gpus and not may_be_more:
        return VisibleDevices((CUDA,))
    entries = _parse_list(env[CUDA], len(gpus) or None)
    return VisibleDevices((CUDA,), entries, [_resolve(entry, numbered, gpus) for entry in entries])


def _find_amd_devices(env: Mapping[str, str], gpus: Sequence[Gpu]) -> VisibleDevices:
    if not gpus:
        return VisibleDevices((HIP,))
    numbered: list[Gpu | None] = list(gpus)
    if ROCR in env:
        numbered = [_resolve(entry, numbered, gpus) for entry in _parse_list(env[ROCR], len(gpus))]
    names = [name for name in (HIP, CUDA) if name in env]
    if not names:
        return VisibleDevices((HIP,), _count_up(numbered), numbered)
    value = env[names[0]]
    entries = _parse_list(value, len(numbered))
    same = tuple(name for name in names if env[name] == value)
    return VisibleDevices(same, entries, [_resolve(entry, numbered, gpus) for entry in entries])


def _find_intel_devices(env: Mapping[str, str]) -> VisibleDevices:
    """Return the Intel GPUs that are listed in the caller's environment variables."""
    selector = env.get(SYCL, "")
    listed = LEVEL_ZERO_LIST.fullmatch(selector)
    if listed:
        entries = [f"level_zero:{number}" for number in listed[1].split(",")]
        return VisibleDevices((SYCL,), entries, [None] * len(entries))
    # Another selector with numbers, such as "level_zero:0.1": these count the devices that the mask has left.
    if LEVEL_ZERO not in env or re.search(r":.*\d", selector):
        return VisibleDevices((LEVEL_ZERO,), are_unknown=True)
    entries = [entry for entry in map(str.strip, env[LEVEL_ZERO].split(",")) if entry]
    return VisibleDevices((LEVEL_ZERO,), entries, [None] * len(entries))


def _count_up(devices: Sequence[object]) -> list[str]:
    return [str(number) for number in range(len(devices))]


def _parse_list(value: str, count: int | None) -> list[str]:
    """Split a list of devices into entries, in the same way as CUDA and ROCm. Return an empty list if two entries are equal.

    CUDA, ROCm and torch (`_parse_visible_devices` in torch/cuda) ignore a wrong entry and all entries after it.

    Args:
        value: the list.
        count: the number of devices, or None if it is unknown. A number that is not below `count` is a wrong entry.
    """
    prefix = next((prefix for prefix in NAME_PREFIXES if value.startswith(prefix)), None)
    entries: list[str] = []
    for text in value.split(","):
        number = re.match(r"\s*\+?(\d+)", text)
        if prefix is not None:
            entry = text if text.startswith(prefix) else None
        else:
            is_wrong = number is None or (count is not None and int(number[1]) >= count)
            entry = None if number is None or is_wrong else str(int(number[1]))
        if entry is None:
            break
        if entry in entries:
            return []
        entries.append(entry)
    return entries


def _resolve(entry: str, numbered: Sequence[Gpu | None], gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU that an entry such as "1" or "GPU-8f" stands for, or None if the GPU is unknown.

    For example, the entry "GPU-8f" means the GPU whose name begins with "GPU-8f".
    """
    if entry.isdecimal():
        return numbered[int(entry)] if int(entry) < len(numbered) else None
    # Older drivers name a part of a GPU MIG-GPU-<name of the GPU>/1/0. Today such a name says nothing about the GPU.
    name = entry.removeprefix("MIG-").partition("/")[0].lower()
    found = [gpu for gpu in gpus if name.startswith("gpu-") and gpu.uuid.lower().startswith(name)]
    return found[0] if len(found) == 1 else None

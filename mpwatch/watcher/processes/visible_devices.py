"""Finds the GPUs that a rank can see, and limits a rank to one of them. Runs in the watcher, and initialises no GPU.

The driver of each vendor reads variables that list the devices to use, and files of the driver say which devices there are:

    torch is built for   variables
    CUDA                 CUDA_VISIBLE_DEVICES: numbers, names of GPUs (GPU-...) or of parts of GPUs (MIG-...)
    ROCm                 ROCR_VISIBLE_DEVICES, and among those HIP_VISIBLE_DEVICES; without it CUDA_VISIBLE_DEVICES
    XPU (Intel)          ZE_AFFINITY_MASK; without it nobody can count the GPUs without loading the driver

To limit a rank to one GPU, mpwatch changes only the variable that the driver applies last.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from mpwatch.options.worker_info import Worker
from mpwatch.results.report import format_count

CUDA, HIP, ROCR, LEVEL_ZERO = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"
DEVICE_VARIABLES = frozenset({CUDA, HIP, ROCR, LEVEL_ZERO})
NAME_PREFIXES = ("GPU-", "MIG-")


class Gpu(NamedTuple):
    uuid: str = ""
    """Its name for CUDA_VISIBLE_DEVICES, such as "GPU-8a5b...", if it is known."""
    node: int | None = None
    """The NUMA node, if it is known."""


class VisibleDevices(NamedTuple):
    variables: tuple[str, ...]
    """They have the list."""
    entries: Sequence[str] = ()
    """For each device, the value of these variables that shows only this device."""
    nodes: Sequence[int | None] = ()
    """The NUMA node of each device, if it is known."""
    are_unknown: bool = False
    """There may be devices, but they cannot be counted without initialising them."""


def find_visible_devices(env: Mapping[str, str], builds: Iterable[str], root: str = "/") -> VisibleDevices:
    """Return the GPUs that a process with this environment can see. `builds` is what the installed torch is built for:
    "cuda", "hip" or "xpu". If it is empty, this machine decides.
    """
    if "xpu" in builds:
        entries = [entry for entry in map(str.strip, env.get(LEVEL_ZERO, "").split(",")) if entry]
        return VisibleDevices((LEVEL_ZERO,), entries, [None] * len(entries), are_unknown=LEVEL_ZERO not in env)
    nvidia, amd = list_nvidia_gpus(root), list_amd_gpus(root) if "cuda" not in builds else []
    if "hip" not in builds and (nvidia or not amd):
        # The Windows Subsystem for Linux has one device file for all GPUs.
        is_wsl = not nvidia and os.path.exists(os.path.join(root, "dev/dxg"))
        return _select((CUDA,), env, nvidia, are_unknown=is_wsl)
    if ROCR in env:
        amd = [_resolve(entry, amd) for entry in _parse_list(env[ROCR], len(amd))]
    return _select(tuple(name for name in (HIP, CUDA) if name in env) or (HIP,), env, amd)


def select_own_device(devices: VisibleDevices, worker: Worker, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that limit a rank to its device. Raises ValueError if there are too few, or nobody knows how
    many.
    """
    ranks, count = worker.local_world_size, len(devices.entries)
    need = f"Placement(gpus='own') needs {format_count(ranks, 'GPU')}, one for each rank of this machine"
    settings = ", ".join(f"{name}={env[name]!r}" for name in sorted(DEVICE_VARIABLES) if name in env)
    if devices.are_unknown:
        raise ValueError(
            f"{need}, but mpwatch cannot count the GPUs here; set {devices.variables[0]} to a list such as '0,1'"
        )
    if count < ranks:
        number = f"there {'is' if count == 1 else 'are'} only {format_count(count, 'GPU')}" if count else "there is no GPU"
        found = f" (the environment has {settings})" if settings else ""
        advice = f"use nprocs={count} at most, or leave gpus out" if count else "leave gpus out"
        raise ValueError(f"{need}, but {number} that the ranks can see{found}; {advice}")
    return dict.fromkeys(devices.variables, devices.entries[worker.local_rank])


def find_gpu_nodes(devices: VisibleDevices, ranks: int) -> list[int | None]:
    """Return the NUMA node of each rank's GPU. If there are too few GPUs, several ranks use the same GPU."""
    nodes = devices.nodes or [None]
    return [nodes[rank % len(nodes)] for rank in range(ranks)]


def list_nvidia_gpus(root: str = "/") -> list[Gpu]:
    """Return the NVIDIA GPUs in the order of their PCI addresses, and then those that the driver does not describe."""
    folder = os.path.join(root, "proc/driver/nvidia/gpus")
    gpus, described = [], set()
    for address in sorted(_list_folder(folder), key=lambda name: (len(name), name.lower())):
        fields = _read_fields(f"{folder}/{address}/information", ":")
        minor = fields.get("Device Minor", "")
        described.add(minor)
        if fields.get("GPU Excluded", "No") == "No" and _may_use(os.path.join(root, f"dev/nvidia{minor}")):
            gpus.append(Gpu(fields.get("GPU UUID", ""), _read_node(address.lower(), root)))
    names = (name for name in _list_folder(os.path.join(root, "dev")) if re.fullmatch(r"nvidia\d+", name))
    others = [name for name in names if name.removeprefix("nvidia") not in described]
    return gpus + [Gpu() for name in others if _may_use(os.path.join(root, "dev", name))]


def list_amd_gpus(root: str = "/") -> list[Gpu]:
    folder, gpus = os.path.join(root, "sys/class/kfd/kfd/topology/nodes"), []
    if not _may_use(os.path.join(root, "dev/kfd")):
        return []
    for number in sorted(filter(str.isdecimal, _list_folder(folder)), key=int):
        with suppress(ValueError):
            values = {name: int(text) for name, text in _read_fields(f"{folder}/{number}/properties", " ").items()}
            minor, location = values.get("drm_render_minor", 0), values.get("location_id", 0)
            is_usable = minor <= 0 or _may_use(os.path.join(root, f"dev/dri/renderD{minor}"))
            if values.get("simd_count", 0) > 0 and is_usable:  # a CPU has no SIMD units in this file
                bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 0x7
                node = _read_node(f"{values.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}", root)
                gpus.append(Gpu(f"GPU-{values.get('unique_id', 0):016x}", node))
    return gpus


def _select(
    variables: tuple[str, ...], env: Mapping[str, str], gpus: Sequence[Gpu], *, are_unknown: bool = False
) -> VisibleDevices:
    value = env.get(variables[0])
    if value is None:
        entries = [str(number) for number in range(len(gpus))]
    elif gpus or are_unknown:
        entries, are_unknown = _parse_list(value, len(gpus) or None), False
    else:
        entries = []
    return VisibleDevices(variables, entries, [_resolve(entry, gpus).node for entry in entries], are_unknown)


def _parse_list(value: str, count: int | None) -> list[str]:
    """Split a list of devices as CUDA, ROCm and torch do: a wrong entry ends the list, and a repeated one makes it empty."""
    prefix = next((prefix for prefix in NAME_PREFIXES if value.startswith(prefix)), None)
    entries: list[str] = []
    for text in value.split(","):
        number = re.match(r"\s*\+?(\d+)", text)
        if prefix is not None and text.startswith(prefix):
            entry = text
        elif prefix is None and number is not None and (count is None or int(number[1]) < count):
            entry = str(int(number[1]))
        else:
            break
        if entry in entries:
            return []
        entries.append(entry)
    return entries


def _resolve(entry: str, gpus: Sequence[Gpu]) -> Gpu:
    """Return the GPU that an entry stands for: its number, or the beginning of its name if no other has the same."""
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else Gpu()
    found = [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())]
    return found[0] if len(found) == 1 else Gpu()


def _may_use(device_file: str) -> bool:
    # A container often has the driver's files of all GPUs, but the device files of only some; cgroups can forbid them, too.
    return os.access(device_file, os.R_OK | os.W_OK)


def _read_node(address: str, root: str) -> int | None:
    with suppress(OSError, ValueError), open(os.path.join(root, f"sys/bus/pci/devices/{address}/numa_node")) as text:
        node = int(text.read())
        return node if node >= 0 else None  # it is -1 if the firmware does not name the node
    return None


def _list_folder(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _read_fields(file: str, separator: str) -> dict[str, str]:
    with suppress(OSError), open(file, encoding="utf-8", errors="replace") as text:
        pairs = [line.partition(separator) for line in text]
        return {name.strip(): value.strip() for name, _, value in pairs}
    return {}

"""Finds the GPUs that this process is allowed to use. This module needs neither CUDA nor ROCm, and runs in the watcher.

This module initialises no GPU and uses no GPU memory. A container often has the driver's files of all GPUs of the machine,
but the device files of only some of the GPUs. A batch system can forbid the use of a device file. For each GPU, this module
uses `os.access` to check whether this process may read and write the device file under /dev.
"""

import os
import re
from contextlib import suppress
from typing import NamedTuple

BUS_SHIFT, DEVICE_SHIFT = 8, 3  # the positions of the bus and the device in the number of a PCI location


class Gpu(NamedTuple):
    """A GPU that this process is allowed to use."""

    uuid: str = ""
    """The GPU's name for CUDA_VISIBLE_DEVICES, such as "GPU-8a5b...". It is empty if it is not known."""
    model: str = ""
    node: int | None = None
    """The NUMA node, or None if it is not known."""


def list_nvidia_gpus(root: str = "/") -> list[Gpu]:
    """Return the NVIDIA GPUs that this process may use, in the order of their PCI addresses.

    A GPU without a folder in /proc/driver/nvidia/gpus comes last in the list, and its UUID, model and NUMA node are unknown.
    """
    folder = os.path.join(root, "proc/driver/nvidia/gpus")
    gpus, described = [], set()
    for address in sorted(_list_folder(folder), key=lambda name: (len(name), name.lower())):
        fields = _read_fields(f"{folder}/{address}/information")
        minor = fields.get("Device Minor", "")
        described.add(minor)
        if fields.get("GPU Excluded", "No") == "No" and _may_use(os.path.join(root, f"dev/nvidia{minor}")):
            gpus.append(Gpu(fields.get("GPU UUID", ""), fields.get("Model", ""), _read_pci_node(address.lower(), root)))
    names = _list_folder(os.path.join(root, "dev"))
    minors = {name.removeprefix("nvidia") for name in names if re.fullmatch(r"nvidia\d+", name)}
    gpus += [Gpu() for minor in minors - described if _may_use(os.path.join(root, f"dev/nvidia{minor}"))]
    return gpus


def list_amd_gpus(root: str = "/") -> list[Gpu]:
    """Return the AMD GPUs that ROCm can use, in the order in which the driver numbers them."""
    if not _may_use(os.path.join(root, "dev/kfd")):
        return []
    folder = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    gpus = []
    for number in sorted(filter(str.isdecimal, _list_folder(folder)), key=int):
        fields = _read_fields(f"{folder}/{number}/properties", separator=" ")
        with suppress(ValueError):
            values = {name: int(value) for name, value in fields.items()}
            render_minor = values.get("drm_render_minor", 0)
            is_usable = render_minor <= 0 or _may_use(os.path.join(root, f"dev/dri/renderD{render_minor}"))
            if values.get("simd_count", 0) > 0 and is_usable:  # a CPU has no SIMD units in this file
                location = values.get("location_id", 0)
                bus, device, function = location >> BUS_SHIFT & 0xFF, location >> DEVICE_SHIFT & 0x1F, location & 0x7
                address = f"{values.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"
                uuid = f"GPU-{values['unique_id']:016x}" if values.get("unique_id") else ""
                gpus.append(Gpu(uuid, fields.get("gfx_target_version", ""), _read_pci_node(address, root)))
    return gpus


def may_have_unlisted_gpus(root: str = "/") -> bool:
    """Return whether this is the Windows Subsystem for Linux, which can have GPUs that this module cannot list."""
    return os.path.exists(os.path.join(root, "dev/dxg"))


def _may_use(device_file: str) -> bool:
    return os.access(device_file, os.R_OK | os.W_OK)


def _read_pci_node(address: str, root: str) -> int | None:
    with suppress(OSError, ValueError), open(os.path.join(root, f"sys/bus/pci/devices/{address}/numa_node")) as text:
        node = int(text.read())
        return node if node >= 0 else None  # it is -1 if the firmware does not name the node
    return None


def _list_folder(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read_fields(file: str, separator: str = ":") -> dict[str, str]:
    """Return a dict of the names and values in a file that has one name and one value on each line."""
    try:
        with open(file, encoding="utf-8", errors="replace") as text:
            pairs = [line.partition(separator) for line in text]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in pairs}

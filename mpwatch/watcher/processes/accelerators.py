"""Finds out whether a rank may have a GPU or another accelerator that torch supports. Runs in the watcher.

This module reads files and does not import torch, because the import takes a second. If this module finds no accelerator,
torch can use none. But this module also finds accelerators that torch cannot use, such as an NVIDIA GPU if torch is built
for ROCm. The GPU of a Mac does not count as an accelerator, because no backend of torch.distributed supports it.
"""

import os
import re
from collections.abc import Mapping
from importlib.machinery import PathFinder

from mpwatch.os_support.hardware import may_have_gpus

# Packages that add devices to a torch built for CPUs: Cambricon, Gaudi, Moore Threads, Ascend, Tecorigin, Trainium, TPU.
DEVICE_PLUGINS = ("torch_mlu", "habana_frameworks", "torch_musa", "torch_npu", "torch_sdaa", "torch_neuronx", "torch_xla")
# A line of torch/version.py whose value is not None.
GPU_BUILD = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*= *['\"]", re.MULTILINE)
# torch ends the list of devices at an entry that is neither a device's number nor its name. So "", "-1" and "NoDevFiles"
# hide all devices.
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
DEVICE_ENTRY = re.compile(r"\s*(\d|GPU-|MIG-)")


def find_torch_accelerators() -> set[str]:
    """Return the kinds of accelerators ("gpu", "other") that the installed torch supports and that this machine may have."""
    builds = read_torch_builds()
    found = {"gpu"} if builds - {"xpu"} and may_have_gpus() else set()
    return found | ({"other"} if "xpu" in builds or any(map(PathFinder.find_spec, DEVICE_PLUGINS)) else set())


def is_cpu_only(found: set[str], env: Mapping[str, str]) -> bool:
    """Return whether a process can use only CPUs: no accelerator was found, or `env` hides all accelerators."""
    are_gpus_visible = all(DEVICE_ENTRY.match(env[name]) for name in VISIBLE_DEVICES if name in env)
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

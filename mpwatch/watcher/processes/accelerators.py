"""Whether torch may find a GPU, or another accelerator, in a rank. Told without torch, whose import would take a second.

It errs on one side only: where it says that there is none, there is none. (The GPU of a Mac is not counted: no backend of
torch.distributed, and so none of accelerate's, knows it.)
"""

import os
import re
from collections.abc import Mapping
from importlib.machinery import PathFinder

from mpwatch.os_support.hardware import gpus_may_exist

# A torch that is built for CPUs gets devices from these: Cambricon, Gaudi, Moore Threads, Ascend, Tecorigin, Trainium, TPU.
PLUGINS = ("torch_mlu", "habana_frameworks", "torch_musa", "torch_npu", "torch_sdaa", "torch_neuronx", "torch_xla")
BUILD = re.compile(r"^(cuda|hip|xpu)\b[^=\n]*= *['\"]", re.MULTILINE)  # a line of torch/version.py that does not say None
# As torch reads them: what is neither a device's number nor its name ends the list, so "", "-1" and "NoDevFiles" hide all.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
A_DEVICE = re.compile(r"\s*(\d|GPU-|MIG-)")


def accelerators_of_torch() -> set[str]:
    """What there may be on this machine that the installed torch can use: "gpu", "other", both or nothing."""
    builds = _builds_of_torch()
    found = {"gpu"} if builds - {"xpu"} and gpus_may_exist() else set()
    return found | ({"other"} if "xpu" in builds or any(map(PathFinder.find_spec, PLUGINS)) else set())


def is_cpu_only(found: set[str], env: Mapping[str, str]) -> bool:
    """Whether a process with this environment can use none of these."""
    return not found or (found == {"gpu"} and not all(A_DEVICE.match(env[name]) for name in VISIBLE if name in env))


def _builds_of_torch() -> set[str]:
    """The kinds of GPU that the installed torch was built for; those of NVIDIA if nobody can tell."""
    spec = PathFinder.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        try:
            with open(os.path.join(folder, "version.py"), encoding="utf-8", errors="replace") as file:
                return set(BUILD.findall(file.read()))
        except OSError:  # an arrangement of its own
            continue
    return {"cuda"}

"""CPUs that this process may use, and whether the machine can have a GPU. Runs in the watcher."""

import os
import sys
from glob import glob

from mpwatch.os_support.cgroups import cpu_quota

# Each NVIDIA GPU has a node of the first kind, ROCm and WSL have one of the others. A container that may use a GPU shows it.
GPU_NODES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")


def usable_cpus() -> int:
    """Count the CPUs in this process's affinity, limited by the quota of its cgroup (v2), rounded up; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, cpu_quota() or allowed))


def gpus_may_exist() -> bool:
    """Return False where there can be no GPU, so that torch (a second to import) need not be asked."""
    return sys.platform != "linux" or any(glob(pattern) for pattern in GPU_NODES)

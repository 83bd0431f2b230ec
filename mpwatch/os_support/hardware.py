"""Counts the CPUs that this process may use, and finds out whether the machine can have a GPU. Runs in the watcher."""

import sys
from glob import glob

from mpwatch.os_support.cgroups import read_cpu_quota
from mpwatch.os_support.cpu_affinity import get_allowed_cpus

# Each NVIDIA GPU has a device file of the first kind; ROCm has /dev/kfd, WSL has /dev/dxg. A container that may use a GPU
# has its device file.
GPU_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")


def count_usable_cpus() -> int:
    """Count the CPUs in this process's affinity, limited by the quota of its cgroup (v2), rounded up; at least 1."""
    allowed = len(get_allowed_cpus())
    return max(1, min(allowed, read_cpu_quota() or allowed))


def may_have_gpus() -> bool:
    """Return False if the machine has no GPU for certain. The caller then need not import torch, which takes a second."""
    return sys.platform != "linux" or any(glob(pattern) for pattern in GPU_DEVICE_FILES)

"""What this machine has: CPUs that this process is allowed to use, and perhaps GPUs."""

import sys
from glob import glob

from mpwatch.os_support.cgroups import read_cpu_quota
from mpwatch.os_support.cpu_affinity import get_allowed_cpus

# Each NVIDIA GPU has a device file with the first pattern. ROCm has /dev/kfd, and WSL has /dev/dxg. If a container may use a
# GPU, it has the GPU's device file.
GPU_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")


def count_usable_cpus() -> int:
    allowed = len(get_allowed_cpus())
    return max(1, min(allowed, read_cpu_quota() or allowed))


def may_have_gpus() -> bool:
    return sys.platform != "linux" or any(glob(pattern) for pattern in GPU_DEVICE_FILES)

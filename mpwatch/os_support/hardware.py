"""The CPUs that this process may use, and how to bind ranks to them; and whether there may be GPUs. Runs in the watcher.

In Linux each thread has an affinity, the set of CPUs on which it may run. New threads and processes inherit it.
"""

import errno
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import glob

from mpwatch.os_support.cgroups import read_cpu_quota

# Each NVIDIA GPU has a device file with the first pattern. ROCm has /dev/kfd, and WSL has /dev/dxg. If a container may use a
# GPU, it has the GPU's device file.
GPU_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")


def count_usable_cpus() -> int:
    allowed = len(get_allowed_cpus())
    return max(1, min(allowed, read_cpu_quota() or allowed))


def may_have_gpus() -> bool:
    return sys.platform != "linux" or any(glob(pattern) for pattern in GPU_DEVICE_FILES)


def get_allowed_cpus() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else frozenset(range(os.cpu_count() or 1))


@contextmanager
def limit_thread_to(cpus: Collection[int] | None) -> Iterator[None]:
    """Within the block, this thread and the processes that it starts run only on `cpus`, if not None. Raises OSError."""
    if cpus is None:
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        raise OSError(errno.ENOTSUP, "this system cannot bind a process to CPUs; leave out the CPUs of placement")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise OSError(error.errno, f"it cannot run on {format_cpus(cpus)}: {error.strerror}") from error
    try:
        yield
    finally:
        # This fails if an administrator has removed all the earlier CPUs. Then the kernel has set another affinity.
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def format_cpus(cpus: Iterable[int]) -> str:
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    word = "CPU" if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else "CPUs"
    return f"{word} " + ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)

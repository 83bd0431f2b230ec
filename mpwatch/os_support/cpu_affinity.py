"""Gets and sets the CPUs on which this process may run. This module runs in the watcher.

In Linux each thread has an affinity, which is the set of CPUs on which it may run. New threads and processes inherit
the affinity of the thread that starts them.
"""

import errno
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress


def can_set_affinity() -> bool:
    return hasattr(os, "sched_setaffinity")


def get_allowed_cpus() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0)) if can_set_affinity() else frozenset(range(os.cpu_count() or 1))


@contextmanager
def limit_thread_to(cpus: Collection[int] | None) -> Iterator[None]:
    """Within the block, this thread and the processes that it starts run only on `cpus`, if not None. Raises OSError."""
    if cpus is None:
        yield
        return
    if not can_set_affinity():
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
    if not ranges:
        return "no CPU"
    word = "CPU" if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else "CPUs"
    return f"{word} " + ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)

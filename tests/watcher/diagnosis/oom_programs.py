"""Programs that use more memory than their cgroup has. A rank imports this module, so it imports little."""

import os
import subprocess
import sys

import mpwatch
from mpwatch.watcher.diagnosis import oom
from support.failing import is_killed, rank, wait_to_be_stopped


def use_memory():
    return [bytearray(range(256)) * (1 << 12) for _ in range(400)]


def use_memory_in_helper():
    program = "from watcher.diagnosis import oom_programs; oom_programs.use_memory()"
    raise RuntimeError(f"my worker ended with {subprocess.call([sys.executable, '-c', program])}")


def call_on_rank_1(fn):
    return fn() if rank() == 1 else wait_to_be_stopped()


def report(fn):
    result = mpwatch.run(call_on_rank_1, 2, args=(fn,), check=False)
    print(result.root_cause.kind.name, result.root_cause.rank, result.root_cause.exit_code)
    print(mpwatch.RunFailedError(result))


def exhaust_memory(group, fn=use_memory):
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    report(fn)


def exhaust_memory_without_log(group):
    oom.KERNEL_LOG = "/nowhere"
    exhaust_memory(group)
    report(is_killed)


def exhaust_memory_in_helper(group):
    exhaust_memory(group, use_memory_in_helper)

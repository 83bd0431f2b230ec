"""Programs that use more memory than their cgroup has. A rank imports this module, so it imports little."""

import os
import subprocess
import sys

import mpwatch
from support.failing import is_killed, rank, wait_to_be_stopped


def use_memory():
    return [bytearray(range(256)) * (1 << 12) for _ in range(400)]


def use_memory_in_helper():
    program = "from watcher.diagnosis import oom_programs; oom_programs.use_memory()"
    raise RuntimeError(f"my worker ended with {subprocess.call([sys.executable, '-c', program])}")


def call_on_rank_1(fn):
    return fn() if rank() == 1 else wait_to_be_stopped()


def exhaust_memory(group):
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    for fn in (use_memory, is_killed, use_memory_in_helper):
        result = mpwatch.run(call_on_rank_1, 2, args=(fn,), check=False)
        print(result.root_cause.kind.name, result.root_cause.rank, result.root_cause.exit_code)
        print(mpwatch.RunFailedError(result), end="\n\n")

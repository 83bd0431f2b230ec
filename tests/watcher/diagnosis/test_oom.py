"""The kernel's out-of-memory killer: real kills, in a memory cgroup that the test creates."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import mpwatch
from support import failing
from support.programs import call

LIMIT = 150 << 20


def is_removed(folder):
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def find_memory_groups():
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            for folder in (Path(f"/sys/fs/cgroup/{controllers}{path}"), Path(f"/sys/fs/cgroup/{controllers}")):
                yield from [folder] if (folder / "cgroup.procs").exists() else []


@pytest.fixture
def group(eventually):
    """Create a memory cgroup whose members may use LIMIT bytes together. The value is its folder."""
    for parent in find_memory_groups():
        folder = parent / f"mpwatch-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        limits = [folder / name for name in ("memory.max", "memory.limit_in_bytes") if (folder / name).exists()]
        if limits:
            limits[0].write_text(str(LIMIT))
            yield str(folder)
            eventually(partial(is_removed, folder))  # multiprocessing's resource tracker ends after its program
            return
        folder.rmdir()
    pytest.skip("no memory cgroup can be created here: it takes root, and a writable hierarchy")


def exhaust_memory(group):
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    use_memory = "[bytearray(range(256)) * (1 << 12) for _ in range(400)]"

    def use_memory_in_helper():
        raise RuntimeError(f"my worker ended with {subprocess.call([sys.executable, '-c', use_memory])}")

    def call_on_rank_1(action):
        return action() if failing.rank() == 1 else failing.wait_to_be_stopped()

    for action in (lambda: eval(use_memory), failing.is_killed, use_memory_in_helper):
        result = mpwatch.run(call_on_rank_1, 2, args=(action,), check=False)
        print(result.root_cause.kind.name, result.root_cause.rank, result.root_cause.exit_code)
        print(mpwatch.RunFailedError(result), end="\n\n")


def test_ranks_and_helpers_that_use_all_memory(group):
    done = call(exhaust_memory, group)
    by_kernel, by_another, helper, _ = (text.splitlines() for text in done.stdout.split("\n\n"))
    assert by_kernel[0] == "OOM 1 137"
    assert by_kernel[1].startswith("rank 1 was killed by the kernel's out-of-memory killer (")
    assert by_another[0] == "SIGNAL 1 137"
    assert "or somebody's kill -9" in by_another[1]
    assert helper[0] == "EXCEPTION 1 1"
    assert "my worker ended with -9" in helper[1]
    note = f"  the kernel's out-of-memory killer killed a process that is no rank: oom_kill in {group}/"
    assert any(line.startswith(note) for line in helper)

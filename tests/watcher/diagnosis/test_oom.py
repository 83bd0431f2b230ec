"""The kernel's out-of-memory killer: real kills, in a memory cgroup that the test creates."""

import os
from functools import partial
from pathlib import Path

import pytest

from support.programs import call
from watcher.diagnosis import oom_programs

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


def test_ranks_and_helpers_that_use_all_memory(group):
    done = call(oom_programs.exhaust_memory, group)
    by_kernel, by_another, helper, _ = (text.splitlines() for text in done.stdout.split("\n\n"))
    assert by_kernel[0] == "OOM 1 137"
    assert by_kernel[1].startswith("rank 1 was killed by the kernel's out-of-memory killer (")
    assert by_another[0] == "SIGNAL 1 137"
    assert "or somebody's kill -9" in by_another[1]
    assert helper[0] == "EXCEPTION 1 1"
    assert "my worker ended with -9" in helper[1]
    note = f"  the kernel's out-of-memory killer killed a process that is no rank: oom_kill in {group}/"
    assert any(line.startswith(note) for line in helper)

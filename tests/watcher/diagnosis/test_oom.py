"""The kernel's out-of-memory killer: real kills, in a memory cgroup that the test creates."""

import os
from functools import partial
from pathlib import Path

import pytest

from mpwatch.os_support import cgroups
from support.programs import call
from watcher.diagnosis import oom_programs

LIMIT = 150 << 20


def is_removed(folder):
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


@pytest.fixture
def group(eventually):
    """Create a memory cgroup whose members may use LIMIT bytes together. The value is its folder."""
    parents = [Path(file).parent for file in cgroups.count_oom_kills()]
    for parent in parents:
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


def test_a_rank_that_uses_all_memory(group):
    kind, verdict, *_ = call(oom_programs.exhaust_memory, group).stdout.splitlines()
    assert kind == "OOM 1 137"
    assert verdict.startswith("rank 1 was killed by the kernel's out-of-memory killer (")


def test_the_counter_is_the_proof_if_the_log_cannot_be_read(group):
    kind, verdict, _, second_kind, second, *_ = call(oom_programs.exhaust_memory_without_log, group).stdout.splitlines()
    assert kind == "OOM 1 137"
    assert f"(oom_kill in {group}/" in verdict
    assert "rose by 1 during the run)" in verdict
    assert second_kind == "SIGNAL 1 137"
    assert "or somebody's kill -9" in second


def test_a_killed_helper_is_reported(group):
    kind, verdict, *more = call(oom_programs.exhaust_memory_in_helper, group).stdout.splitlines()
    assert kind == "EXCEPTION 1 1"
    assert "my worker ended with -9" in verdict
    note = f"  the kernel's out-of-memory killer killed a process that is no rank: oom_kill in {group}/"
    assert any(line.startswith(note) for line in more)


def test_counters_of_both_cgroup_versions(tmp_path):
    (tmp_path / "v1").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (tmp_path / "v2").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\noom_group_kill 0\n")
    assert cgroups._read_field(str(tmp_path / "v1"), "oom_kill") == 3
    assert cgroups._read_field(str(tmp_path / "v2"), "oom_kill") == 3
    assert cgroups._read_field(str(tmp_path / "none"), "oom_kill") is None

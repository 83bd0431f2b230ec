"""Which files in /dev/shm are removed when a rank has ended. Files of real processes are in with_torch/test_killed_workers.py."""

import mmap
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from mpwatch.watcher.processes import torch_files
from mpwatch.watcher.processes.torch_files import find_makers, remove_left_files
from mpwatch.wire.shared_memory import MAX_CHILD_PIDS, SLOT_SIZE, ChildPidsWriter, clear_slot, open_slot, read_child_pids

STARTED_AT = 1000.0  # of the rank, by the wall clock


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """Use an empty folder on the file system of /dev/shm."""
    path = tempfile.mkdtemp(prefix="mpwatch-test-", dir="/dev/shm")
    monkeypatch.setattr(torch_files, "FOLDER", path)
    yield Path(path)
    shutil.rmtree(path)


@pytest.fixture
def dead_pid():
    program = subprocess.Popen(["true"])
    program.wait()
    return program.pid


@pytest.fixture
def file(folder, dead_pid):
    """A file that is removed, unless the test changes it."""
    path = folder / f"torch_{dead_pid}_2523488950_0"
    path.write_bytes(bytes(100))
    os.utime(path, (STARTED_AT, STARTED_AT))
    return path


def test_a_file_of_a_dead_process_is_removed(file, dead_pid):
    remove_left_files({dead_pid, os.getpid()}, STARTED_AT)
    assert not file.exists()


def test_an_empty_file_is_removed(file, dead_pid):
    file.write_bytes(b"")
    remove_left_files({dead_pid}, STARTED_AT)
    assert not file.exists()


def test_files_of_other_processes_stay(file, dead_pid):
    remove_left_files({os.getpid()}, STARTED_AT)
    assert file.exists()


def test_files_of_a_process_that_is_alive_stay(file):
    mine = file.rename(file.with_name(f"torch_{os.getpid()}_2523488950_0"))
    remove_left_files({os.getpid()}, STARTED_AT)
    assert mine.exists()


@pytest.mark.parametrize("name", ["torch_", "torch_{}", "torch_x{}_1", "torch_²_1", "torchx_{}_1_0", "xtorch_{}_1_0"])
def test_files_with_other_names_stay(file, dead_pid, name):
    other = file.rename(file.with_name(name.format(dead_pid)))
    remove_left_files({dead_pid}, STARTED_AT)
    assert other.exists()


def test_a_file_that_is_older_than_the_rank_stays(file, dead_pid):
    remove_left_files({dead_pid}, STARTED_AT + 1)
    assert file.exists()


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_a_file_that_any_process_has_open_stays(file, dead_pid, flags):
    fd = os.open(file, flags)
    remove_left_files({dead_pid}, STARTED_AT)
    assert file.exists()
    os.close(fd)
    remove_left_files({dead_pid}, STARTED_AT)
    assert not file.exists()


def test_a_file_that_any_process_has_mapped_stays(file, dead_pid):
    with file.open("r+b") as opened:
        mapping = mmap.mmap(opened.fileno(), 0)
    with mapping:
        remove_left_files({dead_pid}, STARTED_AT)
        assert file.exists()


def test_a_file_that_still_counts_users_stays(file, dead_pid):
    file.write_bytes(b"\1")
    remove_left_files({dead_pid}, STARTED_AT)
    assert file.exists()


def test_a_link_a_pipe_and_a_folder_stay(file, dead_pid):
    target = file.rename(file.with_name("target"))
    others = [file.with_name(f"torch_{dead_pid}_{number}_0") for number in range(3)]
    others[0].symlink_to(target)
    os.mkfifo(others[1])
    others[2].mkdir()
    remove_left_files({dead_pid}, STARTED_AT)
    assert target.exists()
    assert all(other.exists() for other in others)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_stays(file, dead_pid):
    os.chown(file, 12345, 12345)
    remove_left_files({dead_pid}, STARTED_AT)
    assert file.exists()


def test_nothing_happens_without_the_folder(monkeypatch, dead_pid):
    monkeypatch.setattr(torch_files, "FOLDER", "/dev/shm/mpwatch-test/missing")
    remove_left_files({dead_pid}, STARTED_AT)
    assert find_makers(os.getpgid(0)) == set()


def test_members_of_a_group_are_found_by_their_files(folder, file):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, process_group=0) as program:
        for pid in (os.getpid(), program.pid, 1 << 40):
            (folder / f"torch_{pid}_1_0").touch()
        assert find_makers(program.pid) == {program.pid}


def test_the_last_pids_of_children_are_kept():
    fd = os.memfd_create("mpwatch-test")
    os.ftruncate(fd, 2 * SLOT_SIZE)
    with open_slot(os.dup(fd), 1) as memory:
        writer = ChildPidsWriter(memory)
        assert read_child_pids(fd, 1) == set()
        for pid in range(1, MAX_CHILD_PIDS + 11):
            writer.append(pid)
    assert read_child_pids(fd, 1) == set(range(11, MAX_CHILD_PIDS + 11))
    assert read_child_pids(fd, 0) == set()
    clear_slot(fd, 1)
    assert read_child_pids(fd, 1) == set()
    os.close(fd)

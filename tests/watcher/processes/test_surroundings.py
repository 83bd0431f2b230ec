"""What a rank takes over from the calling program: its environment, its module search path, its clock."""

import ctypes
import importlib.util
import os
import sys
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

import mpwatch
from support import failing
from support.programs import call, in_own_process

CLONE_NEWTIME = 0x80


def test_a_rank_is_never_in_inspect_mode(monkeypatch, capfd, caplog):
    monkeypatch.setenv("PYTHONINSPECT", "1")
    assert list(mpwatch.run(os.getenv, 1, args=("PYTHONINSPECT",))) == [None]
    assert (capfd.readouterr().err, caplog.messages) == ("", [])


def find_children_with_variable(name):
    """Return for each child of the calling program whether it was started with this environment variable."""
    program = os.getppid()
    pids = " ".join(path.read_text() for path in Path(f"/proc/{program}/task").glob("*/children")).split()
    return [f"{name}=".encode() in Path(f"/proc/{pid}/environ").read_bytes() for pid in pids]


@in_own_process
def test_no_process_of_a_run_is_started_with_the_environment_of_c():
    """A start fails with EFAULT if another thread changes C's environment while the new process reads it."""
    resource_tracker.ensure_running()  # multiprocessing starts it with C's environment
    os.putenv("ONLY_IN_C", "1")
    (found,) = mpwatch.run(find_children_with_variable, 1, args=("ONLY_IN_C",))
    assert found == [False] * 3  # the tracker, the guardian and the rank


def test_a_relative_entry_of_sys_path_means_the_same_folder_as_in_the_caller(tmp_path, monkeypatch):
    for place in ("old", "new"):
        folder = tmp_path / place / "modules_of_a_test"
        folder.mkdir(parents=True)
        (folder / "tells_its_place.py").write_text(f"place = {place!r}")
    monkeypatch.setattr(sys, "path", ["modules_of_a_test", *sys.path])
    monkeypatch.chdir(tmp_path / "old")
    assert importlib.util.find_spec("tells_its_place") is not None  # Python notes the folder at the first search
    monkeypatch.chdir(tmp_path / "new")

    def fn():
        import tells_its_place

        return tells_its_place.place, os.getcwd()

    assert list(mpwatch.run(fn, 1)) == [("old", str(tmp_path / "new"))]
    assert importlib.util.find_spec("tells_its_place").origin == str(tmp_path / "old/modules_of_a_test/tells_its_place.py")


def run_with_another_clock():
    if ctypes.CDLL(None).unshare(CLONE_NEWTIME):
        print("skipped")
        return
    with open("/proc/self/timens_offsets", "w") as offsets:
        offsets.write("monotonic 1000 0\n")
    try:
        mpwatch.run(failing.raises_value_error, 1)
    except mpwatch.RunFailedError as error:
        print(error)


def test_a_rank_in_another_time_namespace_is_blamed():
    output = call(run_with_another_clock).stdout
    if output == "skipped\n":
        pytest.skip("no time namespace can be made: that takes root, and Linux")
    assert output.startswith("rank 0 failed first: ValueError: the batch is bad")

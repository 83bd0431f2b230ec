"""What a rank takes over from the calling program: its environment, its module search path, its clock."""

import ctypes
import importlib.util
import os
import sys

import pytest

import mpwatch
from support import failing
from support.programs import call

CLONE_NEWTIME = 0x80


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

"""What a rank takes over from the calling program: its environment, its module search path, its clock."""

import importlib.util
import os
import sys

import mpwatch

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

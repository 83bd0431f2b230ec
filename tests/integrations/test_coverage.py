"""coverage measures the lines of ranks, if its configuration has `patch = ["subprocess"]`."""

import pytest

from support.programs import python

coverage = pytest.importorskip("coverage", minversion="7.10")

CONFIG = '[tool.coverage.run]\npatch = ["subprocess"]\nsigterm = true\n'
SCRIPT = """
import multiprocessing, signal
import mpwatch

def work(paused):
    if mpwatch.current_worker().rank == 1:
        while True: paused.set(); signal.pause()
    paused.wait()
    raise ValueError

if __name__ == "__main__":
    mpwatch.run(work, 2, args=(multiprocessing.get_context("spawn").Event(),), check=False)
"""
LINES = {n for n, line in enumerate(SCRIPT.splitlines(), 1) if "paused.set()" in line or "raise ValueError" in line}


def test_the_lines_of_a_rank_that_raises_and_of_one_that_is_stopped(tmp_path, eventually):
    """The data files are written while the program ends, or later: multiprocessing's resource tracker has one, too."""

    def read_lines():
        data = coverage.CoverageData(tmp_path / ".coverage")
        data.read()
        return set(data.lines(str(program)) or ())

    def is_measured():
        python("-m", "coverage", "combine", "--keep", "-q", cwd=tmp_path, check=False)
        return read_lines() >= LINES

    (tmp_path / "pyproject.toml").write_text(CONFIG)
    (program := tmp_path / "script.py").write_text(SCRIPT)
    python("-m", "coverage", "run", "script.py", cwd=tmp_path)
    eventually(is_measured)

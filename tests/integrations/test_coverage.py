"""coverage measures the lines of ranks, if its configuration has `patch = ["subprocess"]`."""

import pytest

from support.programs import ENV, python
from support.pytest_runs import PLUGIN

coverage = pytest.importorskip("coverage", minversion="7.10")

CONFIG = '[tool.coverage.run]\npatch = ["subprocess", "_exit"]\nsigterm = true\n'
SCRIPT = """
import multiprocessing, os, signal, sys
import mpwatch

def work(how, barrier):
    if how == "return":
        return "in a rank"
    if mpwatch.current_worker().rank == 1:
        barrier.wait()
        signal.pause()
    barrier.wait()
    if how == "exit":
        os._exit(0)
    raise ValueError

if __name__ == "__main__":
    barrier = multiprocessing.get_context("spawn").Barrier(2)
    mpwatch.run(work, 2, args=(sys.argv[1], barrier), check=False)
"""
TESTS = """
import mpwatch, pytest

@pytest.mark.mpwatch(nprocs=2)
@pytest.mark.parametrize("is_bad", [False, True])
def test(is_bad):
    if mpwatch.current_worker().rank:
        seen = "in rank 1"
        assert not is_bad
"""


@pytest.fixture
def measure(tmp_path, eventually):
    """Return a function that runs a program under coverage, and waits until coverage has seen these lines of it.

    multiprocessing's resource tracker writes its data file while the program ends, or later.
    """
    (tmp_path / "pyproject.toml").write_text(CONFIG)

    def find_seen(program):
        seen = set()
        for path in tmp_path.glob(".coverage.*"):
            data = coverage.CoverageData(path)
            try:
                data.read()
            except coverage.CoverageException:
                continue
            seen |= set(data.lines(str(program)) or ())
        return seen

    def run(source, name, *args, expected):
        program = tmp_path / name
        program.write_text(source)
        python("-m", "coverage", "run", *args, cwd=tmp_path, env={**ENV, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, check=False)
        lines = source.splitlines()
        eventually(lambda: expected <= {lines[number - 1].strip() for number in find_seen(program)})

    return run


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("return", {'return "in a rank"'}),
        pytest.param("exit", {"os._exit(0)"}, marks=pytest.mark.slow),
        ("raise", {"raise ValueError", "if mpwatch.current_worker().rank == 1:", "signal.pause()"}),
    ],
)
def test_a_script(measure, how, expected):
    measure(SCRIPT, "script.py", "script.py", how, expected=expected)


@pytest.mark.slow
def test_tests_on_ranks(measure):
    expected = {'seen = "in rank 1"', "assert not is_bad"}
    measure(TESTS, "test_it.py", "-m", "pytest", *PLUGIN, "test_it.py", expected=expected)

"""Tests of the pytest plugin: pytest runs files of tests in a process of its own, as users run it."""

import os
import signal
import subprocess
import sys

import pytest

from support.process_state import is_alive
from support.pytest_runs import PLUGIN, match_output

pytest_plugins = "pytester"


def test_a_failing_assertion_is_shown_like_any_other(run_pytest):
    result = run_pytest(
        """
@pytest.mark.mpwatch(nprocs=2)
@pytest.mark.parametrize("shard", ["a", "b"])
def test_shards(shard):
    rank = mpwatch.current_worker().rank
    print("reading", shard, "in", rank)
    os.write(2, b"a line of compiled code\\n")
    found = {"rows": 10, "columns": [16, 17 if rank == 1 and shard == "b" else 16]}
    assert found == {"rows": 10, "columns": [16, 16]}
""",
        "-rP",
    )
    result.assert_outcomes(passed=1, failed=1)
    shown = match_output(
        result,
        "*FAILURES*",
        "*test_shards?b?*",
        ">       assert found == {*",
        "E       AssertionError: assert {*",
        "E         Differing items:",
        "E         {'columns': [[]16, 17[]]} != {'columns': [[]16, 16[]]}",
        "E * in rank 1 of 2",
        "E * rank 0: had returned",
        "test_it.py:*: AssertionError",
        "*Captured stdout of rank 1 call*",
        "reading b in 1",
        "*Captured stderr of rank 1 call*",
        "a line of compiled code",
    )
    assert shown.count("reading b in") == 2
    assert "mpwatch/integrations" not in shown
    assert "pluggy" not in shown.partition("FAILURES")[2]


def test_fixtures_are_set_up_and_torn_down_in_the_rank(run_pytest, pytester):
    result = run_pytest(
        """
pytestmark = pytest.mark.mpwatch(2)

def note(text):
    with open(f"notes{mpwatch.current_worker().rank}", "a") as file:
        file.write(text + " ")

@pytest.fixture(scope="session", autouse=True)
def session():
    note("session")
    yield
    note("session-ends")

@pytest.fixture(scope="module")
def pid():
    note("module")
    yield os.getpid()
    note("module-ends")

@pytest.fixture(params=["x", "y"])
def letter(request, of_conftest):
    note(f"{request.param}{of_conftest}")
    yield request.param
    note(f"{request.param}-ends")

def test_letters(letter, pid, monkeypatch, capsys):
    assert pid == os.getpid()
    monkeypatch.setenv("LETTER", letter)
    print("captured")
    assert capsys.readouterr().out == "captured\\n"

class TestClass:
    @classmethod
    def setup_class(cls):
        note("class")

    def setup_method(self):
        self.me = mpwatch.current_worker()

    @pytest.mark.parametrize("n", [2])
    def test_method(self, n, tmp_path, tmp_path_factory):
        assert self.me.world_size == n
        assert "LETTER" not in os.environ
        assert not list(tmp_path.glob("own*"))
        own = tmp_path_factory.mktemp("own")
        assert own.parent.name == f"rank{self.me.rank}"
        (tmp_path / own.parent.name).touch()
""",
        conftest="import pytest\n@pytest.fixture\ndef of_conftest(): return '!'",
    )
    result.assert_outcomes(passed=3)
    notes = "session module x! x-ends y! y-ends class module-ends session-ends "
    assert [(pytester.path / f"notes{rank}").read_text() for rank in range(2)] == [notes] * 2


def test_skips_and_expected_failures(run_pytest):
    result = run_pytest(
        """
pytestmark = pytest.mark.mpwatch(nprocs=2)

def rank():
    return mpwatch.current_worker().rank

@pytest.mark.skipif(True, reason="by a mark")
def test_mark(): ...

def test_one_skips():
    if rank() == 1:
        pytest.skip("in one")

@pytest.mark.xfail(raises=ZeroDivisionError, strict=True, reason="of a type")
def test_xfail():
    1 / rank()

@pytest.mark.xfail(strict=True, reason="it passes")
def test_strict(): ...

def test_pytest_fail():
    if rank() == 1:
        pytest.fail("a message", pytrace=False)
""",
        "-rsxXf",
    )
    result.assert_outcomes(skipped=2, xfailed=1, failed=2)
    match_output(
        result,
        "[[]XPASS(strict)] it passes",
        "a message",
        "in rank 1 of 2",
        "SKIPPED [[]1] test_it.py:11: by a mark",
        "SKIPPED [[]1] test_it.py:*: in one",
        "XFAIL test_it.py::test_xfail - *of a type",
    )


def test_the_tests_of_a_module_share_warm_ranks(run_pytest):
    result = run_pytest(
        """
import itertools

counter = itertools.count()
pids = set()

@pytest.mark.mpwatch(nprocs=2)
@pytest.mark.parametrize("n", range(3))
def test_same(n):
    pids.add(os.getpid())
    assert (next(counter), len(pids)) == (n, 1)

@pytest.mark.mpwatch(nprocs=2, timeout=30)
def test_another_limit_needs_no_other_ranks():
    assert next(counter) == 3

@pytest.mark.mpwatch(nprocs=1)
def test_other_ranks():
    assert next(counter) == 0

def test_here():
    assert next(counter) == 0

@pytest.mark.mpwatch(nprocs=2)
def test_first_ranks_again():
    assert next(counter) == 4
"""
    )
    result.assert_outcomes(passed=7)


def test_a_rank_that_dies_or_hangs(run_pytest):
    result = run_pytest(
        """
import time
pytestmark = pytest.mark.mpwatch(nprocs=2, grace_period=1)

@pytest.fixture(scope="module")
def pid():
    return os.getpid()

def test_dies(pid):
    print("before the kill")
    if mpwatch.current_worker().rank == 1:
        os.kill(os.getpid(), 9)

def test_new_ranks(pid):
    assert pid == os.getpid()

@pytest.mark.mpwatch(timeout=0.5)
def test_hangs():
    if mpwatch.current_worker().rank == 0:
        time.sleep(60)
"""
    )
    result.assert_outcomes(passed=1, failed=2)
    shown = match_output(
        result,
        "rank 1 was killed by SIGKILL (*",
        "  its logs: *",
        "  rank 0: *",
        "*Captured stdout of rank 1 call*",
        "before the kill",
        "*did not end within timeout=0.5 s: rank 0 had not returned*",
        "*test_it.py:24 in test_hangs*",
    )
    assert "hidden" not in shown


@pytest.mark.parametrize("capture", ["no", pytest.param("tee-sys", marks=pytest.mark.slow)])
def test_each_line_of_live_output_begins_with_its_rank(run_pytest, capture):
    source = 'print("hello from", mpwatch.current_worker().rank)'
    result = run_pytest(f"@pytest.mark.mpwatch(2)\ndef test_it():\n    {source}\n", f"--capture={capture}")
    result.assert_outcomes(passed=1)
    assert {"[0] hello from 0", "[1] hello from 1"} <= {line.removeprefix("test_it.py ") for line in result.outlines}


def test_without_a_mark_nothing_is_imported(run_pytest):
    result = run_pytest(
        """
def test_here():
    loaded = {name for name in sys.modules if name.startswith(("mpwatch", "torch"))}
    assert {name for name in loaded if not name.startswith("mpwatch.integrations")} == {"mpwatch"}
"""
    )
    result.assert_outcomes(passed=1)


def test_ctrl_c_ends_pytest_and_the_ranks(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        test_it="""
import os, time
import pytest
import mpwatch

@pytest.mark.mpwatch(2)
def test_long():
    with open("at work", "w") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(60)
"""
    )
    os.mkfifo(pytester.path / "at work")
    program = [sys.executable, "-m", "pytest", *PLUGIN]
    with (
        open(os.open(pytester.path / "at work", os.O_RDWR)) as fifo,  # opened for writing too, so it has no end of file
        subprocess.Popen(program, cwd=pytester.path, stdout=subprocess.PIPE, text=True) as process,
    ):
        pids = [fifo.readline().strip() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in out
    assert not any(is_alive(int(pid)) for pid in pids)

"""Tests of the pytest plugin: pytest runs files of tests in a process of its own, as users run it."""

import os
import re
import signal
import subprocess
import sys

import pytest

from mpwatch import RunFailedError, WorkerGroup
from mpwatch.integrations.pytest_plugin import rank_session
from support.process_state import is_alive
from support.pytest_runs import PLUGIN, match_output

pytest_plugins = "pytester"


def test_a_failing_assertion_is_shown_like_any_other(run_pytest):
    result = run_pytest(
        """
@pytest.mark.mpwatch(nprocs=4)
@pytest.mark.parametrize("shard", ["a", "b"])
def test_shards(shard):
    rank = mpwatch.current_worker().rank
    print("reading", shard, "in", rank)
    os.write(2, b"a line of compiled code\\n")
    found = {"rows": 10, "columns": [16, 17 if rank == 2 and shard == "b" else 16]}
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
        "E * in rank 2 of 4",
        "E * ranks 0-1, 3: had returned",
        "test_it.py:*: AssertionError",
        "*Captured stdout of rank 2 call*",
        "reading b in 2",
        "*Captured stderr of rank 2 call*",
        "a line of compiled code",
    )
    assert shown.count("reading b in") == 4
    assert "mpwatch/integrations" not in shown
    assert "pluggy" not in shown.partition("FAILURES")[2]


def test_fixtures_are_set_up_and_torn_down_in_the_rank(run_pytest, pytester):
    result = run_pytest(
        """
pytestmark = pytest.mark.mpwatch(2)

def note(text):
    with open(f"notes{mpwatch.current_worker().rank}", "a") as file:
        file.write(text + "\\n")

@pytest.fixture(scope="session", autouse=True)
def session():
    note("session")
    yield
    note("session ends")

@pytest.fixture(scope="module")
def pid():
    note("module")
    yield os.getpid()
    note("module ends")

@pytest.fixture(params=["x", "y"])
def letter(request, of_conftest):
    note(f"set up {request.param}{of_conftest}")
    yield request.param
    note(f"tear down {request.param}")

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
        self.world_size = mpwatch.current_worker().world_size

    @pytest.mark.parametrize("n", [2])
    def test_method(self, n, tmp_path, tmp_path_factory):
        assert self.world_size == n
        assert "LETTER" not in os.environ
        assert not list(tmp_path.glob("own*"))
        own = tmp_path_factory.mktemp("own")
        assert own.parent.name == f"rank{mpwatch.current_worker().rank}"
        (tmp_path / own.parent.name).touch()

def test_one_folder_for_all(tmp_path):
    (tmp_path / str(mpwatch.current_worker().rank)).touch()

@pytest.mark.filterwarnings("error:my own")
def test_filters_hold():
    import warnings
    with pytest.raises(UserWarning):
        warnings.warn("my own")
""",
        conftest="""
import pytest

@pytest.fixture
def of_conftest():
    return "!"
""",
    )
    result.assert_outcomes(passed=5)
    notes = "session module set-up-x! tear-down-x set-up-y! tear-down-y class module-ends session-ends".replace("-", " ")
    for rank in range(2):
        text = (pytester.path / f"notes{rank}").read_text()
        assert " ".join(text.split()) == notes, text


def test_skips_and_expected_failures(run_pytest):
    result = run_pytest(
        """
pytestmark = pytest.mark.mpwatch(nprocs=2)

def rank():
    return mpwatch.current_worker().rank

@pytest.mark.skipif(True, reason="by a mark")
def test_mark(): ...

def test_imperative():
    pytest.skip("in all")

def test_one_skips():
    if rank() == 1:
        pytest.skip("in one")

@pytest.mark.xfail(reason="one of them")
def test_xfail():
    assert rank() == 0

@pytest.mark.xfail(raises=ZeroDivisionError, strict=True, reason="of a type")
def test_xfail_raises():
    1 / rank()

@pytest.mark.xfail(raises=KeyError, reason="of another type")
def test_xfail_of_another_type():
    1 / rank()

def test_imperative_xfail():
    pytest.xfail("known")

@pytest.fixture
def known(request):
    request.node.add_marker(pytest.mark.xfail(reason="marked by a fixture"))

def test_marked_by_a_fixture(known):
    assert rank() == 0

@pytest.mark.xfail(strict=True, reason="it passes")
def test_strict():
    pass

@pytest.mark.xfail(reason="it passes")
def test_not_strict():
    pass

def test_pytest_fail():
    if rank() == 1:
        pytest.fail("a message")
""",
        "-rsxXf",
    )
    result.assert_outcomes(skipped=3, xfailed=4, failed=3, xpassed=1)
    match_output(
        result,
        "E*ZeroDivisionError: division by zero",
        "[[]XPASS(strict)] it passes",
        "E * Failed: a message",
        "E * in rank 1 of 2",
        "SKIPPED [[]1] test_it.py:11: by a mark",
        "SKIPPED [[]1] test_it.py:15: in all",
        "SKIPPED [[]1] test_it.py:19: in one",
        "XFAIL test_it.py::test_xfail - *one of them",
        "XFAIL test_it.py::test_xfail_raises - *of a type",
        "XFAIL test_it.py::test_imperative_xfail - *known",
        "XFAIL test_it.py::test_marked_by_a_fixture - *marked by a fixture",
        "XPASS test_it.py::test_not_strict - *it passes",
    )


def test_the_tests_of_a_module_share_warm_ranks(run_pytest):
    result = run_pytest(
        """
import itertools

counter = itertools.count()
pids = set()

@pytest.mark.mpwatch(nprocs=2)
@pytest.mark.parametrize("n", range(20))
def test_same(n):
    pids.add(os.getpid())
    assert (next(counter), len(pids)) == (n, 1)

@pytest.mark.mpwatch(nprocs=2, timeout=30)
def test_another_limit_needs_no_other_ranks():
    assert next(counter) == 20

@pytest.mark.mpwatch(nprocs=3)
def test_other_ranks():
    assert next(counter) == 0

def test_here():
    assert next(counter) == 0

@pytest.mark.mpwatch(nprocs=2)
def test_first_ranks_again():
    assert next(counter) == 21
""",
        "--durations=0",
        "--durations-min=0",
    )
    result.assert_outcomes(passed=24)
    calls = re.findall(r"([\d.]+)s call +test_it.py::test_same", result.stdout.str())
    assert len(calls) == 20
    assert sorted(map(float, calls))[10] < 0.2  # starting the ranks takes longer


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

@pytest.fixture(scope="module")
def never_ends():
    yield
    time.sleep(60)

@pytest.mark.mpwatch(timeout=0.5)
def test_after_that(never_ends):
    pass
"""
    )
    result.assert_outcomes(passed=2, failed=2, errors=1)
    shown = match_output(
        result,
        "*ERROR at teardown of test_after_that*",
        "*did not end within timeout=0.5 s: *",
        "*test_it.py:29 in never_ends*",
        "rank 1 was killed by SIGKILL (*",
        "  its logs: *",
        "  rank 0: *",
        "*Captured stdout of rank 1 call*",
        "before the kill",
        "*did not end within timeout=0.5 s: rank 0 had not returned*",
        "*test_it.py:24 in test_hangs*",
    )
    assert "hidden" not in shown


@pytest.mark.parametrize("capture", ["no", "tee-sys"])
def test_each_line_of_live_output_begins_with_its_rank(run_pytest, capture):
    source = 'print("hello from", mpwatch.current_worker().rank)'
    result = run_pytest(f"@pytest.mark.mpwatch(2)\ndef test_it():\n    {source}\n", f"--capture={capture}")
    result.assert_outcomes(passed=1)
    assert {"[0] hello from 0", "[1] hello from 1"} <= {line.removeprefix("test_it.py ") for line in result.outlines}


def test_unittest_classes_and_modules_of_the_same_name(run_pytest, pytester):
    for folder in ("one", "two"):
        (pytester.mkdir(folder) / "test_same.py").write_text(
            f"""
import unittest
import pytest
import mpwatch
class Test(unittest.TestCase):
    def setUp(self):
        self.size = mpwatch.current_worker().world_size
    @pytest.mark.mpwatch(2)
    def test_method(self):
        self.assertEqual((self.size, {folder!r}), (2, "one"))
"""
        )
    result = run_pytest("", "--import-mode=importlib", "one", "two")
    result.assert_outcomes(passed=1, failed=1)
    match_output(result, "E*AssertionError: Tuples differ: (2, 'two') != (2, 'one')", "E*in rank ? of 2")


def test_a_rank_that_was_restarted_makes_its_session(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    module = tmp_path / "test_it.py"
    module.write_text("def test_it():\n    assert 1 == 2\n")
    config = rank_session.SessionConfig(
        args=(*PLUGIN, "--capture=no"),
        invocation_dir=str(tmp_path),
        module=str(module),
        temporary_dir=str(tmp_path / "temporary"),
        worker_input={},
        markers=(),
    )
    request = rank_session.TestRequest(name=("test_it",), next_name=None, shared_fixtures={})
    with WorkerGroup(1) as group, pytest.raises(RunFailedError) as caught:
        group.run(rank_session.run_item, (config, request))
    assert str(caught.value.__cause__).startswith("assert 1 == 2")


def test_without_a_mark_nothing_is_imported(run_pytest):
    result = run_pytest(
        """
def test_here():
    assert not [name for name in sys.modules if name.startswith(("mpwatch.watcher", "mpwatch.group", "torch"))]
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

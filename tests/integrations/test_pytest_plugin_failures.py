"""Tests of the pytest plugin: failures in ranks are reported, even if something else fails or is skipped."""

import re
from pathlib import Path

import pytest

from support.pytest_runs import PLUGIN, match_output

pytest_plugins = "pytester"
ROOT = Path(__file__).parents[2]


def test_no_failure_is_hidden_by_a_skip_or_another_failure(run_pytest):
    result = run_pytest(
        """
import warnings
pytestmark = pytest.mark.mpwatch(nprocs=2)

def rank():
    return mpwatch.current_worker().rank

@pytest.fixture
def breaks_later():
    yield
    raise ValueError("in teardown")

def test_skip_and_teardown(breaks_later):
    pytest.skip("of no use")

def test_failure_and_teardown(breaks_later):
    warnings.warn("not lost", stacklevel=1)
    assert 0, "in the test"

@pytest.mark.parametrize("n", range(4))  # the order in which the ranks end varies
def test_one_skips_and_one_fails(n):
    if rank() == n % 2:
        pytest.skip("of no use")
    assert 0, "in the other rank"

class TestClass:
    @classmethod
    def teardown_class(cls):
        raise ValueError("in teardown of the class")

    def test_method(self): ...

def test_after_the_class(): ...

@pytest.fixture(scope="module")
def breaks_last():
    yield
    raise ValueError("in teardown of the module")

def test_skip_and_teardown_of_the_module(breaks_last):
    pytest.skip("of no use")
""",
    )
    result.assert_outcomes(passed=1, failed=8)
    match_output(
        result,
        "E       ValueError: in teardown",
        "E       AssertionError: in the test",
        "*Captured stderr of rank 0 call*",
        "E       ValueError: in teardown",
        "*test_it.py:*: UserWarning: not lost",
        "E       AssertionError: in the other rank",
        "E       in rank 1 of 2",
        "E         rank 0*Skipped: of no use (test_it.py:*)",
        "*_ TestClass.test_method _*",
        "E       ValueError: in teardown of the class",
        "E       ValueError: in teardown of the module",
    )


def test_errors_in_fixtures_and_what_else_pytest_reports(run_pytest):
    result = run_pytest(
        """
import logging, warnings
pytestmark = pytest.mark.mpwatch(2)

@pytest.fixture
def broken():
    logging.getLogger("of.a.test").warning("about to break")
    raise ValueError("in set-up")

@pytest.fixture(scope="module")
def breaks_last():
    yield
    print("printed at the end")
    raise ValueError("at the end")

def test_no_such_fixture(nothing): ...

def test_set_up(broken): ...

def test_warning():
    warnings.warn("only reported", stacklevel=1)

def test_last(breaks_last): ...
""",
        "-rP",
    )
    result.assert_outcomes(passed=2, failed=2, errors=1)
    shown = match_output(
        result,
        "*ERROR at teardown of test_last*",
        "E       ValueError: at the end",
        "*Captured stdout teardown*",
        "stdout of rank 0:",
        "printed at the end",
        "*FAILURES*",
        "E       fixture 'nothing' not found",
        "in rank ? of 2",
        "E       ValueError: in set-up",
        "Captured log setup:",
        "*about to break*",
        "*test_it.py:*: UserWarning: only reported",
        "*= 2 failed, 2 passed, 1 error in *",
    )
    assert "hidden" not in shown


def test_bad_marks_are_reported(run_pytest):
    result = run_pytest(
        """
@pytest.mark.mpwatch(nprocs=0)
def test_number(): ...
@pytest.mark.mpwatch(nproc=2)
def test_name(): ...
@pytest.mark.mpwatch(2, logs=None)
def test_logs(): ...
@pytest.mark.mpwatch(1, env={"PYTHONHOME": "/nowhere"})
def test_start(): ...
"""
    )
    result.assert_outcomes(failed=4)
    shown = match_output(
        result,
        "mark mpwatch: nprocs must be at least 1, *not 0",
        "mark mpwatch: *missing 1 required positional argument: 'nprocs'*",
        "mark mpwatch: * got multiple values for keyword argument 'logs'",
        "*_ test_start _*",
        "*No module named 'encodings'*",
    )
    assert "mpwatch/" not in shown


@pytest.mark.slow
def test_ranks_that_do_not_meet_in_a_collective_fail_soon(run_pytest):
    """The plugin waits for less time than a run does, which ends them after a minute."""
    result = run_pytest(
        """
import torch.distributed

@pytest.mark.mpwatch(nprocs=2, backend="gloo", timeout=50)
def test_one_waits():
    if mpwatch.current_worker().rank == 0:
        torch.distributed.barrier()
"""
    )
    result.assert_outcomes(failed=1)
    match_output(result, "rank 1 has returned, but rank 0 waits for it in barrier*")  # not "... did not end within timeout"


@pytest.mark.slow
def test_the_page_shows_the_output_of_the_example_with_a_process_group(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("CI", raising=False)  # with it, pytest does not shorten texts
    pytester.copy_example(str(ROOT / "examples" / "test_shards.py"))
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(passed=2, failed=1)
    shown = re.search(r"= FAILURES =+\n(.*\n)=+ short test summary", result.stdout.str(), re.DOTALL)[1]
    page = (ROOT / "docs" / "how-to" / "pytest.md").read_text()
    assert shown in re.findall(r"```text.*?\n(.*?)```", page, re.DOTALL)

"""Tests run on ranks that have a process group. After a failure, the next test gets a working process group."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest_plugins = "pytester"

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpwatch(nprocs=2, backend="gloo")
counter = 0

def sum_over_ranks():
    tensor = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(tensor)
    return tensor.item()

@pytest.fixture(scope="module")
def group():
    return dist.new_group()

@pytest.fixture(autouse=True)
def count():
    global counter
    counter += 1

def test_sum(group):
    assert sum_over_ranks() == 3

def test_one_raises_and_the_other_returns(group):
    if dist.get_rank() == 1:
        raise ValueError("bad")

def test_the_same_ranks_and_a_new_group(group):
    assert counter == 3
    dist.barrier(group)
    assert sum_over_ranks() == 3

def test_one_raises_and_the_other_waits(group):
    if dist.get_rank() == 1:
        raise ValueError("bad")
    sum_over_ranks()

def test_new_ranks(group):
    assert counter == 1
    dist.barrier(group)
    assert sum_over_ranks() == 3
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return lambda: pytester.runpytest_subprocess("-p", "mpwatch.integrations.pytest_plugin", "-p", "no:cacheprovider")


def test_the_process_group_works_after_a_failure_on_one_rank(pytester, run):
    pytester.makepyfile(TESTS)
    result = run()
    result.assert_outcomes(passed=3, failed=2)
    first = ["E * ValueError: bad", "E * in rank 1 of 2", "E * rank 0: had returned"]
    second = ["E * ValueError: bad", "E * rank 0: stopped by the watcher in all_reduce (*"]
    result.stdout.fnmatch_lines(first + second)


def test_the_page_shows_the_output_of_the_example(pytester, run, monkeypatch):
    monkeypatch.delenv("CI", raising=False)  # with it, pytest does not shorten texts
    pytester.copy_example(str(ROOT / "examples" / "test_shards.py"))
    result = run()
    result.assert_outcomes(passed=2, failed=1)
    shown = re.search(r"= FAILURES =+\n(.*\n)=+ short test summary", result.stdout.str(), re.DOTALL)[1]
    page = (ROOT / "docs" / "how-to" / "pytest.md").read_text()
    assert shown in re.findall(r"```text.*?\n(.*?)```", page, re.DOTALL)

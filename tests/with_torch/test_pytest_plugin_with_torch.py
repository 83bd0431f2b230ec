"""The page about pytest shows what its example with a process group prints."""

import re
from pathlib import Path

import pytest

from support.pytest_runs import PLUGIN

pytestmark = pytest.mark.slow
pytest_plugins = "pytester"

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_output_of_the_example(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("CI", raising=False)  # with it, pytest does not shorten texts
    pytester.copy_example(str(ROOT / "examples" / "test_shards.py"))
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(passed=2, failed=1)
    shown = re.search(r"= FAILURES =+\n(.*\n)=+ short test summary", result.stdout.str(), re.DOTALL)[1]
    page = (ROOT / "docs" / "how-to" / "pytest.md").read_text()
    assert shown in re.findall(r"```text.*?\n(.*?)```", page, re.DOTALL)

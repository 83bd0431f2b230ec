"""The outputs in the README are what its code and the examples print, and its links and names exist."""

import inspect
import re
from pathlib import Path

import pytest

import mpwatch
from support.programs import ENV, python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def test_the_readme_shows_the_output_of_the_first_example():
    (_, code), (_, output) = BLOCKS[0], BLOCKS[1]
    assert python("-c", code).stdout == output


@pytest.mark.slow
def test_the_readme_shows_the_output_of_the_crash_example():
    done = python("-W", "default", "examples/crash.py", cwd=ROOT, env={**ENV, "PYTHONWARNINGS": "default"}, check=False)
    printed = re.sub(r'File "[^"]*/(?=examples/)', 'File "', done.stderr)
    assert done.returncode == 1
    assert without_carets(printed) == without_carets(BLOCKS[2][1])


def without_carets(text):
    """Leave out the lines that mark a part of the line above. Python 3.13 and newer mark fewer parts."""
    return re.sub(r"^ +[~^]+\n", "", text, flags=re.MULTILINE)


def test_the_links_of_the_readme_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_options_and_names_in_the_readme_exist():
    used = {name for call in re.findall(r"\brun\((.*?)\)`", README) for name in re.findall(r"(\w+)=", call)}
    assert len(used) > 4
    assert used <= set(inspect.signature(mpwatch.run).parameters)
    names = set(re.findall(r"mpwatch\.(\w+)\(", README))
    assert names <= set(mpwatch.__all__) | {"mpwatch"}  # pytest.mark.mpwatch

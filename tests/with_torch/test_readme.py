"""The outputs in the README are what its code and the examples print."""

import re
from pathlib import Path

from support.programs import ENV, python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def test_the_readme_shows_the_output_of_the_first_example():
    (_, code), (_, output) = BLOCKS[0], BLOCKS[1]
    assert python("-c", code).stdout == output


def test_the_readme_shows_the_output_of_the_crash_example():
    done = python("-W", "default", "examples/crash.py", cwd=ROOT, env={**ENV, "PYTHONWARNINGS": "default"}, check=False)
    printed = re.sub(r'File "[^"]*/(?=examples/)', 'File "', done.stderr)
    assert done.returncode == 1
    assert without_carets(printed) == without_carets(BLOCKS[2][1])


def without_carets(text):
    """Leave out the lines that mark a part of the line above. Python 3.13 and newer mark fewer parts."""
    return re.sub(r"^ +[~^]+\n", "", text, flags=re.MULTILINE)


def test_the_code_of_the_readme_compiles():
    for language, code in BLOCKS:
        assert language != "python" or compile(code, "README.md", "exec")


def test_the_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > 125] == []


def test_the_links_of_the_readme_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if not (ROOT / link).is_file()] == []
    assert len([link for link in links if link.startswith("docs/") and link.endswith(".md")]) == 5
    assert "index-url" not in README  # such addresses change
    assert "/whl" not in README


def test_the_options_and_names_in_the_readme_exist():
    import inspect

    import mpwatch

    used = {name for call in re.findall(r"\brun\((.*?)\)`", README) for name in re.findall(r"(\w+)=", call)}
    assert len(used) > 4
    assert used <= set(inspect.signature(mpwatch.run).parameters)
    names = set(re.findall(r"mpwatch\.(\w+)\(", README))
    assert names <= set(mpwatch.__all__) | {"mpwatch"}  # pytest.mark.mpwatch

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


def test_the_restart_policy_of_the_readme_is_valid():
    import mpwatch

    (code,) = (code for _, code in BLOCKS if code.startswith("policy = "))
    names = {"mpwatch": mpwatch}
    exec(code.partition("result = ")[0], names)
    assert mpwatch.FailureKind.OOM in names["policy"].causes


def test_the_options_in_the_readme_are_those_of_run():
    import inspect

    import mpwatch

    named = {
        name for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", README, re.MULTILINE) for name in re.findall(r"\w+", row)
    }
    assert {name for name in named if name.islower()} == set(inspect.signature(mpwatch.run).parameters) - {"fn"}

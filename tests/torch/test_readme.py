"""What the README shows is what its code and the examples print."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from programs import ENV, python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def test_the_first_example_prints_what_is_shown():
    (_, code), (_, shown) = BLOCKS[0], BLOCKS[1]
    assert python("-c", code).stdout == shown


def test_the_crash_looks_as_it_is_shown():
    done = python("-W", "default", "examples/crash.py", cwd=ROOT, env={**ENV, "PYTHONWARNINGS": "default"}, check=False)
    printed = re.sub(r'File "[^"]*/(?=examples/)', 'File "', done.stderr)
    assert (done.returncode, printed) == (1, BLOCKS[2][1])


def test_its_code_can_be_read_by_python():
    for language, code in BLOCKS:
        assert language != "python" or compile(code, "README.md", "exec")


def test_the_policy_is_one():
    import mpwatch

    (code,) = (code for _, code in BLOCKS if code.startswith("policy = "))
    names = {"mpwatch": mpwatch}
    exec(code.partition("result = ")[0], names)
    assert mpwatch.FailureKind.OOM in names["policy"].causes


def test_the_options_are_those_of_run():
    import inspect

    import mpwatch

    named = {
        name for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", README, re.MULTILINE) for name in re.findall(r"\w+", row)
    }
    assert {name for name in named if name.islower()} == set(inspect.signature(mpwatch.run).parameters) - {"fn"}

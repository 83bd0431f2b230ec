"""The pytest plugin in a terminal: `--pdb` and `breakpoint()` open pdb in the ranks."""

import re

from support.programs import ENV
from support.prompts import DebuggedProgram
from support.pytest_runs import PLUGIN

SOURCE = """
import mpwatch, pytest

@pytest.fixture
def letter():
    yield "a"
    print("the fixture is torn down")

@pytest.mark.mpwatch(2)
def test_fails(letter):
    number = mpwatch.current_worker().rank + 7
    assert number == 7

@pytest.mark.mpwatch(2)
def test_stops():
    number = mpwatch.current_worker().rank + 5
    if number == 5:
        breakpoint()

def test_without_ranks():
    assert True
"""


class PytestProgram(DebuggedProgram):
    def __init__(self, *arguments, env):
        super(DebuggedProgram, self).__init__(*arguments, env=env, columns=140, rows=300)


def test_pdb_opens_in_a_rank_that_fails_and_at_a_breakpoint(tmp_path):
    (tmp_path / "test_it.py").write_text(SOURCE)
    env = {**ENV, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONWARNINGS": "default"}
    with PytestProgram("-m", "pytest", *PLUGIN, f"--rootdir={tmp_path}", str(tmp_path), "--pdb", env=env) as program:
        assert program.wait_for_prompt() == "(rank 1) (Pdb)"
        assert program.ask("p number, letter")[0] == "(8, 'a')"
        assert program.ask("c")[-1] == "(rank 0) (Pdb)"
        assert program.ask("p number")[0] == "5"
        program.type(b"c\r")
        assert program.end() == 1
    text = "\n".join(program.rows())
    assert "1 failed, 2 passed" in text
    assert "assert 8 == 7" in text
    assert len(re.findall(r"\(Pdb\)", text)) == 4

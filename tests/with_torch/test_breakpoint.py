"""`breakpoint()`, torch's own breakpoint and `post_mortem` in ranks that wait for one another."""

from pathlib import Path

import pytest

from support.programs import ENV
from support.prompts import DebuggedProgram

PROGRAM = Path(__file__).with_name("debugged_training.py")


@pytest.fixture
def program():
    with DebuggedProgram(PROGRAM, "", None, env={**ENV, "PYTHONWARNINGS": "default"}) as program:
        yield program


@pytest.mark.slow
def test_a_training_in_a_terminal(program):
    assert program.wait_for_prompt() == "(rank 2) (Pdb)"
    assert program.ask("p step, gradient")[0] == "(3, tensor([5.]))"
    assert program.ask("up")[0] == "*** Oldest frame"
    assert any(row.startswith("ranks 0-1, 3: in all_reduce (debugged_training.py:") for row in program.ask("ranks"))
    for _ in range(10):
        program.ask("n")
    assert program.ask("p step")[0] in ("5", "6")
    rows = program.ask("c")  # the prompt that follows is that of torch's breakpoint
    assert "values: [240.0, 240.0, 240.0, 240.0]" in rows
    assert "Type 'up' to get to the frame that called dist.breakpoint(rank=1)" in rows
    assert rows[-1] == "(rank 1) (Pdb)"
    program.ask("up")
    assert program.ask("p weights")[0] == "tensor([1., 1.])"
    rows = program.ask("c")  # the prompt that follows is that of the failure
    assert "values: [[6.0, 6.0], [6.0, 6.0], [6.0, 6.0], [6.0, 6.0]]" in rows
    assert "the rank has raised ValueError: bad batch" in rows
    assert program.ask("p weights")[0] == "tensor([1., 1.])"
    assert any(row.startswith("rank 3: in all_reduce (debugged_training.py:") for row in program.ask("rank 3"))
    rows = program.finish("q")
    assert any(row.startswith("rank 1 failed first: ValueError: bad batch (debugged_training.py:") for row in rows)

"""`breakpoint()` and torch's own breakpoint in ranks that wait for one another."""

from pathlib import Path

import pytest

from support.programs import ENV
from support.prompts import DebuggedProgram

PROGRAM = Path(__file__).with_name("debugged_training.py")


@pytest.mark.slow
def test_a_training_in_a_terminal():
    with DebuggedProgram(PROGRAM, "", None, env={**ENV, "PYTHONWARNINGS": "default"}) as program:
        assert program.wait_for_prompt() == "(rank 2) (Pdb)"
        assert program.ask("p step, gradient")[0] == "(3, tensor([5.]))"
        rows = program.ask("c")  # the prompt that follows is that of torch's breakpoint
        assert "values: [240.0, 240.0, 240.0, 240.0]" in rows
        assert "Type 'up' to get to the frame that called dist.breakpoint(rank=1)" in rows
        assert rows[-1] == "(rank 1) (Pdb)"
        program.ask("up")
        assert program.ask("p weights")[0] == "tensor([1., 1.])"
        assert "values: [[6.0, 6.0], [6.0, 6.0], [6.0, 6.0], [6.0, 6.0]]" in program.finish("c")

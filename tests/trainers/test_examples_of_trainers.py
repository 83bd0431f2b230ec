"""Tests of the examples with accelerate and Ignite, run as users run them."""

import re
from pathlib import Path

import pytest

from support.programs import python

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["accelerate_digits.py", "ignite_digits.py"])
def test_two_ranks_learn_the_digits(name):
    out = python("-W", "default", str(EXAMPLES / name)).stdout
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", out)]
    assert len(losses) == 12
    assert losses[-1] < 0.5 * losses[0]
    assert float(re.search(r"test accuracy, of 2 ranks together: ([\d.]+)%", out)[1]) >= 95

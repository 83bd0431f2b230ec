"""What must hold with every engine. `run` is the function of an engine that takes fn, the ranks of each node and the options."""

import re
import sys
from pathlib import Path

import pytest

import mpwatch
from engines import functions

EXAMPLES = Path(__file__).parents[2] / "examples"

FAILURES = [
    (functions.raise_in_rank_3, {}),
    pytest.param(functions.exit_in_rank_3, {}, marks=pytest.mark.slow),
    pytest.param(functions.kill_rank_3, {}, marks=pytest.mark.slow),
    pytest.param(functions.return_lock_in_rank_3, {}, marks=pytest.mark.slow),
    (functions.make_closure_over_lock(), {}),
    (functions.wait, {"grace_period": -1}),
]


def check_failure(run, fn, options):
    """Check that four ranks on two nodes fail as four ranks on one machine do."""
    with pytest.raises(Exception, match="") as expected:
        mpwatch.run(fn, 4, **options)
    with pytest.raises(Exception, match="") as found:
        run(fn, 2, nodes=2, **options)
    assert type(found.value) is type(expected.value)
    assert type(found.value.__cause__) is type(expected.value.__cause__)
    assert _normalize(str(found.value)) == _normalize(str(expected.value))


def _normalize(text):
    """Leave out the nodes, which a run on one machine does not have, and what depends on the instant of a stop."""
    lines = re.sub(r" on node \d \(.*?\)", "", text).splitlines()
    return [line for line in lines if not line.startswith(("  rank", "  the return values"))]


def check_digits(run):
    """Train the example on two nodes of two ranks."""
    pytest.importorskip("sklearn")
    sys.path.append(str(EXAMPLES))
    try:
        import train_digits
    finally:
        sys.path.remove(str(EXAMPLES))
    result = run(train_digits.train, 2, nodes=2, args=(3,), kwargs={"verbose": False}, backend="gloo")
    assert len(result) == 4
    assert result[0].losses == result[3].losses
    assert result[0].accuracy >= 0.85

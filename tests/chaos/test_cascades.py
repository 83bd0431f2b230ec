"""In random cascades, the rank that failed first is blamed. `tox run -e faults` runs a thousand of each kind."""

import pytest

from chaos.cascades import run_cascades
from support.thoroughness import choose


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("any_error", "tolerated"), [(False, 0), (True, choose(0, 10))], ids=["lost peers", "any error"])
def test_the_cause_of_a_cascade_is_found(any_error, tolerated):
    wrong = run_cascades(choose(6, 1000), any_error=any_error)
    assert len(wrong) <= tolerated, wrong

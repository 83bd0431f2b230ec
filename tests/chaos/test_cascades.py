"""In random cascades, the rank that failed first is blamed. `tox run -e faults` runs a thousand of each kind."""

import pytest

from chaos.cascades import run_cascades
from support.thoroughness import choose


@pytest.mark.timeout(1800)
def test_the_cause_of_a_cascade_of_lost_connections_is_found():
    assert run_cascades(choose(12, 1000)) == []


@pytest.mark.timeout(1800)
def test_the_cause_is_found_if_its_victims_raise_any_error():
    wrong = run_cascades(choose(12, 1000), any_error=True)
    assert len(wrong) <= choose(0, 10), wrong

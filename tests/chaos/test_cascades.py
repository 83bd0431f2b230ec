"""In random cascades of lost connections, the rank that failed first is blamed."""

import pytest

from chaos.cascades import run_cascades


def test_the_cause_of_a_cascade_is_found():
    assert run_cascades(30) == []


@pytest.mark.slow
def test_the_cause_of_a_thousand_cascades_is_found():
    assert run_cascades(1000, first_seed=1000) == []

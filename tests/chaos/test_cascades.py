"""In random cascades of lost connections, the rank that failed first is blamed. `tox run -e faults` runs a thousand."""

import os

import pytest

from chaos.cascades import run_cascades


@pytest.mark.timeout(1800)
def test_the_cause_of_a_cascade_is_found():
    assert run_cascades(1000 if "MPWATCH_TEST_THOROUGHLY" in os.environ else 20) == []

"""In random cascades of lost connections, the rank that failed first is blamed. `tox run -e faults` runs a thousand."""

import pytest

from chaos.cascades import run_cascades
from support.thoroughness import choose


@pytest.mark.timeout(1800)
def test_the_cause_of_a_cascade_is_found():
    assert run_cascades(choose(12, 1000)) == []

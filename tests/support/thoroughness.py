"""How thorough the tests are. MPWATCH_TEST_THOROUGHLY asks for more: some environments in tox.ini set it."""

import os

import pytest

IS_THOROUGH = "MPWATCH_TEST_THOROUGHLY" in os.environ
THOROUGH = (pytest.mark.slow, pytest.mark.skipif(not IS_THOROUGH, reason="MPWATCH_TEST_THOROUGHLY is not set"))


def choose(usual, thorough):
    return thorough if IS_THOROUGH else usual

"""Fixtures for jobs on clusters. `tox run -e engines` runs these tests."""

import pytest


@pytest.fixture(autouse=True)
def _check_nothing_left():
    """Replace the check of all other tests: a cluster has threads and descriptors of its own. See test_ray.py."""

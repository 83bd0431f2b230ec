"""Fixtures of jobs of several nodes."""

from contextlib import closing

import pytest

from nodes.harness import Job


@pytest.fixture
def job():
    with closing(Job()) as job:
        yield job

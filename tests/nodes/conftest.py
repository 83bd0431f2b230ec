"""Fixtures of jobs of several nodes."""

import pytest

from nodes.harness import ForkServer, Job


@pytest.fixture(scope="session")
def fork_server():
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


@pytest.fixture
def job(fork_server):
    job = Job(fork_server)
    yield job
    job.close()

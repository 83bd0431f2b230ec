"""Fixtures of jobs of several nodes. Tests that cut cables are collected only if the machine allows network namespaces."""

import pytest

from nodes.harness import ForkServer, Job
from nodes.networks import Network, reason_against

NO_HOSTS_REASON = reason_against()
collect_ignore = ["test_partitions.py"] if NO_HOSTS_REASON else []


def pytest_terminal_summary(terminalreporter):
    if NO_HOSTS_REASON:
        terminalreporter.write_line(f"not collected in tests/nodes: {', '.join(collect_ignore)}: {NO_HOSTS_REASON}")


@pytest.fixture(scope="session")
def fork_server():
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


@pytest.fixture
def job(fork_server):
    """Nodes on loopback addresses."""
    job = Job(fork_server)
    yield job
    job.close()


@pytest.fixture
def job_on_hosts(fork_server):
    """Nodes on hosts of their own."""
    with Network(3) as network:
        job = Job(fork_server, network)
        yield job
        job.close()

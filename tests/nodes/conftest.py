"""Fixtures of jobs of several nodes. Tests that cut cables are collected only if the machine allows network namespaces.

MPWATCH_NODES_TIMES=20 pytest tests/nodes        runs each test twenty times
"""

import os

import pytest

from nodes.harness import Job
from nodes.networks import Network, may_rename_hosts, reason_against
from nodes.processes import ForkServer

TIMES = int(os.environ.get("MPWATCH_NODES_TIMES", "1"))
HOSTS = 3
NO_HOSTS_REASON = reason_against()

NEED_HOSTS = ["test_networks.py", "test_partitions.py"]

collect_ignore = NEED_HOSTS if NO_HOSTS_REASON else []


def pytest_terminal_summary(terminalreporter):
    if NO_HOSTS_REASON:
        terminalreporter.write_line(f"not collected in tests/nodes: {', '.join(NEED_HOSTS)}: {NO_HOSTS_REASON}")


if TIMES > 1:

    @pytest.fixture(autouse=True, params=range(TIMES))
    def _time(request):
        """The number of the repetition."""


@pytest.fixture(scope="session")
def fork_server():
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


@pytest.fixture(scope="session")
def hostnames():
    """Whether each node can have a hostname of its own."""
    return may_rename_hosts()


@pytest.fixture
def job(fork_server, hostnames):
    """Nodes on loopback addresses."""
    job = Job(fork_server, hostnames=hostnames)
    yield job
    job.close()


@pytest.fixture
def job_on_hosts(fork_server, hostnames):
    """Nodes on hosts of their own."""
    with Network(HOSTS) as network:
        job = Job(fork_server, network=network, hostnames=hostnames)
        yield job
        job.close()

"""Fixtures: jobs of nodes. Which tests there are depends on the machine: those that cut cables need hosts of their own.

MPWATCH_NODES_TIMES=20 pytest tests/nodes        each test twenty times
"""

import os

import pytest

from .harness import Job
from .networks import Network, may_rename_hosts, reason_against
from .processes import Nursery

TIMES = int(os.environ.get("MPWATCH_NODES_TIMES", "1"))
HOSTS = 3
WHY_NO_HOSTS = reason_against()

NEED_HOSTS = ["test_networks.py", "test_partitions.py"]

collect_ignore = NEED_HOSTS if WHY_NO_HOSTS else []


def pytest_terminal_summary(terminalreporter):
    if WHY_NO_HOSTS:
        terminalreporter.write_line(f"not collected in tests/nodes: {', '.join(NEED_HOSTS)}: {WHY_NO_HOSTS}")


if TIMES > 1:

    @pytest.fixture(autouse=True, params=range(TIMES))
    def _time(request):
        """Which time it is."""


@pytest.fixture(scope="session")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def hostnames():
    """Whether each node can have one of its own."""
    return may_rename_hosts()


@pytest.fixture
def job(nursery, hostnames):
    """Nodes on loopback addresses."""
    job = Job(nursery, hostnames=hostnames)
    yield job
    job.close()


@pytest.fixture
def job_on_hosts(nursery, hostnames):
    """Nodes on hosts of their own."""
    with Network(HOSTS) as network:
        job = Job(nursery, network=network, hostnames=hostnames)
        yield job
        job.close()

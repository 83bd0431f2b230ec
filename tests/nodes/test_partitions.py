"""Nodes on hosts of their own (network namespaces), whose cables are cut and mended. Skipped if the machine has no such hosts."""

import time

import pytest

import mpwatch
from nodes.harness import DETECTION_SECONDS, NODE_TIMEOUT

COORDINATOR, CUT = 0, 2  # hosts


def start(job, least=2):
    job.rendezvous["nnodes"] = least, 3
    nodes = job.start_several(3)
    return nodes, job.await_world(3)


def cut(job, host):
    """Cut the cable of the host. Return the time at which the cut began."""
    at = time.monotonic()
    job.network.cut(host)
    return at


def assert_coordinator_lost(job, node):
    outcome = node.outcome()
    assert type(outcome.error) is mpwatch.RunFailedError
    assert f"{job.network.address(COORDINATOR)}:{job.port}" in str(outcome.error)
    return outcome


def test_a_node_that_is_cut_off_stops_before_the_others_go_on_without_it(job_on_hosts):
    job = job_on_hosts
    nodes, first = start(job)
    at = cut(job, CUT)
    assert job.await_end(first.of(nodes[CUT])) - at < NODE_TIMEOUT
    second = job.await_world(2)
    assert first.ended_at < min(process.started_at for process in second)
    assert_coordinator_lost(job, nodes[CUT])
    job.network.mend(CUT)
    back = job.start(host=CUT)
    third = job.await_world(3)
    assert {process.node for process in third} == {nodes[0].name, nodes[1].name, back.name}
    third.order("return")
    job.results([*nodes[:CUT], back])


@pytest.mark.slow
def test_a_short_cut_costs_no_restart(job_on_hosts):
    job = job_on_hosts
    # TCP retransmits after 0.2, 0.6 and 1.4 s, so it may take twice as long as the cut.
    job.rendezvous["node_timeout"] = 2 * NODE_TIMEOUT
    _, world = start(job)
    cut(job, CUT)
    job.watch_for(0.5)
    job.network.mend(CUT)
    job.watch_for(NODE_TIMEOUT)
    assert [process.ended_at for process in world] == [None] * 3
    world.order("return")
    job.results()


def test_no_node_goes_on_without_its_coordinator(job_on_hosts):
    """Nodes that can still reach one another do not go on either. The node of the coordinator goes on alone."""
    job = job_on_hosts
    nodes, world = start(job, least=1)
    at = cut(job, COORDINATOR)
    for node in nodes[1:]:
        assert job.await_end(world.of(node)) - at < NODE_TIMEOUT
        assert assert_coordinator_lost(job, node).ended - at < DETECTION_SECONDS
    job.await_world(1).order("return")
    job.results(nodes[:1])

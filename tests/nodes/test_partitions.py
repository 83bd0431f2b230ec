"""Nodes on hosts of their own (network namespaces), whose cables are cut and mended. Skipped if the machine has no such hosts."""

import mpwatch
from nodes.harness import NODE_TIMEOUT

COORDINATOR, CUT = 0, 2  # hosts


def start(job, least=2):
    job.rendezvous |= {"nnodes": (least, 3), "node_timeout": NODE_TIMEOUT}
    nodes = job.start_several(3)
    return nodes, job.await_world(3)


def assert_coordinator_lost(job, node):
    outcome = node.outcome()
    assert type(outcome.error) is mpwatch.RunFailedError
    assert f"{job.network.address(COORDINATOR)}:{job.port}" in str(outcome.error)


def test_a_node_that_is_cut_off_stops_before_the_others_go_on_without_it(job_on_hosts):
    job = job_on_hosts
    nodes, first = start(job)
    job.network.cut(CUT)
    second = job.await_world(2)
    assert first.ended_at < min(process.started_at for process in second)
    assert_coordinator_lost(job, nodes[CUT])
    job.network.mend(CUT)
    back = job.start(host=CUT)
    third = job.await_world(3)
    assert {process.node for process in third} == {nodes[0].name, nodes[1].name, back.name}
    third.order("return")
    job.results([*nodes[:CUT], back])


def test_no_node_goes_on_without_its_coordinator(job_on_hosts):
    """Nodes that can still reach one another do not go on either. The node of the coordinator goes on alone."""
    job = job_on_hosts
    nodes, world = start(job, least=1)
    job.network.cut(COORDINATOR)
    for node in nodes[1:]:
        job.await_end(world.of(node))
        assert_coordinator_lost(job, node)
    job.await_world(1).order("return")
    job.results(nodes[:1])

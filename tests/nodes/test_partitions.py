"""Nodes on hosts of their own (network namespaces), whose cables are cut and mended. Skipped if the machine has no such hosts."""

from nodes.harness import NODE_TIMEOUT

STORE, CUT = 0, 2  # hosts
SHORT_CUT_SECONDS = 0.5  # seconds


def start(job, least=2):
    job.rendezvous["nnodes"] = least, 3
    nodes = job.start_several(3)
    return nodes, job.await_world(3)


def assert_success(*nodes):
    for node in nodes:
        outcome = node.outcome()
        assert (outcome.error, outcome.text, outcome.state) == ("", "", "SUCCEEDED")


def cut(job, host):
    """Cut the cable of the host. Return the time at which the cut began."""
    at = job.now()
    job.network.cut(host)
    return at


def test_hosts_form_a_job(job_on_hosts):
    nodes, world = start(job_on_hosts)
    assert world[0].worker["master_addr"] in [job_on_hosts.network.address(host) for host in range(3)]
    world.order("return")
    assert_success(*nodes)


def test_a_node_that_is_cut_off_stops_before_the_others_go_on_without_it(job_on_hosts):
    job = job_on_hosts
    nodes, first = start(job)
    cut_off = first.of(nodes[CUT])
    at = cut(job, CUT)
    assert job.await_end(cut_off) - at < NODE_TIMEOUT
    second = job.await_world(2)
    assert max(process.ended_at for process in first) < min(process.started_at for process in second)
    outcome = nodes[CUT].outcome()
    assert outcome.error == "RunFailedError"
    assert f"{job.network.address(STORE)}:{job.port}" in outcome.text
    job.network.mend(CUT)
    back = job.start(host=CUT)
    third = job.await_world(3)
    assert {process.node for process in third} == {nodes[0].name, nodes[1].name, back.name}
    third.order("return")
    assert_success(*nodes[:CUT], back)


def test_a_short_cut_costs_no_restart(job_on_hosts):
    job = job_on_hosts
    job.rendezvous["node_timeout"] = (
        2 * NODE_TIMEOUT
    )  # TCP retransmits after 0.2, 0.6 and 1.4 s, so it may take twice as long as the cut
    nodes, world = start(job)
    cut(job, CUT)
    job.watch_for(SHORT_CUT_SECONDS)
    job.network.mend(CUT)
    job.watch_for(NODE_TIMEOUT)
    assert [process.ended_at for process in world] == [None] * 3
    world.order("return")
    assert_success(*nodes)


def test_no_node_goes_on_without_its_store(job_on_hosts):
    """Nodes that can still reach one another do not go on either."""
    job = job_on_hosts
    nodes, world = start(job, least=1)
    at = cut(job, STORE)
    others = nodes[1:]
    for node in others:
        assert job.await_end(world.of(node)) - at < NODE_TIMEOUT
        outcome = node.outcome()
        assert outcome.error == "RunFailedError"
        assert outcome.ended - at < NODE_TIMEOUT + 1.0
        assert f"{job.network.address(STORE)}:{job.port}" in outcome.text
    job.await_world(1).order("return")  # this node serves the store itself
    assert_success(nodes[STORE])


def test_a_host_that_loses_power_is_lost_in_time(job_on_hosts):
    """Not even its kernel closes the connections."""
    job = job_on_hosts
    nodes, first = start(job)
    at = cut(job, CUT)
    nodes[CUT].kill()
    assert job.await_end(first) - at < NODE_TIMEOUT + 1.0
    job.await_world(2).order("return")
    assert_success(*nodes[:CUT])

"""Nodes on hosts of their own, whose cables are cut and mended. Collected only where the machine allows such hosts."""

from .harness import NODE_TIMEOUT

STORE, CUT = 0, 2  # hosts
MOMENT = 0.5  # seconds


def start(job, least=2):
    job.terms["nnodes"] = least, 3
    nodes = job.start_several(3)
    return nodes, job.await_world(3)


def assert_success(*nodes):
    for node in nodes:
        outcome = node.outcome()
        assert (outcome.error, outcome.text, outcome.state) == ("", "", "SUCCEEDED")


def cut(job, host):
    """Returns when that began."""
    at = job.now()
    job.network.cut(host)
    return at


def test_hosts_form_a_job(job_on_hosts):
    nodes, world = start(job_on_hosts)
    assert world[0].who["master_addr"] in [job_on_hosts.network.address(host) for host in range(3)]
    world.order("return")
    assert_success(*nodes)


def test_a_node_that_is_cut_off_stops_before_the_others_go_on_without_it(job_on_hosts):
    job = job_on_hosts
    nodes, first = start(job)
    cut_off = first.of(nodes[CUT])
    at = cut(job, CUT)
    assert job.await_end(cut_off) - at < NODE_TIMEOUT
    second = job.await_world(2)
    assert max(life.ended_at for life in first) < min(life.began_at for life in second)
    outcome = nodes[CUT].outcome()
    assert outcome.error == "RunFailedError"
    assert f"{job.network.address(STORE)}:{job.port}" in outcome.text
    job.network.mend(CUT)
    back = job.start(host=CUT)
    third = job.await_world(3)
    assert {life.node for life in third} == {nodes[0].name, nodes[1].name, back.name}
    third.order("return")
    assert_success(*nodes[:CUT], back)


def test_a_cut_for_a_moment_harms_nobody(job_on_hosts):
    job = job_on_hosts
    job.terms["node_timeout"] = 2 * NODE_TIMEOUT  # TCP, which is sent again after 0.2, 0.6 and 1.4 s, may take twice as long
    nodes, world = start(job)
    cut(job, CUT)
    job.watch_for(MOMENT)
    job.network.mend(CUT)
    job.watch_for(NODE_TIMEOUT)
    assert [life.ended_at for life in world] == [None] * 3
    world.order("return")
    assert_success(*nodes)


def test_without_its_store_nobody_goes_on(job_on_hosts):
    """Nor do those who could still reach one another."""
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
    job.await_world(1).order("return")  # it has its store
    assert_success(nodes[STORE])


def test_a_host_that_loses_its_power_is_not_waited_for(job_on_hosts):
    """Nobody says goodbye for it, not even its kernel."""
    job = job_on_hosts
    nodes, first = start(job)
    at = cut(job, CUT)
    nodes[CUT].kill()
    assert job.await_end(first) - at < NODE_TIMEOUT + 1.0
    job.await_world(2).order("return")
    assert_success(*nodes[:CUT])

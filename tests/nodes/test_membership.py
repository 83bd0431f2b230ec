"""Nodes that are lost, leave or join during a job, and the node that serves the store."""

import re
import signal

import pytest

from nodes.harness import AT_ONCE, NODE_TIMEOUT

DETECTION_SECONDS = NODE_TIMEOUT + 1.0  # from the loss of a node until the others have stopped their ranks


def node_of(job, process):
    return next(node for node in job.nodes if node.name == process.node)


def counts(world):
    return {process.worker["restart_count"] for process in world}


def assert_success(*nodes):
    for node in nodes:
        outcome = node.outcome()
        assert (outcome.error, outcome.text, outcome.state) == ("", "", "SUCCEEDED")


@pytest.mark.parametrize(("least", "most"), [(1, 2), (2, 3)])
def test_the_job_goes_on_without_a_node_that_was_killed(job, least, most):
    job.rendezvous["nnodes"] = least, most
    nodes = job.start_several(most, nprocs=2)
    first = job.await_world(2 * most)
    killed_at = nodes[-1].kill()
    assert job.await_end(first) - killed_at < DETECTION_SECONDS
    second = job.await_world(2 * least)
    assert counts(second) == {1}
    assert second[0].worker["group_world_size"] == least
    second.order("return")
    assert_success(*nodes[:-1])


def test_without_enough_nodes_the_job_fails_and_names_the_one_that_was_lost(job):
    kept, lost = job.start_several(2, nprocs=2)
    world = job.await_world(4)
    killed_at = lost.kill()
    outcome = kept.outcome()
    assert outcome.error == "RunFailedError"
    assert outcome.ended - killed_at < DETECTION_SECONDS
    verdict, *others = outcome.text.splitlines()
    loss = f"its program sent no sign of life for {NODE_TIMEOUT} s (node_timeout)"
    assert re.fullmatch(rf"node \d \({lost.hostname}\) with ranks (0-1|2-3) was lost: {re.escape(loss)}", verdict)
    assert not any("lost" in line for line in others)
    assert outcome.root_cause is None or outcome.root_cause["hostname"] == lost.hostname
    assert world.ended_at - killed_at < DETECTION_SECONDS


def test_a_lost_node_is_replaced_if_restarts_are_left(job):
    job.start_several(2, max_restarts=1)
    first = job.await_world(2)
    kept, lost = job.nodes
    lost.kill()
    job.await_end(first)
    substitute = job.start(max_restarts=1)
    second = job.await_world(2)
    assert {process.node for process in second} == {kept.name, substitute.name}
    assert counts(second) == {1}
    second.order("return")
    assert_success(kept, substitute)


def test_a_newcomer_joins_and_costs_no_restart(job):
    job.rendezvous["nnodes"] = 1, 2
    first = job.start(max_restarts=0)
    alone = job.await_world(1)
    second = job.start(max_restarts=0)
    world = job.await_world(2)
    assert alone.ended_at is not None
    assert counts(world) == {1}
    world.order("return")
    assert_success(first, second)
    assert [attempt["state"] for attempt in first.outcome().attempts] == ["STOPPED", "SUCCEEDED"]


def test_a_newcomer_costs_no_restart_if_ranks_wait_for_ranks_of_other_nodes(job):
    """The nodes stop at different times. Ranks that still run then fail because they lose a connection."""
    job.rendezvous["nnodes"] = 2, 3
    nodes = job.start_several(2, max_restarts=0)
    job.await_world(2).order("wait_for_rank_0")
    nodes.append(job.start(max_restarts=0))
    world = job.await_world(3)
    assert counts(world) == {1}
    world.order("return")
    assert_success(*nodes)
    for node in nodes[:2]:
        assert [attempt["state"] for attempt in node.outcome().attempts] == ["STOPPED", "SUCCEEDED"]
        assert not any(node.outcome().blamed.values())


def test_after_a_newcomer_all_restarts_are_left(job):
    job.rendezvous["nnodes"] = 1, 2
    job.start(max_restarts=1)
    job.await_world(1)
    job.start(max_restarts=1)
    job.await_world(2)[0].order("raise", "once")
    job.await_world(2).order("return")
    assert_success(*job.nodes)


def test_a_node_beyond_the_maximum_cannot_join(job):
    first = job.start(rendezvous={"nnodes": 1})
    world = job.await_world(1)
    second = job.start(rendezvous={"nnodes": 1, "join_timeout": 3.0})
    assert second.outcome().error == "LaunchError"
    assert world.ended_at is None
    world.order("return")
    assert_success(first)


def test_the_node_of_rank_0_is_replaced(job):
    store = job.start_store()
    job.rendezvous["nnodes"] = 2, 3
    job.start_several(3)
    first = job.await_world(3)
    lost = node_of(job, first[0])
    killed_at = lost.kill()
    assert job.await_end(first) - killed_at < DETECTION_SECONDS
    second = job.await_world(2)
    assert second[0].worker["master_addr"] != first[0].worker["master_addr"]
    assert counts(second) == {1}
    second.order("return")
    assert_success(*(node for node in job.nodes if node not in (store, lost)))
    store.kill()
    store.exit_status()


def test_if_the_store_is_lost_all_nodes_end_and_name_it(job):
    store = job.start_store()
    nodes = job.start_several(2, nprocs=2)
    world = job.await_world(4)
    killed_at = store.kill()
    assert job.await_end(world) - killed_at < NODE_TIMEOUT
    for outcome in job.outcomes(nodes):
        assert outcome.error == "RunFailedError"
        assert outcome.ended - killed_at < DETECTION_SECONDS
        assert f"127.0.0.1:{job.port}" in outcome.text


def test_if_the_node_that_serves_the_store_is_lost_all_nodes_end_and_name_the_store(job):
    job.rendezvous["nnodes"] = 1, 3
    host, *others = job.start_several(3)
    world = job.await_world(3)
    killed_at = host.kill()
    assert job.await_end(world) - killed_at < NODE_TIMEOUT
    for outcome in job.outcomes(others):
        assert outcome.error == "RunFailedError"
        assert outcome.ended - killed_at < DETECTION_SECONDS
        assert f"127.0.0.1:{job.port}" in outcome.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_job_goes_on_without_a_node_that_receives_a_signal(job, number):
    """The node reports that it leaves, so the others need not wait for `node_timeout`."""
    job.rendezvous["nnodes"] = 1, 2
    kept, leaving = job.start_several(2)
    first = job.await_world(2)
    at = leaving.send(number)
    assert job.await_end(first) - at < AT_ONCE
    second = job.await_world(1)
    assert counts(second) == {1}
    second.order("return")
    assert_success(kept)
    if number == signal.SIGINT:
        assert leaving.outcome().error == "KeyboardInterrupt"
    else:
        assert leaving.exit_status() == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nodes_that_cannot_go_on_name_the_node_that_has_left(job, number):
    kept, leaving = job.start_several(2)
    job.await_world(2)
    at = leaving.send(number)
    outcome = kept.outcome()
    leaving.exit_status()
    assert outcome.error == "RunFailedError"
    assert outcome.ended - at < AT_ONCE
    assert leaving.hostname in outcome.text.splitlines()[0]
    assert signal.Signals(number).name in outcome.text
    assert "no sign of life" not in outcome.text


def test_the_node_that_serves_the_store_may_leave(job):
    """It stays until all other nodes know that it leaves."""
    leaving, *others = job.start_several(3, rendezvous={"nnodes": 3})
    world = job.await_world(3)
    at = leaving.send(signal.SIGINT)
    assert job.await_end(world) - at < AT_ONCE
    for outcome in job.outcomes(others):
        assert outcome.error == "RunFailedError"
        assert "SIGINT" in outcome.text
        assert f"({leaving.hostname}) served the store" in outcome.notes[-1]
        assert "no sign of life" not in outcome.text
    assert leaving.outcome().error == "KeyboardInterrupt"


def test_a_watcher_that_was_stopped_for_too_long_rejoins_as_a_newcomer(job):
    job.rendezvous["nnodes"] = 2, 3
    nodes = job.start_several(3)
    first = job.await_world(3)
    stopped = nodes[-1]
    stopped.send(signal.SIGSTOP)
    job.await_world(2)
    stopped.send(signal.SIGCONT)
    third = job.await_world(3)
    assert first.ended_at is not None
    third.order("return")
    assert_success(*nodes)


def test_a_watcher_that_was_stopped_for_a_short_time_costs_no_restart(job):
    job.start_several(2)
    world = job.await_world(2)
    job.nodes[1].send(signal.SIGSTOP)
    job.watch_for(NODE_TIMEOUT / 4)
    job.nodes[1].send(signal.SIGCONT)
    job.watch_for(NODE_TIMEOUT)
    assert [process.ended_at for process in world] == [None, None]
    world.order("return")
    assert_success(*job.nodes)


@pytest.mark.parametrize("minutes", [pytest.param(-5, marks=pytest.mark.slow), 5])
def test_a_wrong_clock_does_no_harm(job, minutes):
    job.rendezvous["nnodes"] = 2, 3
    job.start()
    job.start(skew_seconds=60 * minutes)
    first = job.await_world(2)
    job.watch_for(NODE_TIMEOUT)
    assert [process.ended_at for process in first] == [None, None]
    job.start()
    third = job.await_world(3)
    assert counts(third) == {1}
    third.order("return")
    assert_success(*job.nodes)


@pytest.mark.parametrize("minutes", [-5, 5])
def test_a_newcomer_with_a_wrong_clock_can_join(job, minutes):
    job.rendezvous["nnodes"] = 1, 2
    job.start()
    job.await_world(1)
    job.start(skew_seconds=60 * minutes)
    job.await_world(2).order("return")
    assert_success(*job.nodes)

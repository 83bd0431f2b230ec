"""Nodes that come and go: lost, leaving, newcomers; and the one that serves the store."""

import signal

import pytest

from .harness import NODE_TIMEOUT

NOTICED = NODE_TIMEOUT + 1.0  # seconds, from the loss of a node until the others have acted
AT_ONCE = 1.0  # seconds, where the others are told


def node_of(job, life):
    return next(node for node in job.nodes if node.name == life.node)


def counts(world):
    return {life.who["restart_count"] for life in world}


def assert_success(*nodes):
    for node in nodes:
        outcome = node.outcome()
        assert (outcome.error, outcome.text, outcome.state) == ("", "", "SUCCEEDED")


@pytest.mark.parametrize(("least", "most"), [(1, 2), (2, 3)])
def test_the_job_goes_on_without_a_node_that_was_killed(job, least, most):
    job.terms["nnodes"] = least, most
    nodes = job.start_several(most, nprocs=2)
    first = job.await_world(2 * most)
    killed_at = nodes[-1].kill()
    assert job.await_end(first) - killed_at < NOTICED
    second = job.await_world(2 * least)
    assert counts(second) == {1}
    assert second[0].who["group_world_size"] == least
    second.order("return")
    assert_success(*nodes[:-1])


def test_without_enough_nodes_the_job_fails_and_names_the_one_that_was_lost(job):
    kept, lost = job.start_several(2, nprocs=2)
    world = job.await_world(4)
    killed_at = lost.kill()
    outcome = kept.outcome()
    assert outcome.error == "RunFailedError"
    assert outcome.ended - killed_at < NOTICED
    assert lost.hostname in outcome.text.splitlines()[0]
    assert f"no sign of life for {NODE_TIMEOUT} s" in outcome.text
    assert outcome.root_cause is None or outcome.root_cause["hostname"] == lost.hostname
    assert world.ended_at - killed_at < NOTICED


def test_a_lost_node_is_waited_for_where_restarts_are_left(job):
    job.start_several(2, max_restarts=1)
    first = job.await_world(2)
    kept, lost = job.nodes
    lost.kill()
    job.await_end(first)
    substitute = job.start(max_restarts=1)
    second = job.await_world(2)
    assert {life.node for life in second} == {kept.name, substitute.name}
    assert counts(second) == {1}
    second.order("return")
    assert_success(kept, substitute)


def test_a_newcomer_is_taken_in_and_costs_no_restart(job):
    job.terms["nnodes"] = 1, 2
    first = job.start(max_restarts=0)
    alone = job.await_world(1)
    second = job.start(max_restarts=0)
    world = job.await_world(2)
    assert alone.ended_at is not None
    assert counts(world) == {1}
    world.order("return")
    assert_success(first, second)
    assert [attempt["state"] for attempt in first.outcome().attempts] == ["STOPPED", "SUCCEEDED"]


def test_a_newcomer_costs_nothing_where_ranks_wait_for_those_of_other_nodes(job):
    """These are stopped first, on some node, and the others complain of that."""
    job.terms["nnodes"] = 2, 3
    nodes = job.start_several(2, max_restarts=0)
    job.await_world(2).order("hold_hands")
    nodes.append(job.start(max_restarts=0))
    world = job.await_world(3)
    assert counts(world) == {1}
    world.order("return")
    assert_success(*nodes)
    for node in nodes[:2]:
        assert [attempt["state"] for attempt in node.outcome().attempts] == ["STOPPED", "SUCCEEDED"]
        assert not any(node.outcome().blamed.values())


def test_after_a_newcomer_all_restarts_are_left(job):
    job.terms["nnodes"] = 1, 2
    job.start(max_restarts=1)
    job.await_world(1)
    job.start(max_restarts=1)
    job.await_world(2)[0].order("raise", "once")
    job.await_world(2).order("return")
    assert_success(*job.nodes)


def test_a_node_beyond_the_most_is_not_taken_in(job):
    first = job.start(terms={"nnodes": 1})
    world = job.await_world(1)
    second = job.start(terms={"nnodes": 1, "join_timeout": 3.0})
    assert second.outcome().error == "LaunchError"
    assert world.ended_at is None
    world.order("return")
    assert_success(first)


def test_the_node_of_rank_0_is_replaced(job):
    store = job.start_store()
    job.terms["nnodes"] = 2, 3
    job.start_several(3)
    first = job.await_world(3)
    lost = node_of(job, first[0])
    killed_at = lost.kill()
    assert job.await_end(first) - killed_at < NOTICED
    second = job.await_world(2)
    assert second[0].who["master_addr"] != first[0].who["master_addr"]
    assert counts(second) == {1}
    second.order("return")
    assert_success(*(node for node in job.nodes if node not in (store, lost)))
    store.kill()
    store.exit_status()


def test_when_the_store_is_gone_all_end_and_say_so(job):
    store = job.start_store()
    nodes = job.start_several(2, nprocs=2)
    world = job.await_world(4)
    killed_at = store.kill()
    assert job.await_end(world) - killed_at < NODE_TIMEOUT
    for outcome in job.outcomes(nodes):
        assert outcome.error == "RunFailedError"
        assert outcome.ended - killed_at < NOTICED
        assert f"127.0.0.1:{job.port}" in outcome.text


def test_when_the_node_is_gone_that_serves_the_store_all_end_and_say_so(job):
    job.terms["nnodes"] = 1, 3
    host, *others = job.start_several(3)
    world = job.await_world(3)
    killed_at = host.kill()
    assert job.await_end(world) - killed_at < NODE_TIMEOUT
    for outcome in job.outcomes(others):
        assert outcome.error == "RunFailedError"
        assert outcome.ended - killed_at < NOTICED
        assert f"127.0.0.1:{job.port}" in outcome.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_that_is_told_to_end_has_left(job, number):
    """The others know at once, and go on."""
    job.terms["nnodes"] = 1, 2
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
def test_those_who_cannot_go_on_say_that_a_node_has_left(job, number):
    kept, leaving = job.start_several(2)
    job.await_world(2)
    at = leaving.send(number)
    outcome = kept.outcome()
    leaving.exit_status()
    assert outcome.error == "RunFailedError"
    assert outcome.ended - at < AT_ONCE
    assert leaving.hostname in outcome.text.splitlines()[0]
    assert signal.Signals(number).name in outcome.text
    assert "sign of life" not in outcome.text


def test_the_node_that_serves_the_store_may_leave(job):
    """It sees to it that all know before it goes."""
    leaving, *others = job.start_several(3, terms={"nnodes": 3})
    world = job.await_world(3)
    at = leaving.send(signal.SIGINT)
    assert job.await_end(world) - at < AT_ONCE
    for outcome in job.outcomes(others):
        assert outcome.error == "RunFailedError"
        assert "SIGINT" in outcome.text
        assert f"({leaving.hostname}) served the store" in outcome.not_restarted
        assert "sign of life" not in outcome.text
    assert leaving.outcome().error == "KeyboardInterrupt"


def test_a_watcher_that_was_stopped_for_too_long_comes_back_as_a_newcomer(job):
    job.terms["nnodes"] = 2, 3
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


def test_a_watcher_that_was_stopped_for_a_moment_harms_nobody(job):
    job.start_several(2)
    world = job.await_world(2)
    job.nodes[1].send(signal.SIGSTOP)
    job.watch_for(NODE_TIMEOUT / 4)
    job.nodes[1].send(signal.SIGCONT)
    job.watch_for(NODE_TIMEOUT)
    assert [life.ended_at for life in world] == [None, None]
    world.order("return")
    assert_success(*job.nodes)


@pytest.mark.parametrize("minutes", [-5, 5])
def test_a_wrong_clock_does_no_harm(job, minutes):
    job.terms["nnodes"] = 2, 3
    job.start()
    job.start(skew_seconds=60 * minutes)
    first = job.await_world(2)
    job.watch_for(NODE_TIMEOUT)
    assert [life.ended_at for life in first] == [None, None]
    job.start()
    third = job.await_world(3)
    assert counts(third) == {1}
    third.order("return")
    assert_success(*job.nodes)


@pytest.mark.parametrize("minutes", [-5, 5])
def test_a_newcomer_with_a_wrong_clock_is_taken_in(job, minutes):
    job.terms["nnodes"] = 1, 2
    job.start()
    job.await_world(1)
    job.start(skew_seconds=60 * minutes)
    job.await_world(2).order("return")
    assert_success(*job.nodes)

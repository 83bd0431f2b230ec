"""Ctrl-Z (SIGTSTP) in one node of a job, which concerns its own ranks."""

import signal

import pytest

from mpwatch.os_support.processes import read_process_state
from nodes.harness import NODE_TIMEOUT

SHORT_SECONDS = 0.5


@pytest.fixture
def suspend(eventually):
    """Return a function that suspends a node with its rank, and returns when both are stopped."""

    def suspend(node, world):
        pids = [node.pid, world.of(node)[0].pid]
        node.send(signal.SIGTSTP)
        eventually(lambda: [read_process_state(pid).letter for pid in pids] == ["T", "T"])

    return suspend


def assert_success(outcomes):
    for outcome in outcomes:
        assert (outcome.error, outcome.text, outcome.state) == ("", "", "SUCCEEDED")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_short_suspension_of_a_node_costs_no_restart(job, suspend, number):
    job.start_several(2)
    world = job.await_world(2)
    suspended = job.nodes[number]
    suspend(suspended, world)
    job.watch_for(SHORT_SECONDS)
    suspended.send(signal.SIGCONT)
    job.watch_for(NODE_TIMEOUT)
    assert [process.ended_at for process in world] == [None] * 2
    world.order("return")
    assert_success(job.outcomes())


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_node_that_is_suspended_for_longer_is_lost(job, suspend, number):
    """The others go on without it. When it is continued, it stops its rank and says why."""
    store = job.start_store()
    job.rendezvous["nnodes"] = 1, 2
    job.start_several(2, max_restarts=1)
    world = job.await_world(2)
    nodes = job.nodes[1:]
    suspended, other = nodes[number], nodes[1 - number]
    suspend(suspended, world)
    job.await_world(1).order("return")
    assert_success([other.outcome()])
    suspended.send(signal.SIGCONT)
    outcome = suspended.outcome()
    assert outcome.error == "RunFailedError"
    assert outcome.text.startswith(f"node {number} ({suspended.hostname}) with rank {number} was lost: its ")
    store.kill()
    store.exit_status()

"""Nodes that leave because of a signal: they end with their ranks, and their ranks have the whole grace period."""

import os
import signal

import pytest

from nodes import tasks
from nodes.harness import AT_ONCE, NODE_TIMEOUT

GRACE = 60.0  # seconds; no test waits so long


def make_options(way, node):
    """Return the options of a node that meets the others in this way."""
    if way == "static":
        return {"rendezvous": {"backend": "static", "options": {"rank": node}, "is_host": None}}
    return {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("way", ["c10d", "static"])
def test_a_node_alone_ends_with_its_ranks(job, way, number):
    job.rendezvous["nnodes"] = 1
    node = job.start(**make_options(way, 0))
    world = job.await_world(1)
    node.send(number)
    node.exit_status()
    assert node.ended_at - job.await_end(world) < AT_ONCE


@pytest.mark.parametrize("way", [pytest.param("c10d", marks=pytest.mark.slow), "static"])
def test_each_node_ends_with_its_ranks_if_all_are_interrupted(job, way):
    """Rank 2 takes long to end. It needs neither the other nodes nor the store, which a node serves."""
    job.rendezvous["nnodes"] = 3
    for node in range(3):
        job.start(tasks.ignore_sigterm, args=(2,), grace_period=GRACE, **make_options(way, node))
    *others, slow = job.await_world(3)
    job.watch_for(NODE_TIMEOUT / 2)  # until each node knows that the round is complete
    for node in job.nodes:
        node.send(signal.SIGTERM)
    left = [node for node in job.nodes if node.name != slow.node]
    for node in left:
        node.exit_status()
    assert None not in [rank.ended_at for rank in others]
    assert slow.ended_at is None
    assert_grace_period(job, slow)
    for node in left:
        verdict, where = node.log.splitlines()
        assert verdict == "the run was stopped: this process received SIGTERM"
        assert "stopped by the watcher" in where


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_job_goes_on_when_the_ranks_of_a_node_that_leaves_have_ended(job, rank):
    store = job.start_store()
    job.rendezvous["nnodes"] = 1, 2
    job.start_several(2, tasks.ignore_sigterm, args=(rank,), grace_period=GRACE)
    slow = job.await_world(2)[rank]
    next(node for node in job.nodes if node.name == slow.node).send(signal.SIGTERM)
    assert_grace_period(job, slow)
    job.await_world(1).order("return")
    (kept,) = (node for node in job.nodes if node.name not in (store.name, slow.node))
    outcome = kept.outcome()
    assert (outcome.state, outcome.restarts, len(outcome.attempts)) == ("SUCCEEDED", 0, 2)
    store.kill()
    store.exit_status()


def assert_grace_period(job, slow):
    """Assert that the rank lives on for longer than `node_timeout`. Then kill it, and wait for the end of its node."""
    job.watch_for(2 * NODE_TIMEOUT)
    assert slow.ended_at is None
    os.kill(slow.pid, signal.SIGKILL)
    (node,) = (node for node in job.nodes if node.name == slow.node)
    node.exit_status()
    assert node.ended_at - slow.ended_at < AT_ONCE

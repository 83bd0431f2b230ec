"""Nodes that are lost, leave or join during a job, and the node of the coordinator."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

import mpwatch
from nodes import tasks
from nodes.harness import AT_ONCE, DETECTION_SECONDS, NODE_TIMEOUT

SLOW = pytest.mark.slow
GRACE = 60.0  # seconds; no test waits so long


def states(result):
    return [attempt.state.name for attempt in result.attempts]


# --- lost nodes


def test_the_job_goes_on_at_once_without_a_node_that_was_killed(job):
    """The others know that no more nodes can come, and do not wait for them."""
    job.rendezvous |= {"nnodes": (2, 3), "last_call_timeout": 20}
    *kept, lost = job.start_several(3, nprocs=2)
    first = job.await_world(6)
    killed_at = lost.kill()
    assert job.await_end(first) - killed_at < DETECTION_SECONDS
    second = job.await_world(4)
    assert time.monotonic() - killed_at < 2 * DETECTION_SECONDS
    assert second.restart_counts == {1}
    assert second[0].worker.group_world_size == 2
    second.order("return")
    assert [states(result) for result in job.results(kept)] == [["FAILED", "SUCCEEDED"]] * 2


def test_without_enough_nodes_the_job_fails_and_names_the_one_that_was_lost(job):
    kept, lost = job.start_several(2, nprocs=2)
    world = job.await_world(4)
    killed_at = lost.kill()
    outcome = kept.outcome()
    assert type(outcome.error) is mpwatch.RunFailedError
    assert outcome.ended - killed_at < DETECTION_SECONDS
    verdict, *others = str(outcome.error).splitlines()
    assert re.match(rf"node 1 \({lost.hostname}\) with ranks 2-3 was lost: its connection has ended", verdict)
    assert not any("lost" in line for line in others)
    assert outcome.result.root_cause.hostname == lost.hostname
    assert world.ended_at - killed_at < DETECTION_SECONDS


def test_if_the_node_of_the_coordinator_is_lost_all_nodes_end_and_name_it(job):
    job.rendezvous["nnodes"] = 1, 3
    host, *others = job.start_several(3)
    world = job.await_world(3)
    killed_at = host.kill()
    assert job.await_end(world) - killed_at < AT_ONCE
    for outcome in job.outcomes(others):
        assert type(outcome.error) is mpwatch.RunFailedError
        assert outcome.ended - killed_at < AT_ONCE
        assert f"127.0.0.1:{job.port}" in str(outcome.error)


# --- newcomers


def test_a_newcomer_costs_no_restart_if_ranks_wait_for_ranks_of_other_nodes(job):
    """The nodes stop at different times. Ranks that still run then fail because they lose a connection."""
    job.rendezvous["nnodes"] = 2, 3
    job.start_several(2, max_restarts=1)
    job.await_world(2).order("wait_for_rank_0")
    job.start(max_restarts=1)
    second = job.await_world(3)
    assert second.restart_counts == {1}
    second[0].order("raise", "once")
    job.await_world(3).order("return")
    first, _, newcomer = job.results()
    assert (states(first), first.restarts) == (["STOPPED", "FAILED", "SUCCEEDED"], 1)
    assert first.attempts[0].root_cause is None
    assert states(newcomer)[-1] == "SUCCEEDED"


# --- silent nodes


@SLOW
@pytest.mark.parametrize("is_of_rank_0", [True, False])
def test_a_watcher_that_was_stopped_for_too_long_rejoins_as_a_newcomer(job, is_of_rank_0):
    """The others have gone on without it. It does not end their job, and does not count them as lost."""
    job.rendezvous["nnodes"] = 2, 3
    job.start(rendezvous={"rank": 1}, max_restarts=0)
    job.start(rendezvous={"rank": 0 if is_of_rank_0 else 2}, max_restarts=0)
    job.start(rendezvous={"rank": 3}, max_restarts=0)
    first = job.await_world(3)
    stopped = job.nodes[1]
    assert job.node_of(first[0]) is job.nodes[1 if is_of_rank_0 else 0]
    stopped.send(signal.SIGSTOP)
    second = job.await_world(2)
    assert (second[0].worker.master_addr != first[0].worker.master_addr) == is_of_rank_0
    stopped.send(signal.SIGCONT)
    job.await_world(3).order("return")
    job.results()
    assert first.ended_at is not None


@pytest.fixture
def suspend(eventually):
    """Return a function that suspends a node with its rank, as Ctrl-Z does, and returns when both are stopped."""

    def suspend(node, world):
        pids = [node.pid, world.of(node)[0].pid]
        node.send(signal.SIGTSTP)
        eventually(lambda: all(") T " in Path(f"/proc/{pid}/stat").read_text() for pid in pids))

    return suspend


def test_a_short_suspension_of_a_node_costs_no_restart(job, suspend):
    job.start_several(2)
    world = job.await_world(2)
    suspend(job.nodes[1], world)
    job.watch_for(NODE_TIMEOUT / 4)
    job.nodes[1].send(signal.SIGCONT)
    job.watch_for(NODE_TIMEOUT)
    assert [process.ended_at for process in world] == [None] * 2
    world.order("return")
    job.results()


# --- nodes that leave because of a signal


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW)])
def test_the_job_goes_on_without_a_node_that_receives_a_signal(job, number):
    """The node reports that it leaves, so the others need not wait for `node_timeout`."""
    job.rendezvous["nnodes"] = 1, 2
    kept, leaving = job.start_several(2)
    first = job.await_world(2)
    at = leaving.send(number)
    assert job.await_end(first) - at < AT_ONCE
    second = job.await_world(1)
    assert second.restart_counts == {1}
    second.order("return")
    (result,) = job.results([kept])
    assert (result.restarts, len(result.attempts)) == (0, 2)
    if number == signal.SIGINT:
        assert type(leaving.outcome().error) is KeyboardInterrupt
    else:
        assert leaving.exit_status() == -signal.SIGTERM


@pytest.mark.parametrize("leaver", [0, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=SLOW)])
def test_nodes_that_cannot_go_on_name_the_node_that_has_left(job, number, leaver):
    """The node of the coordinator stays until all other nodes know that it leaves."""
    job.rendezvous["nnodes"] = 3
    job.start_several(3, grace_period=20.0)
    world = job.await_world(3)
    leaving = job.nodes[leaver]
    at = leaving.send(number)
    assert job.await_end(world) - at < AT_ONCE
    for outcome in job.outcomes([node for node in job.nodes if node is not leaving]):
        assert type(outcome.error) is mpwatch.RunFailedError
        assert outcome.ended - at < AT_ONCE
        assert leaving.hostname in str(outcome.error).splitlines()[0]
        assert signal.Signals(number).name in str(outcome.error)
        assert "no sign of life" not in str(outcome.error)
        assert leaver or f"the coordinator ran on node 0 ({leaving.hostname})" in outcome.result.notes[-1]
    leaving.exit_status()
    assert leaving.ended_at - at < AT_ONCE


@SLOW
def test_each_node_ends_with_its_ranks_if_all_are_interrupted(job):
    """Rank 2 takes long to end. It needs neither the other nodes nor the coordinator."""
    job.rendezvous["nnodes"] = 3
    job.start_several(3, tasks.ignore_sigterm, args=(2,), grace_period=GRACE)
    *others, slow = job.await_world(3)
    job.watch_for(NODE_TIMEOUT / 2)  # until each node knows that the round is complete
    for node in job.nodes:
        node.send(signal.SIGTERM)
    left = [node for node in job.nodes if node.name != slow.node]
    for node in left:
        node.exit_status()
        assert "received SIGTERM" in node.log.splitlines()[0]
    assert None not in [rank.ended_at for rank in others]
    assert_grace_period(job, slow)


def assert_grace_period(job, slow):
    """Assert that the rank lives on for longer than `node_timeout`. Then kill it, and wait for the end of its node."""
    job.watch_for(2 * NODE_TIMEOUT)
    assert slow.ended_at is None
    os.kill(slow.pid, signal.SIGKILL)
    node = job.node_of(slow)
    node.exit_status()
    assert node.ended_at - slow.ended_at < AT_ONCE

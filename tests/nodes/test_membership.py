"""Nodes that are lost, leave or join during a job, and the node of the coordinator."""

import os
import re
import signal
from pathlib import Path

import pytest

import mpwatch
from nodes import tasks
from nodes.harness import LONG, NODE_TIMEOUT

SLOW = pytest.mark.slow


def states(result):
    return [attempt.state.name for attempt in result.attempts]


# --- lost nodes


def test_the_job_goes_on_at_once_without_a_node_that_was_killed(job):
    """The others know that no more nodes can come, and do not wait for them."""
    job.rendezvous |= {"nnodes": (2, 3), "last_call_timeout": LONG}
    *kept, lost = job.start_several(3, nprocs=2)
    first = job.await_world(6)
    lost.kill()
    job.await_end(first)
    second = job.await_world(4)
    assert second.restart_counts == {1}
    assert second[0].worker.group_world_size == 2
    second.order("return")
    assert [states(result) for result in job.results(kept)] == [["FAILED", "SUCCEEDED"]] * 2


def test_without_enough_nodes_the_job_fails_and_names_the_one_that_was_lost(job):
    kept, lost = job.start_several(2, nprocs=2)
    world = job.await_world(4)
    lost.kill()
    outcome = kept.outcome()
    assert type(outcome.error) is mpwatch.RunFailedError
    verdict, *others = str(outcome.error).splitlines()
    assert re.match(rf"node 1 \({lost.hostname}\) with ranks 2-3 was lost: its connection has ended", verdict)
    assert not any("lost" in line for line in others)
    assert outcome.result.root_cause.hostname == lost.hostname
    job.await_end(world)


def test_if_the_node_of_the_coordinator_is_lost_all_nodes_end_and_name_it(job):
    job.rendezvous["nnodes"] = 1, 3
    host, *others = job.start_several(3)
    world = job.await_world(3)
    host.kill()
    for outcome in job.outcomes(others):
        assert type(outcome.error) is mpwatch.RunFailedError
        assert f"127.0.0.1:{job.port}" in str(outcome.error)
    job.await_end(world)


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
def test_a_watcher_that_was_stopped_for_too_long_rejoins_as_a_newcomer(job):
    """The others have gone on without it and rank 0. It does not end their job, and does not count them as lost."""
    job.rendezvous |= {"nnodes": (2, 3), "node_timeout": NODE_TIMEOUT}
    for rank in (1, 0, 3):
        job.start(rendezvous={"rank": rank}, max_restarts=0)
    first = job.await_world(3)
    stopped = job.node_of(first[0])
    assert stopped is job.nodes[1]
    stopped.send(signal.SIGSTOP)
    second = job.await_world(2)
    assert second[0].worker.master_addr != first[0].worker.master_addr
    stopped.send(signal.SIGCONT)
    job.await_world(3).order("return")
    job.results()
    assert first.ended_at is not None


def test_a_short_suspension_of_a_node_costs_no_restart(job, eventually):
    """As by Ctrl-Z."""
    job.rendezvous["node_timeout"] = NODE_TIMEOUT
    node, _ = job.start_several(2)
    world = job.await_world(2)
    node.send(signal.SIGTSTP)
    pids = [node.pid, world.of(node)[0].pid]
    eventually(lambda: all(") T " in Path(f"/proc/{pid}/stat").read_text() for pid in pids))
    job.watch_for(NODE_TIMEOUT / 4)
    node.send(signal.SIGCONT)
    job.watch_for(NODE_TIMEOUT)
    assert [process.ended_at for process in world] == [None] * 2
    world.order("return")
    job.results()


# --- nodes that leave because of a signal


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW)])
def test_the_job_goes_on_without_a_node_that_receives_a_signal(job, number):
    job.rendezvous["nnodes"] = 1, 2
    kept, leaving = job.start_several(2)
    job.await_world(2)
    leaving.send(number)
    second = job.await_world(1)
    assert second.restart_counts == {1}
    second.order("return")
    (result,) = job.results([kept])
    assert (result.restarts, len(result.attempts)) == (0, 2)
    if number == signal.SIGINT:
        assert type(leaving.outcome().error) is KeyboardInterrupt
    else:
        assert leaving.exit_status() == -signal.SIGTERM


@pytest.mark.parametrize(("number", "leaver"), [(signal.SIGINT, 0), pytest.param(signal.SIGTERM, 1, marks=SLOW)])
def test_nodes_that_cannot_go_on_name_the_node_that_has_left(job, number, leaver):
    """The node of the coordinator stays until all other nodes know that it leaves."""
    job.rendezvous["nnodes"] = 3
    job.start_several(3, grace_period=LONG)
    world = job.await_world(3)
    leaving = job.nodes[leaver]
    leaving.send(number)
    for outcome in job.outcomes([node for node in job.nodes if node is not leaving]):
        assert type(outcome.error) is mpwatch.RunFailedError
        assert leaving.hostname in str(outcome.error).splitlines()[0]
        assert signal.Signals(number).name in str(outcome.error)
        assert "no sign of life" not in str(outcome.error)
        assert leaver or f"the coordinator ran on node 0 ({leaving.hostname})" in outcome.result.notes[-1]
    leaving.exit_status()
    job.await_end(world)


@SLOW
def test_each_node_ends_with_its_ranks_if_all_are_interrupted(job):
    """Rank 2 takes longer than `node_timeout` to end. It needs neither the other nodes nor the coordinator."""
    job.rendezvous |= {"nnodes": 3, "node_timeout": NODE_TIMEOUT}
    job.start_several(3, tasks.ignore_sigterm, args=(2,), grace_period=LONG)
    *others, slow = job.await_world(3)
    job.watch_for(NODE_TIMEOUT / 2)  # until each node knows that the round is complete
    for node in job.nodes:
        node.send(signal.SIGTERM)
    for node in job.nodes:
        if node.name != slow.node:
            node.exit_status()
            assert "received SIGTERM" in node.log.splitlines()[0]
    assert None not in [rank.ended_at for rank in others]
    job.watch_for(2 * NODE_TIMEOUT)
    assert slow.ended_at is None
    os.kill(slow.pid, signal.SIGKILL)
    job.node_of(slow).exit_status()

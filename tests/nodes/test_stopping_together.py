"""All ranks of a job stop at the same step when a stop is requested on any node."""

import signal

import pytest

from nodes.harness import AT_ONCE, NODE_TIMEOUT

USR1 = {"stop": [signal.SIGUSR1]}


def check_stopped(job, stop_cause, size):
    outcomes = [node.outcome() for node in job.nodes]
    values = {rank: value for outcome in outcomes for rank, value in outcome.values.items()}
    assert [outcome.state for outcome in outcomes] == ["SUCCEEDED"] * len(outcomes)
    (step,) = {outcome.stopped_at for outcome in outcomes}
    assert values == dict.fromkeys(range(size), step)
    assert {outcome.stop_cause for outcome in outcomes} == {stop_cause}
    return step


@pytest.mark.parametrize("receiver", [0, 1])
def test_a_signal_to_one_node_stops_all_ranks_at_the_same_step(job, receiver):
    job.start_several(2, nprocs=2, **USR1)
    job.await_world(4).order("count_steps")
    job.watch_for(0.2)
    job.nodes[receiver].send(signal.SIGUSR1)
    assert check_stopped(job, "SIGUSR1", 4) > 0


def test_a_signal_to_all_nodes_is_one_request(job):
    job.start_several(3, rendezvous={"nnodes": 3}, **USR1)
    job.await_world(3).order("count_steps")
    for node in job.nodes:
        node.send(signal.SIGUSR1)
    check_stopped(job, "SIGUSR1", 3)


def test_a_rank_stops_all_ranks_of_the_job(job):
    job.start_several(2)
    world = job.await_world(2)
    world[0].order("count_steps")
    world[1].order("request_stop")
    check_stopped(job, "request_stop() in rank 1", 2)


def test_ranks_of_a_node_that_have_returned_have_passed_their_last_step(job):
    job.start_several(2, **USR1)
    world = job.await_world(2)
    world[1].order("return_after_steps", 10_000)
    node = next(node for node in job.nodes if node.name == world[1].node)
    job.wait_until(lambda: world[1].ended_at is not None, "the end of rank 1")
    node.send(signal.SIGUSR1)
    world[0].order("count_steps", 0.0)
    values = {rank: value for node in job.nodes for rank, value in node.outcome().values.items()}
    assert values[0] >= values[1] == 10_000


def test_a_request_before_the_nodes_have_met_ends_the_run(job):
    node = job.start(**USR1)
    job.watch_for(NODE_TIMEOUT / 2)
    sent_at = node.send(signal.SIGUSR1)
    outcome = node.outcome()
    assert outcome.ended - sent_at < AT_ONCE
    assert (outcome.error, outcome.stop_cause) == ("RunFailedError", "SIGUSR1")
    assert outcome.text.startswith("the run was stopped: a stop was requested, before its ranks were started")


@pytest.mark.parametrize("receiver", [0, 1])
def test_a_request_before_a_restart_ends_the_job(job, receiver):
    job.start_several(2, **USR1, max_restarts={"max_restarts": 3, "delay": 600.0, "max_delay": 600.0})
    world = job.await_world(2)
    world[0].order("exit", 3)
    job.await_end(world)
    job.watch_for(0.5)  # until the nodes prepare the restart
    sent_at = job.nodes[receiver].send(signal.SIGUSR1)
    for node in job.nodes:
        outcome = node.outcome()
        assert (outcome.error, len(outcome.attempts)) == ("RunFailedError", 1)
        assert outcome.ended - sent_at < AT_ONCE
        assert outcome.notes == ["not restarted: a stop was requested (SIGUSR1)"]


def test_a_request_while_the_nodes_meet_again_ends_the_run(job):
    store = job.start_store()
    kept, lost = job.start_several(2, max_restarts=3, **USR1)
    job.await_world(2).order("count_steps")
    lost.kill()
    lost.exit_status()
    job.watch_for(2 * NODE_TIMEOUT)
    sent_at = kept.send(signal.SIGUSR1)
    outcome = kept.outcome()
    assert outcome.ended - sent_at < AT_ONCE
    assert (outcome.error, outcome.stop_cause) == ("RunFailedError", "SIGUSR1")
    store.kill()
    store.exit_status()


def test_the_job_is_not_restarted_if_a_node_is_killed_after_the_request(job):
    job.rendezvous["nnodes"] = 1, 2
    store = job.start_store()
    kept, lost = job.start_several(2, max_restarts=3, **USR1)
    job.await_world(2).order("ignore_stop")
    kept.send(signal.SIGUSR1)
    job.watch_for(NODE_TIMEOUT / 2)
    lost.kill()
    lost.exit_status()
    outcome = kept.outcome()
    assert (outcome.error, len(outcome.attempts)) == ("RunFailedError", 1)
    assert outcome.notes == ["not restarted: a stop was requested (SIGUSR1)"]
    store.kill()
    store.exit_status()


def test_each_node_has_a_limit_for_its_ranks(job):
    job.start_several(2, stop={"signals": [signal.SIGUSR1], "timeout": 0.2})
    job.await_world(2).order("ignore_stop")
    receiver, other = job.nodes
    receiver.send(signal.SIGUSR1)
    assert receiver.exit_status() == -signal.SIGUSR1
    outcome = other.outcome()
    assert outcome.error in ("RunTimeoutError", "RunFailedError")
    assert outcome.stop_cause == "SIGUSR1"

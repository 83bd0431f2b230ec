"""All ranks of a job stop at the same step when a stop is requested on any node."""

import signal
from pathlib import Path

import pytest

import mpwatch
from nodes.harness import LONG

USR1 = {"stop": [signal.SIGUSR1]}


def assert_stopped_together(job, stop_cause, size):
    results = job.results()
    (step,) = {result.stopped_at for result in results}
    assert {rank: value for result in results for rank, value in result.items()} == dict.fromkeys(range(size), step)
    assert {result.stop_cause for result in results} == {stop_cause}
    return step


@pytest.mark.parametrize("receivers", [[1], pytest.param([0, 1], marks=pytest.mark.slow)])
def test_a_signal_to_any_nodes_stops_all_ranks_at_the_same_step(job, receivers):
    job.start_several(2, nprocs=2, **USR1)
    job.await_world(4).order("count_steps")
    job.watch_for(0.2)
    for receiver in receivers:
        job.nodes[receiver].send(signal.SIGUSR1)
    assert assert_stopped_together(job, "SIGUSR1", 4) > 0


def test_a_rank_stops_all_ranks_of_the_job(job):
    job.start_several(2)
    world = job.await_world(2)
    world[0].order("count_steps")
    world[1].order("request_stop")
    assert_stopped_together(job, "request_stop() in rank 1", 2)


def handles_usr1(node):
    caught = Path(f"/proc/{node.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> signal.SIGUSR1 - 1 & 1)


def test_a_request_before_the_nodes_have_met_ends_the_run(job, eventually):
    node = job.start(**USR1)
    eventually(lambda: handles_usr1(node))
    node.send(signal.SIGUSR1)
    outcome = node.outcome()
    assert str(outcome.error).startswith("the run was stopped: a stop was requested, before its ranks were started")
    assert outcome.result.stop_cause == "SIGUSR1"


def test_a_request_before_a_restart_ends_the_job(job):
    job.start_several(2, **USR1, max_restarts=mpwatch.RestartPolicy(3, delay=LONG, max_delay=LONG))
    world = job.await_world(2)
    world[0].order("exit", 3)
    job.await_end(world)
    job.watch_for(0.5)  # until the nodes prepare the restart
    job.nodes[1].send(signal.SIGUSR1)
    for outcome in job.outcomes():
        assert type(outcome.error) is mpwatch.RunFailedError
        assert len(outcome.result.attempts) == 1
        assert list(outcome.result.notes) == ["not restarted: a stop was requested (SIGUSR1)"]


def test_each_node_has_a_limit_for_its_ranks(job):
    receiver, other = (job.start(stop=mpwatch.StopPolicy([signal.SIGUSR1], timeout=limit)) for limit in (0.2, LONG))
    job.await_world(2).order("ignore_stop")
    receiver.send(signal.SIGUSR1)
    assert receiver.exit_status() == -signal.SIGUSR1
    outcome = other.outcome()
    assert isinstance(outcome.error, mpwatch.RunFailedError)
    assert outcome.result.stop_cause == "SIGUSR1"

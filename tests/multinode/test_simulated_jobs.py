"""Simulated jobs of many nodes with random failures.

Each job ends, all nodes report the same decision, and a failure costs a few messages for each node.
"""

import pytest

from mpwatch.multinode.protocol.messages import NextStep
from multinode.simulation import TIMEOUT, SimulatedJob

MESSAGES_PER_NODE = 11  # for a failure: failing, stop, report, decision, start and assignment, each written and read


def make_job_with_failing_ranks(n, failures, **options):
    job = SimulatedJob(n, **options)
    for k in range(failures):
        job.after(20.0 + 100.0 * k, lambda: fail_any_rank(job))
    return job


def fail_any_rank(job):
    job.rng.choice(job.alive()).fail_rank(job.rng.randrange(job.nprocs))


def count_messages_of_a_failure(n, failures=3):
    """Return the number of messages that one failure costs."""
    quiet = SimulatedJob(n)
    quiet.run()
    job = make_job_with_failing_ranks(n, failures)
    job.run()
    assert {node.decision.next_step for node in job.all()} == {NextStep.DONE}
    return (job.messages.total() - quiet.messages.total()) / job.failures


@pytest.mark.parametrize("n", [2, 10, 100, 300])
def test_messages_of_a_failure_grow_with_the_nodes_and_no_faster(n):
    assert count_messages_of_a_failure(n) <= MESSAGES_PER_NODE * n


def run_random_job(seed, n=100):
    """Ranks fail, nodes are lost, and replacements join."""
    job = SimulatedJob(n, nodes=(n // 2, n), seed=seed)
    rng = job.rng
    for k in range(rng.randrange(1, 12)):
        at = rng.uniform(0.0, 300.0)
        name = f"n{rng.randrange(n):05}"
        if rng.random() < 0.5:
            job.after(at, lambda: fail_any_rank(job))
        else:
            job.after(at, lambda name=name: job.kill(name))
            if rng.random() < 0.5:
                job.after(at + rng.uniform(0.0, 60.0), lambda k=k: job.add_node(f"m{k}"))
    job.run(until=3600.0)
    return job


@pytest.mark.parametrize("seed", range(20))
def test_all_remaining_nodes_reach_the_same_decision(seed):
    job = run_random_job(seed)
    assert job.is_over(), f"the job still runs after {job.now} s"
    alive = job.alive()
    assert {node.decision.next_step for node in alive} == {NextStep.DONE}
    assert len({node.decision.history for node in alive}) == 1
    assert {node.decision.attempt + 1 for node in alive} == {node.decision.history.attempts for node in alive}


@pytest.mark.slow
def test_a_job_of_a_thousand_nodes_survives_ranks_and_nodes():
    job = SimulatedJob(1000, nodes=(900, 1000), work=100.0)
    job.after(20.0, lambda: fail_any_rank(job))
    job.after(60.0, lambda: [job.kill(f"n{i:05}") for i in (0, 1, 999)])
    job.run()
    assert {node.decision.next_step for node in job.alive()} == {NextStep.DONE}
    assert len(job.alive()) == 997
    assert job.now < 60.0 + job.work + 3 * TIMEOUT


def run_stopping_job(seed, n=20):
    """A stop is requested on some nodes, at any time. In half of the jobs ranks fail and nodes are lost, too."""
    job = SimulatedJob(n, nodes=(n // 2, n), seed=seed)
    rng = job.rng
    for _ in range(rng.randrange(1, 4)):
        job.after(rng.uniform(2.0, 30.0), lambda: rng.choice(job.alive()).request_stop())
    for _ in range(rng.randrange(0, 4) if seed % 2 else 0):
        at = rng.uniform(0.0, 40.0)
        name = f"n{rng.randrange(n):05}"
        job.after(at, (lambda: fail_any_rank(job)) if rng.random() < 0.5 else (lambda name=name: job.kill(name)))
    job.run(until=3600.0)
    return job


@pytest.mark.parametrize("seed", range(40))
def test_all_nodes_stop_at_the_same_step(seed):
    job = run_stopping_job(seed)
    assert job.is_over(), f"the job still runs after {job.now} s"
    assert len({node.decision.next_step for node in job.alive()}) == 1
    if not job.failures:
        assert {node.decision.next_step for node in job.all()} == {NextStep.DONE}
        assert len({node.stop_step for node in job.all()}) == 1
        assert job.now < 60.0

"""Collectives over gloo on several nodes: who is blamed, and what goes on after a node is lost."""

from functools import partial

import pytest

import mpwatch
from nodes import training
from nodes.training import HALF, STEPS

SLOW = pytest.mark.slow
TRAINING_SECONDS = 90.0  # each rank and each node imports torch
OVER_LOOPBACK = {"backend": "gloo", "env": {"GLOO_SOCKET_IFNAME": "lo"}}
STALLING = {**OVER_LOOPBACK, "backend": mpwatch.Backend("gloo", stall_after=0.5)}


@pytest.fixture
def patient_job(job):
    """A job that waits for ranks that import torch."""
    job.outcomes = partial(job.outcomes, within=TRAINING_SECONDS)
    return job


@SLOW
def test_training_goes_on_from_its_checkpoint_when_a_node_is_killed(job, tmp_path):
    job.rendezvous |= {"nnodes": (1, 2), "last_call_timeout": 10.0}  # the nodes begin together, however busy
    kept, lost = job.start_several(2, training.train, 2, args=[str(tmp_path / "checkpoint")], **OVER_LOOPBACK)
    world = job.await_world(4, TRAINING_SECONDS)
    world.of(kept).order("return")  # they enter a collective, and wait for the ranks of the killed node
    lost.kill()
    job.await_end(world)
    (result,) = job.results([kept], TRAINING_SECONDS)
    assert dict(result.items()) == dict.fromkeys((0, 1), (HALF, 4.0 * HALF + 2.0 * (STEPS - HALF)))
    assert (result.restarts, [attempt.state.name for attempt in result.attempts]) == (0, ["FAILED", "SUCCEEDED"])


def assert_blamed(outcome, rank, kind):
    assert type(outcome.error) is mpwatch.RunFailedError
    cause = outcome.result.root_cause
    assert (cause.rank, cause.kind.name, cause.is_secondary) == (rank, kind, False)
    assert str(outcome.error).startswith(f"rank {rank} ")
    return cause


@SLOW
def test_a_rank_that_others_wait_for_is_blamed_on_every_node(patient_job):
    """The victims are on the other node, and on its own."""
    missing = 0
    patient_job.start_several(2, training.all_reduce_without_one, 2, args=[missing], **OVER_LOOPBACK)
    for outcome in patient_job.outcomes():
        assert "hang" in assert_blamed(outcome, missing, "HANG").stack
        assert outcome.result.worker_states[missing].name == "FAILED"
        victims = [failure.is_secondary for rank, failure in outcome.result.failures.items() if rank != missing]
        assert victims
        assert all(victims)


def test_a_rank_that_called_another_collective_is_blamed_on_every_node(patient_job):
    """Only both nodes together have a majority: gloo's errors name other ranks."""
    for nprocs in (1, 2):
        patient_job.start(training.all_reduce_with_other_shape, nprocs, args=[1], **OVER_LOOPBACK)
    pids = set()
    for outcome in patient_job.outcomes():
        cause = assert_blamed(outcome, 1, "MISMATCH")
        assert "all_reduce #2 with float32[17] (training.py:" in cause.evidence
        assert "with float32[16]" in cause.evidence
        assert all(failure.is_secondary for rank, failure in outcome.result.failures.items() if rank != 1)
        pids.add(cause.pid)
    assert len(pids) == 1


@SLOW
def test_a_rank_that_has_returned_is_blamed_on_every_node_if_others_wait_for_it(patient_job):
    """Each node has one rank, so none can see alone that they do not fit."""
    patient_job.start_several(2, training.leave_others_waiting, args=[True], **STALLING)
    for outcome in patient_job.outcomes():
        assert str(outcome.error).startswith("rank 1 ")
        assert outcome.result.root_cause.summary.startswith(
            (
                "has returned, but rank 0 waits for it in all_reduce #2 (float32[16]",
                "has not joined all_reduce #2 (float32[16]",  # rank 0 had lost the connection a moment before
            )
        )


@SLOW
def test_one_node_warns_of_a_rank_that_others_wait_for(patient_job):
    patient_job.start_several(2, training.leave_others_waiting, args=[False], timeout=30.0, **STALLING)
    late = "rank 1 has not joined all_reduce #2 (float32[16], default group), in which rank 0 waits (training.py:"
    for outcome in patient_job.outcomes():
        assert outcome.result.root_cause is None
        assert late in str(outcome.error)
    assert sum(node.log.count("in a collective: " + late) for node in patient_job.nodes) == 1

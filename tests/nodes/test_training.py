"""Collectives and training over gloo on several nodes: the result is the same as on one node, also after a node is lost."""

import pytest

from nodes.harness import NODE_TIMEOUT, Job
from nodes.training import (
    HALF,
    HEARTBEAT_SECONDS,
    STEPS,
    all_reduce_with_other_shape,
    all_reduce_without_one,
    leave_others_waiting,
    save_digits,
    train,
    train_with_order,
    wait_in_barrier,
)

EXIT_SECONDS = 1.0  # seconds, from the death of a watcher until its ranks have exited
DETECTION_SECONDS = NODE_TIMEOUT + 1.0  # from the loss of a node until the others have stopped their ranks
TRAINING_SECONDS = 60.0  # seconds; each rank imports torch


OVER_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
PATIENT_NODE_TIMEOUT = 15  # seconds: on a busy machine a node that imports torch may be silent for two seconds


def make_options(folder):
    """Return the options of a node that trains with this folder."""
    save_digits(folder)
    env = {**OVER_LOOPBACK, "TORCHINDUCTOR_CACHE_DIR": str(folder)}  # else in /tmp, as soon as torch has an optimizer
    return {"args": [str(folder)], "backend": "gloo", "env": env}


def get_common_value(outcomes):
    """Return the value of all ranks, which must be the same."""
    for outcome in outcomes:
        assert (outcome.error, outcome.text, outcome.state) == ("", "", "SUCCEEDED")
    first, *others = [value for outcome in outcomes for value in outcome.values.values()]
    assert others == [first] * len(others)
    return first


@pytest.fixture(scope="module")
def undisturbed(fork_server, hostnames, tmp_path_factory):
    """The value of the training on one node alone, with four ranks."""
    job = Job(fork_server, hostnames=hostnames)
    alone = job.start(train, 4, rendezvous=False, **make_options(tmp_path_factory.mktemp("undisturbed")))
    yield get_common_value([alone.outcome(TRAINING_SECONDS)])
    job.close()


@pytest.mark.slow
def test_training_on_two_nodes_is_training_on_one_bit_for_bit(job, undisturbed, tmp_path):
    nodes = job.start_several(2, train, 2, **make_options(tmp_path))
    trained = get_common_value([node.outcome(TRAINING_SECONDS) for node in nodes])
    assert trained == undisturbed
    assert len(trained["losses"]) == STEPS
    assert trained["losses"][-1] < 0.3 * trained["losses"][0]


@pytest.mark.slow
def test_training_goes_on_from_its_checkpoint_when_a_node_is_killed(job, undisturbed, tmp_path):
    job.rendezvous |= {"nnodes": (1, 2), "options": {"last_call_timeout": 10.0}}  # the nodes begin together, however busy
    kept, lost = job.start_several(2, train_with_order, 2, **make_options(tmp_path))
    world = job.await_world(4, TRAINING_SECONDS)
    world.of(kept).order("return")  # they enter a collective, and wait for the ranks of the killed node
    killed_at = lost.kill()
    assert job.await_end(world.of(lost)) - killed_at < EXIT_SECONDS
    assert job.await_end(world) - killed_at < DETECTION_SECONDS
    outcome = kept.outcome(TRAINING_SECONDS)
    trained = get_common_value([outcome])
    assert (outcome.restarts, [attempt["state"] for attempt in outcome.attempts]) == (0, ["FAILED", "SUCCEEDED"])
    assert outcome.values.keys() == {0, 1}
    assert trained["first_step"] == HALF
    assert trained["losses"][:HALF] == undisturbed["losses"][:HALF]
    assert trained["losses"] == pytest.approx(undisturbed["losses"], rel=1e-3)


@pytest.mark.parametrize("missing", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_others_wait_for_is_blamed_on_every_node(job, missing):
    """The victims are on its own node and on the other one."""
    job.rendezvous["node_timeout"] = PATIENT_NODE_TIMEOUT
    for node in job.start_several(2, all_reduce_without_one, 2, args=[missing], backend="gloo", env=OVER_LOOPBACK):
        outcome = node.outcome(TRAINING_SECONDS)
        assert (outcome.error, outcome.state) == ("RunFailedError", "FAILED")
        cause = outcome.root_cause
        assert (cause["rank"], cause["kind"], cause["is_secondary"]) == (missing, "HANG", False)
        assert "hang" in cause["stack"]
        assert f"rank {missing}" in outcome.text.splitlines()[0]
        assert outcome.worker_states[missing] == "FAILED"
        victims = [failure["is_secondary"] for rank, failure in outcome.failures.items() if rank != missing]
        assert victims
        assert all(victims)


@pytest.mark.parametrize("odd", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_called_another_collective_is_blamed_on_every_node(job, odd):
    """Only both nodes together have a majority: gloo's errors name other ranks."""
    job.rendezvous["node_timeout"] = PATIENT_NODE_TIMEOUT
    options = {"args": [odd], "backend": "gloo", "env": OVER_LOOPBACK}
    nodes = job.start_several(2, all_reduce_with_other_shape, 2, **options)
    pids = set()
    for node in nodes:
        outcome = node.outcome(TRAINING_SECONDS)
        assert (outcome.error, outcome.state) == ("RunFailedError", "FAILED")
        cause = outcome.root_cause
        assert (cause["rank"], cause["kind"], cause["is_secondary"]) == (odd, "MISMATCH", False)
        assert "all_reduce #2 with float32[17] (training.py:" in cause["evidence"]
        assert "with float32[16]" in cause["evidence"]
        assert f"rank {odd} " in outcome.text.splitlines()[0]
        assert all(failure["is_secondary"] for rank, failure in outcome.failures.items() if rank != odd)
        pids.add(cause["pid"])
    assert len(pids) == 1


def test_a_rank_that_has_returned_is_blamed_on_every_node_if_others_wait_for_it(job):
    """Each node has one rank, so none can see alone that they do not fit."""
    job.rendezvous["node_timeout"] = PATIENT_NODE_TIMEOUT
    options = {"args": [True], "backend": {"name": "gloo", "stall_after": 0.5}, "env": OVER_LOOPBACK}
    for node in job.start_several(2, leave_others_waiting, 1, **options):
        outcome = node.outcome(TRAINING_SECONDS)
        assert outcome.root_cause["rank"] == 1, outcome.text
        assert outcome.root_cause["summary"].startswith(
            (
                "has returned, but rank 0 waits for it in all_reduce #2 (float32[16]",
                "has not joined all_reduce #2 (float32[16]",  # rank 0 had lost the connection a moment before
            )
        )
        assert outcome.text.splitlines()[0].startswith("rank 1 ")


@pytest.mark.slow
def test_the_leader_warns_of_a_rank_that_others_wait_for(job):
    options = {"args": [False], "backend": {"name": "gloo", "stall_after": 0.5}, "env": OVER_LOOPBACK, "timeout": 15.0}
    first, second = job.start_several(2, leave_others_waiting, 1, **options)
    late = "rank 1 has not joined all_reduce #2 (float32[16], default group), in which rank 0 waits (training.py:"
    for node in (first, second):
        outcome = node.outcome(TRAINING_SECONDS)
        assert outcome.root_cause is None
        assert late in outcome.text
    assert first.log.count("in a collective: " + late) == 1
    assert "in a collective: " not in second.log


def test_a_rank_that_is_silent_because_it_waits_for_another_node_is_not_blamed(job):
    options = {"backend": "gloo", "env": OVER_LOOPBACK, "heartbeat_timeout": 20 * HEARTBEAT_SECONDS}
    for node in job.start_several(2, wait_in_barrier, **options):
        outcome = node.outcome(TRAINING_SECONDS)
        assert (outcome.root_cause["rank"], outcome.root_cause["kind"]) == (1, "HANG")
        assert "was silent" in outcome.failures[0]["evidence"]
        assert "wait_in_barrier" in outcome.root_cause["stack"]


@pytest.mark.slow
def test_a_node_whose_rank_others_wait_for_restarts_with_them(job):
    """The node has no other rank that could be a victim."""
    options = {"args": [2], "backend": "gloo", "env": OVER_LOOPBACK, "max_restarts": 1}
    nodes = [job.start(all_reduce_without_one, nprocs, **options) for nprocs in (2, 1)]
    for node in nodes:
        outcome = node.outcome(TRAINING_SECONDS)
        assert (outcome.error, outcome.text, outcome.restarts) == ("", "", 1)
        assert [attempt["cause"] for attempt in outcome.attempts] == [2, None]
    assert nodes[0].outcome().blamed == {0: False, 1: False}
    assert nodes[1].outcome().blamed == {2: True}
    assert "worker_stopped" not in nodes[1].outcome().events

"""Real collectives and training over gloo: where its ranks are makes no difference, and a node that is lost costs it nothing."""

import pytest

from .harness import NODE_TIMEOUT, Job
from .training import (
    BEAT_SECONDS,
    HALF,
    STEPS,
    keep_digits,
    meets_all_but_one,
    trains,
    trains_and_shows_itself,
    waits_for_one_that_beats,
)

GONE = 1.0  # seconds, from the death of a watcher until its ranks are gone
NOTICED = NODE_TIMEOUT + 1.0  # seconds, from the loss of a node until the others have acted
TRAINED = 60.0  # seconds; each rank imports torch


OVER_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


def options_for(folder):
    """Of a node that trains there."""
    keep_digits(folder)
    env = {**OVER_LOOPBACK, "TORCHINDUCTOR_CACHE_DIR": str(folder)}  # else in /tmp, as soon as torch has an optimizer
    return {"args": [str(folder)], "backend": "gloo", "env": env}


def agreed(outcomes):
    """What all ranks have returned: the same."""
    for outcome in outcomes:
        assert (outcome.error, outcome.text, outcome.state) == ("", "", "SUCCEEDED")
    first, *others = [value for outcome in outcomes for value in outcome.values.values()]
    assert others == [first] * len(others)
    return first


@pytest.fixture(scope="module")
def undisturbed(nursery, hostnames, tmp_path_factory):
    """What becomes of the training on one node alone, with four ranks."""
    job = Job(nursery, hostnames=hostnames)
    alone = job.start(trains, 4, terms=False, **options_for(tmp_path_factory.mktemp("undisturbed")))
    yield agreed([alone.outcome(TRAINED)])
    job.close()


def test_training_on_two_nodes_is_training_on_one_bit_for_bit(job, undisturbed, tmp_path):
    nodes = job.start_several(2, trains, 2, **options_for(tmp_path))
    trained = agreed([node.outcome(TRAINED) for node in nodes])
    assert trained == undisturbed
    assert len(trained["losses"]) == STEPS
    assert trained["losses"][-1] < 0.3 * trained["losses"][0]


def test_training_goes_on_from_its_checkpoint_when_a_node_is_killed(job, undisturbed, tmp_path):
    job.terms["nnodes"] = 1, 2
    kept, lost = job.start_several(2, trains_and_shows_itself, 2, **options_for(tmp_path))
    world = job.await_world(4, TRAINED)
    world.of(kept).order("return")  # they go into a collective, in which the others are missed
    killed_at = lost.kill()
    assert job.await_end(world.of(lost)) - killed_at < GONE
    assert job.await_end(world) - killed_at < NOTICED
    outcome = kept.outcome(TRAINED)
    trained = agreed([outcome])
    assert (outcome.restarts, [attempt["state"] for attempt in outcome.attempts]) == (1, ["FAILED", "SUCCEEDED"])
    assert outcome.values.keys() == {0, 1}
    assert trained["began"] == HALF
    assert trained["losses"][:HALF] == undisturbed["losses"][:HALF]
    assert trained["losses"] == pytest.approx(undisturbed["losses"], rel=1e-3)


@pytest.mark.parametrize("missing", [0, 3])
def test_a_rank_that_others_wait_for_in_vain_is_blamed_on_every_node(job, missing):
    """Those who gave up waiting are on its own node and on the other one."""
    for node in job.start_several(2, meets_all_but_one, 2, args=[missing], backend="gloo", env=OVER_LOOPBACK):
        outcome = node.outcome(TRAINED)
        assert (outcome.error, outcome.state) == ("RunFailedError", "FAILED")
        cause = outcome.root_cause
        assert (cause["rank"], cause["kind"], cause["is_secondary"]) == (missing, "HANG", False)
        assert "dawdle" in cause["stack"]
        assert f"rank {missing}" in outcome.text.splitlines()[0]
        assert outcome.worker_states[missing] == "FAILED"
        complaints = [failure["is_secondary"] for rank, failure in outcome.failures.items() if rank != missing]
        assert complaints
        assert all(complaints)


def test_a_rank_that_is_silent_since_it_waits_for_one_of_another_node_is_not_blamed(job):
    options = {"backend": "gloo", "env": OVER_LOOPBACK, "heartbeat_timeout": 20 * BEAT_SECONDS}
    for node in job.start_several(2, waits_for_one_that_beats, **options):
        outcome = node.outcome(TRAINED)
        assert (outcome.root_cause["rank"], outcome.root_cause["kind"]) == (1, "HANG")
        assert "was silent" in outcome.failures[0]["evidence"]
        assert "waits_for_one_that_beats" in outcome.root_cause["stack"]


def test_a_node_whose_rank_others_wait_for_in_vain_starts_again_with_them(job):
    """None of its own ranks complains: it has no other."""
    options = {"args": [2], "backend": "gloo", "env": OVER_LOOPBACK, "max_restarts": 1}
    nodes = [job.start(meets_all_but_one, nprocs, **options) for nprocs in (2, 1)]
    for node in nodes:
        outcome = node.outcome(TRAINED)
        assert (outcome.error, outcome.text, outcome.restarts) == ("", "", 1)
        assert [attempt["cause"] for attempt in outcome.attempts] == [2, None]
    assert nodes[0].outcome().blamed == {0: False, 1: False}
    assert nodes[1].outcome().blamed == {2: True}
    assert "worker_stopped" not in nodes[1].outcome().events

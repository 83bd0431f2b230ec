"""Real training, data-parallel over gloo: where its ranks are makes no difference, and a node that is lost costs it nothing."""

import pytest

from .harness import NODE_TIMEOUT, Job
from .training import HALF, STEPS, keep_digits, trains, trains_and_shows_itself

GONE = 1.0  # seconds, from the death of a watcher until its ranks are gone
NOTICED = NODE_TIMEOUT + 1.0  # seconds, from the loss of a node until the others have acted
TRAINED = 60.0  # seconds; each rank imports torch


def options_for(folder):
    """Of a node that trains there."""
    keep_digits(folder)
    env = {
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
    }  # else in /tmp, as soon as torch has an optimizer
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

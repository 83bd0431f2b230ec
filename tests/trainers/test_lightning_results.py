"""Tests of what Lightning's Trainer and Fabric return with watched strategies: weights, metrics, state and errors."""

import json
import os
import re
from pathlib import Path

import pytest

from support.programs import ENV, python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(330)]

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
QUIET = {**ENV, "PYTHONWARNINGS": "ignore"}  # torch warns of functions that Lightning calls


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of tests/trainers/fitting.py."""
    folder, temporary = tmp_path_factory.mktemp("fitting"), tmp_path_factory.mktemp("temporary")
    out = python(str(HERE / "fitting.py"), cwd=folder, env={**QUIET, "TMPDIR": str(temporary)}, timeout=300).stdout
    return {**json.loads(out.splitlines()[-1]), "folder": str(folder), "temporary": os.listdir(temporary)}


def test_ranks_restarted_from_a_checkpoint_train_the_same_weights_as_ranks_that_never_failed(results):
    weights, world_size, loss = results["plain"]
    assert world_size == 2
    assert weights != results["first"]
    assert results["fit"]["restarts"] == 1
    assert results["fit"]["weights"] == weights
    assert results["fit"]["metrics"] == [loss] * 3


def test_ranks_are_children_of_the_caller_and_have_its_random_numbers(results):
    record = results["fit"]["recorder"]
    assert record.pop("random") == results["random"]
    assert record == {"parent": results["me"], "rank": 0, "local_rank": "0", "port": True}


def test_the_callers_trainer_has_the_state_of_rank_0(results):
    fit = results["fit"]
    assert fit["state"] == ["fit", "finished", 3, 12]
    assert (fit["best"], fit["last"], fit["score"]) == (True, "last.ckpt", fit["metrics"][0])


def test_a_trainer_predicts_after_fit_but_fits_only_once(results):
    assert results["predictions"] == pytest.approx(results["expected_predictions"])
    assert results["metrics_after_predict"] == {}  # those of the last run
    assert results["fit_again"].startswith("NotImplementedError: this Trainer has fit a model already")


def test_sharded_weights_come_back_whole(results):
    assert results["sharded"] == results["plain"][0]
    assert results["checkpoint"] == [results["folder"] + "/checkpoints", True]
    assert any(
        re.fullmatch(r"the caller's Sharded differs from .*: more\.weight, more\.bias; load them from a checkpoint", warning)
        for warning in results["warned"]
    )


def test_fabric_launches_functions_and_nothing_else(results):
    assert results["fabric"] == [0, 30.0, "an argument of the function's own", results["me"]]
    assert results["fabric_alone"].startswith("TypeError: To spawn processes with the `DDPStrategy` strategy")


def test_bad_strategies_and_options_raise_at_once(results):
    errors = results["errors"]
    expected = {
        "name": "TypeError: watched() takes an instance of one of Lightning's strategies",
        "option": "TypeError: watched() has no option 'backend'; its options are debug, env, grace_period, ",
        "nodes": "ValueError: watched() starts ranks on one machine, but num_nodes=2",
        "sending": "LaunchError: args[0].lock is a _thread.lock, which cannot be sent to the ranks",
    }
    assert errors.keys() == expected.keys()
    for name, text in expected.items():
        assert errors[name].startswith(text)


def test_environment_and_temporary_folder_are_unchanged(results):
    assert results["environment"] == {}
    assert [name for name in results["temporary"] if not name.startswith("torchinductor_")] == []  # a cache of torch's own


def test_the_example_learns_the_digits():
    out = python(str(EXAMPLES / "lightning_digits.py"), env=QUIET).stdout
    assert float(re.search(r"after 8 epochs on 2 ranks: loss ([\d.]+)", out)[1]) < 0.2
    assert float(re.search(r"test accuracy: ([\d.]+)%", out)[1]) >= 95

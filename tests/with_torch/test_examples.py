"""The examples run as users run them. A training under mpwatch has exactly the losses that it has under torchrun."""

import json
import re
from pathlib import Path

import pytest

from support.programs import ENV, python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a training takes half a minute, and more on a busy machine

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name, *args):
    return python("-W", "default", str(EXAMPLES / name), *args, timeout=250)


def test_the_losses_are_those_under_torchrun():
    script = str(Path(__file__).parent / "few_steps.py")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    expected = python("-W", "default", *torchrun, script, env={**ENV, "PYTHONWARNINGS": "default"}).stdout
    found = python("-W", "default", script).stdout
    assert len(json.loads(found)) == 2
    assert json.loads(found) == json.loads(expected)


def test_train_digits_reaches_95_percent():
    out = run_example("train_digits.py").stdout
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", out)]
    assert len(losses) == 12
    assert losses[-1] < 0.1 * losses[0]
    assert float(re.search(r"test accuracy of rank 0's model: ([\d.]+)%", out)[1]) >= 95


def test_a_preempted_training_has_the_weights_of_an_undisturbed_one(tmp_path):
    *stops, weights = run_example("preempted.py").stdout.splitlines()
    assert len(stops) == 3
    assert all(re.fullmatch(r"stopped at step \d+ \(request_stop\(\) in rank 1\)", line) for line in stops)
    assert run_example("preempted.py", str(tmp_path / "checkpoint.pt")).stdout.splitlines() == [weights]


def test_library_trainer_returns_a_model_and_raises():
    out = run_example("library_trainer.py").stdout
    assert "weight 3.000, bias 2.000" in out
    assert "fit() raised ArithmeticError('the loss is not a number in epoch 1')" in out


def test_a_resumed_training_has_the_weights_of_one_without_failures(tmp_path):
    trace = tmp_path / "trace.json"
    done = run_example("resume.py", str(trace))
    killed, also_killed, last = re.findall(r"^attempt \d: [\d.]+ s, (.*)$", done.stdout, re.MULTILINE)
    assert all(re.fullmatch(r"rank [01] failed first: SIGNAL 9", text) for text in (killed, also_killed)), done.stdout
    assert last == "SUCCEEDED"
    accuracy, undisturbed = re.search(r"test accuracy: ([\d.]+)%, undisturbed ([\d.]+)%", done.stdout).groups()
    assert accuracy == undisturbed
    assert float(accuracy) >= 95
    assert done.stdout.endswith("; the same weights: True\n")
    assert done.stderr.count("restarting ranks 0-1") == 2
    assert json.loads(trace.read_text())["traceEvents"]

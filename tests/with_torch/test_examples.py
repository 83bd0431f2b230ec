"""The examples run as users run them. A training under mpwatch has exactly the losses that it has under torchrun."""

import json
import re
from pathlib import Path

import pytest

from support.programs import ENV, python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a training takes half a minute, and more on a busy machine

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name, *args, check=True):
    return python("-W", "default", str(EXAMPLES / name), *args, timeout=250, check=check)


def test_the_losses_are_those_under_torchrun():
    script = str(Path(__file__).parent / "few_steps.py")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    expected = python("-W", "default", *torchrun, script, env={**ENV, "PYTHONWARNINGS": "default"}).stdout
    found = python("-W", "default", script).stdout
    assert len(json.loads(found)) == 2
    assert json.loads(found) == json.loads(expected)


def test_train_digits_reaches_95_percent():
    lines = run_example("train_digits.py").stdout.splitlines()
    found = [re.fullmatch(r"rank \d: loss ([\d.]+) -> ([\d.]+), test accuracy ([\d.]+)%", line).groups() for line in lines]
    assert len(found) == 4
    assert all(float(last) < 0.1 * float(first) and float(accuracy) >= 95 for first, last, accuracy in found)


def test_train_digits_shows_a_restart_and_the_report_of_a_failure():
    done = run_example("train_digits.py", "--crash", check=False)
    assert "restarting ranks 0-3 (restart 1, 0 left): rank 2 failed first: ArithmeticError" in done.stderr
    assert "RunFailedError: rank 2 failed first: ArithmeticError" in done.stderr


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

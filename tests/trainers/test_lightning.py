"""Lightning's Trainer and Fabric with a watched strategy, where users run them."""

import os
import re
import signal
from pathlib import Path

import pytest

from benchmarks.lightning_failures import run_program
from support.programs import ENV, call, python
from trainers import trainer_programs as programs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(330)]  # the imports take a minute on a busy machine
QUIET = {**ENV, "PYTHONWARNINGS": "ignore"}  # Lightning uses what torch has deprecated


def test_the_caller_has_weights_metrics_state_and_errors_of_the_ranks(tmp_path):
    (folder := tmp_path / "folder").mkdir()
    (temporary := tmp_path / "temporary").mkdir()
    script = str(Path(__file__).with_name("fitting.py"))
    python(script, cwd=folder, env={**QUIET, "TMPDIR": str(temporary)}, timeout=300)
    assert [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")] == []  # a cache of torch's own


def test_the_example_learns_the_digits():
    out = python(str(Path(__file__).parents[2] / "examples" / "lightning_digits.py"), env=QUIET).stdout
    assert float(re.search(r"after 8 epochs on 2 ranks: loss ([\d.]+)", out)[1]) < 0.2
    assert float(re.search(r"test accuracy: ([\d.]+)%", out)[1]) >= 95


def test_lightning_trains_on_two_nodes():
    call(programs.fit_on_two_nodes, env=QUIET, timeout=300)


def test_lightning_saves_and_stops_on_all_ranks(tmp_path):
    call(programs.fit_until_stop, str(tmp_path / "last.ckpt"), cwd=tmp_path, env=QUIET, timeout=300)


ENDS = {  # failure of rank 1: exit status of the program, what it prints
    "raises": (1, "\nrank 1 failed first: BadShardError: shard 1 has 17 columns, not 16"),
    "killed": (128 + signal.SIGKILL, "\nrank 1 was killed by SIGKILL"),
    "interrupted": (1, "\nCtrl-C works as before: True\n"),
}


@pytest.mark.parametrize("failure", ENDS)
def test_a_failure_of_rank_1_ends_the_program_at_once_and_is_reported(failure):
    status, text = ENDS[failure]
    end = run_program("watched", failure, ENV)
    assert end.status == status
    assert text in end.output
    assert failure == "interrupted" or end.raised < 25  # as long as rank 0 is busy
    assert end.left == []
    assert "Received SIGTERM" not in end.output  # Lightning's handler prints it
    if failure == "raises":
        assert "\nthe exception itself: True 17 explained by the strategy\n" in end.output
